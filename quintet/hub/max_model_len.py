"""Maximum length of a request (max_model_len): the model's own, or the one asked for."""

from typing import Any

from quintet.config import EngineConfig
from quintet.hub.config_checks import MAX_INT32

LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")  # what configs call the longest text
UNKNOWN_LENGTH = 2048  # tokens of states alone, which hold any number, where no config says: as in vLLM


def resolve_max_model_len(
    config: EngineConfig, hf_config: Any, num_positions: int | None = None, made_for: int | None = None
) -> int:
    """The longest request that the model is built for: what was asked for, or the model's own length.

    `counted`: its positions, where its family counts them otherwise; `made_for`: tokens that it embeds by default.
    """
    own = num_positions or model_length(hf_config)
    asked = config.max_model_len
    if not isinstance(asked, int):
        return min(own, made_for or own)
    if asked > own and _trained_positions(hf_config):
        raise ValueError(
            f"max_model_len={asked} is beyond the model's {own} tokens; lower it, or scale its rotary positions with "
            "hf_overrides={'rope_scaling': {...}}"
        )
    return asked


def model_length(hf_config: Any) -> int:
    """Positions that the model was made for, stretched where its rotary scaling stretches them; they are int32."""
    trained = _trained_positions(hf_config)
    endless = any(getattr(hf_config, name, None) == -1 for name in LENGTHS)  # as XLNet's config says it
    if not trained and (endless or set(getattr(hf_config, "layer_types", None) or ()) == {"linear_attention"}):
        return UNKNOWN_LENGTH
    if not trained:
        raise ValueError(
            f"config.json does not say how long a text {hf_config.model_type} was made for; set "
            "hf_overrides={'max_position_embeddings': ...}"
        )
    rope = getattr(hf_config, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type"), rope.get("factor") or 1
    if kind in ("linear", "dynamic"):
        return min(int(trained * factor), MAX_INT32)
    if kind == "yarn":
        return min(max(trained, int(rope.get("original_max_position_embeddings", 0) * factor)), MAX_INT32)
    return trained


def _trained_positions(hf_config: Any) -> int:
    """Positions that the config speaks of; 0: none."""
    lengths = (getattr(hf_config, name, None) for name in LENGTHS)
    return next((int(each) for each in lengths if each and each != -1), 0)
