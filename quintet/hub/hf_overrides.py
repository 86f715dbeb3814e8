"""hf_overrides: a user's entries into those of a config.json, and what of them is misspelt."""

from collections.abc import Mapping
from typing import Any

from quintet.common.suggestions import refuse_unknown
from quintet.config import EngineConfig
from quintet.hub.hf_config import HFConfig, Overrides

QUANTIZATION_ENTRIES = (
    "quantization_config",
    "compression_config",
)  # where a config.json says how its weights are kept
# Entries of hf_overrides that are no model's: vLLM's way to say how weights are quantized while they are loaded
QUANTIZATION_OPTIONS = ("quantization_config_dict_json", "quantization_config_file")
METHODS_WITH_OPTIONS = ("bitsandbytes", "torchao")
# What a rotary embedding's parameters may hold, over all the kinds there are.
_ROPE_KEYS = (
    "attention_factor", "beta_fast", "beta_slow", "factor", "full_attention", "high_freq_factor", "long_factor",
    "long_mscale", "low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings",
    "partial_rotary_factor", "rope_theta", "rope_type", "short_factor", "short_mscale", "sliding_attention",
    "truncate", "type",
)  # fmt: skip
_ROPE_FIELDS = ("rope_parameters", "rope_scaling")  # transformers' name since 5.0, and before


def model_overrides(config: EngineConfig) -> Overrides:
    """The hf_overrides that replace entries of config.json, or a function; the others say how to quantize."""
    given = config.hf_overrides or {}
    if callable(given):
        return given
    options = (
        (*QUANTIZATION_OPTIONS, *QUANTIZATION_ENTRIES[:1])
        if requested_quantization(config) in METHODS_WITH_OPTIONS and given.get(QUANTIZATION_ENTRIES[0])
        else QUANTIZATION_OPTIONS
    )
    return {name: value for name, value in given.items() if name not in options} or None


def requested_quantization(config: EngineConfig) -> str | None:
    """The name of a quantization, if one was given."""
    return config.quantization or ("bitsandbytes" if config.load_format == "bitsandbytes" else None)


LENGTH = "max_position_embeddings"  # of models whose own config has no such entry, it is asked for


def known_names(config: HFConfig) -> set[str]:
    """Returns the names that overrides may use besides the file's own entries."""
    names = {*vars(config), LENGTH}
    if "rope_parameters" in names:
        names |= {"rope_scaling", "rope_theta", "partial_rotary_factor"}
    return names


def merge_overrides(raw: dict[str, Any], overrides: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Deep: an object is merged entry by entry, anything else is replaced. `known` refuses typos inside objects."""
    result = dict(raw)
    for name, value in _under_rope_field(raw, overrides).items():
        old = raw.get(name)
        if name in _ROPE_FIELDS and isinstance(value, Mapping):
            result[name] = _merge_rope(old if isinstance(old, dict) else {}, value)
        elif isinstance(value, Mapping) and isinstance(known.get(name), Mapping):
            inner = known[name]
            if inner and not all(isinstance(key, int) for key in inner):
                refuse_unknown(f"entry of hf_overrides[{name!r}]", value, {*inner, *(old or {})})
            result[name] = merge_overrides(old or {}, value, inner)
        else:
            result[name] = value
    return result


def _under_rope_field(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides under the name that this config.json uses, for of two names transformers would drop one."""
    home = next((name for name in _ROPE_FIELDS if raw.get(name)), None)
    if home is None:
        return dict(overrides)
    moved = {home if name in _ROPE_FIELDS else name: value for name, value in overrides.items()}
    for name in ("rope_theta", "partial_rotary_factor"):
        inner = moved.get(home, raw[home])
        if name in moved and name in raw[home] and isinstance(inner, Mapping):
            moved[home] = {**inner, name: moved.pop(name)}
    return moved


def _merge_rope(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of one kind mean nothing to another, so a change of kind starts afresh, but for the base."""
    refuse_unknown("entry of the rope parameters", new, _ROPE_KEYS)
    kinds = [entries.get("rope_type", entries.get("type")) for entries in (old, new)]
    if kinds[1] is not None and kinds[0] != kinds[1]:
        old = {name: old[name] for name in ("rope_theta", "partial_rotary_factor") if name in old}
    inner = {
        name: _merge_rope(old.get(name) or {}, value) if isinstance(value, Mapping) else value
        for name, value in new.items()
    }
    return {**old, **inner}
