"""Rotary positions of a GGUF file as rope_parameters of config.json."""

from typing import Any

from quintet.gguf.model import GGUFModel


def rope(model: GGUFModel, partial: bool = False, base: float = 1e4) -> dict[str, Any]:
    """rope_parameters; ValueError where part of each head is turned in a family that turns all of it."""
    entries: dict[str, Any] = {"rope_type": "default", "rope_theta": model.number("rope.freq_base", base)}
    if partial:
        entries["partial_rotary_factor"] = model.rotary_dim / model.head_dim
    elif model.rotary_dim != model.head_dim:
        raise ValueError(f"{model.path}: {model.rotary_dim} of {model.head_dim} features are turned, not all of them")
    kind = model.get("rope.scaling.type", "linear" if model.get("rope.scale_linear") else "none")
    if kind == "linear":
        factor = model.number("rope.scaling.factor", model.get("rope.scale_linear", 1.0))
        return entries | ({"rope_type": "linear", "factor": factor} if factor != 1 else {})
    if kind == "yarn":
        return entries | _yarn(model)
    if kind not in ("none", "longrope"):
        raise ValueError(f"{model.path}: rope.scaling.type is {str(kind)[:40]!r}, which quintet does not read")
    return entries | _divisors(model)


def _yarn(model: GGUFModel) -> dict[str, Any]:
    entries: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": model.number("rope.scaling.factor"),
        "original_max_position_embeddings": model.required_number("rope.scaling.original_context_length"),
    }
    for key, name in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow"), ("attn_factor", "attention_factor")):
        if model.get(f"rope.scaling.yarn_{key}") is not None:
            entries[name] = model.number(f"rope.scaling.yarn_{key}")
    return entries


def _divisors(model: GGUFModel) -> dict[str, Any]:
    """A divisor for each frequency: Llama 3's, which the file has computed, and those of LongRoPE."""
    names = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
    one, long, short = (model.floats(name, model.rotary_dim // 2) for name in names)
    if one is not None:
        long = short = one
    if long is None or short is None:
        return {}
    length = model.required_number("context_length")
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "attention_factor": model.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": model.required_number("rope.scaling.original_context_length", length),
    }


def yarn_with_growth(model: GGUFModel) -> dict[str, Any]:
    """rope_parameters of Ministral 3: YaRN, with the growth of queries over positions."""
    entries = rope(model)
    if entries["rope_type"] != "yarn":
        raise ValueError(f"{model.path}: positions are of type {entries['rope_type']}, and Ministral 3's are of yarn")
    factor = model.number("rope.scaling.yarn_log_multiplier", 0.0)
    growth = {"llama_4_scaling_beta": model.number("attention.temperature_scale", 0.0)}
    return entries | growth | {"mscale": 1.0, "mscale_all_dim": factor}


def latent_rope(model: GGUFModel) -> dict[str, Any]:
    """rope_parameters of latent attention: of a part of each key that is turned whole.

    The file has one factor of YaRN's temperature, a tenth of what configs call mscale_all_dim; published models have
    the same number as mscale.
    """
    entries = rope(model, partial=True)
    del entries["partial_rotary_factor"]
    multiplier = model.number("rope.scaling.yarn_log_multiplier", 0.0)
    if entries["rope_type"] == "yarn" and multiplier:
        entries |= {"mscale": multiplier / 0.1, "mscale_all_dim": multiplier / 0.1}
    return entries
