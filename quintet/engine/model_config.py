"""Reads config.json of the families that we know into a plain object, as transformers' classes would.

Importing those takes a second, and they add little: defaults, a few values that follow from others, one form for the
parameters of rotary embeddings. Where a file holds anything that is not known to be plain, plain_config() returns None,
and transformers' class reads it, or refuses it with its own reasons.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from quintet.engine.model_defaults import DEFAULTS, Entries


class ModelConfig(SimpleNamespace):
    """A model's configuration, by attribute, under the names that transformers gives."""

    def get_text_config(self) -> "ModelConfig":
        """Itself: wrappers of several modalities are left to transformers."""
        return self

    def to_dict(self) -> Entries:
        return deepcopy(vars(self))


class NotPlain(Exception):
    """An entry that transformers shall judge."""


@dataclass(frozen=True)
class Family:
    """What follows from what a file says, once the defaults are in."""

    derive: tuple[Callable[[Entries, Entries], None], ...] = ()  # given the entries, and what else the file holds
    aliases: Mapping[str, str] = field(default_factory=dict)  # our name -> the file's


def plain_config(kind: str, raw: Mapping[str, Any]) -> ModelConfig | None:
    """The configuration of this model_type, or None where the family or an entry is not known to be plain."""
    family = FAMILIES.get(kind)
    if family is None:
        return None
    try:
        return ModelConfig(**{**_read(DEFAULTS[kind], family, deepcopy(dict(raw))), "model_type": kind})
    except NotPlain:
        return None


def _read(defaults: Entries, family: Family, raw: Entries) -> Entries:
    _expect(not _INVOLVED & {name for name, value in raw.items() if value})
    _expect(not set(family.aliases) & set(raw))
    entries = {name: raw.pop(name, deepcopy(default)) for name, default in defaults.items()}
    for name, value in entries.items():
        _expect(type(value) in (type(defaults[name]), *_ALSO.get(name, ())))
    entries["dtype"] = _dtype(raw)
    for step in family.derive:
        step(entries, raw)
    entries |= {name: entries[own] for name, own in family.aliases.items()}
    _check(entries)
    return {**raw, **entries}


def _expect(plain: bool) -> None:
    if not plain:
        raise NotPlain


def _dtype(raw: Entries) -> torch.dtype | None:
    """Under its name of today, or of before."""
    before, name = raw.pop("torch_dtype", None), raw.pop("dtype", None)
    name = before if name is None else name
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    _expect(name is None or isinstance(dtype, torch.dtype))
    return dtype


def _check(entries: Entries) -> None:
    """What transformers refuses or rewrites, in some family at least."""
    heads, kinds = entries["num_attention_heads"], entries.get("layer_types")
    _expect(heads > 0 and entries["hidden_size"] % heads == 0 and (entries.get("head_dim") or 2) % 2 == 0)
    if kinds is not None:
        _expect(len(kinds) == entries["num_hidden_layers"] and set(kinds) <= {"full_attention", "sliding_attention"})


# ---------------------------------------------------------------------------------------------- what follows from what


def _kv_heads(entries: Entries, raw: Entries) -> None:
    if entries["num_key_value_heads"] is None:
        entries["num_key_value_heads"] = entries["num_attention_heads"]


def _head_dim(entries: Entries, raw: Entries) -> None:
    if entries["head_dim"] is None:
        _expect(entries["num_attention_heads"] > 0)
        entries["head_dim"] = entries["hidden_size"] // entries["num_attention_heads"]


def _qwen_windows(entries: Entries, raw: Entries) -> None:
    if not entries["use_sliding_window"]:
        entries["sliding_window"] = None
    first = entries["max_window_layers"] if entries["sliding_window"] is not None else entries["num_hidden_layers"]
    _layer_types(entries, [index >= first for index in range(entries["num_hidden_layers"])])


def _gemma2_windows(entries: Entries, raw: Entries) -> None:
    _layer_types(entries, [index % 2 == 0 for index in range(entries["num_hidden_layers"])])


def _gemma3_windows(entries: Entries, raw: Entries) -> None:
    _expect(not entries["use_bidirectional_attention"])  # which halves the window
    pattern = raw.get("sliding_window_pattern", 6)
    _expect(isinstance(pattern, int) and pattern > 0)
    _layer_types(entries, [(index + 1) % pattern != 0 for index in range(entries["num_hidden_layers"])])


def _smollm3_windows(entries: Entries, raw: Entries) -> None:
    layers, interval = entries["num_hidden_layers"], entries["no_rope_layer_interval"]
    if entries["no_rope_layers"] is None:
        _expect(interval > 0)
        entries["no_rope_layers"] = [int((index + 1) % interval != 0) for index in range(layers)]
    _expect(len(entries["no_rope_layers"]) >= layers)
    windows = entries["use_sliding_window"] and entries["sliding_window"] is not None
    _layer_types(entries, [windows and not entries["no_rope_layers"][index] for index in range(layers)])


def _layer_types(entries: Entries, sliding: list[bool]) -> None:
    if entries["layer_types"] is None:
        entries["layer_types"] = ["sliding_attention" if each else "full_attention" for each in sliding]


def _narrow(entries: Entries, raw: Entries) -> None:
    if entries["word_embed_proj_dim"] is None:
        entries["word_embed_proj_dim"] = entries["hidden_size"]


# ---------------------------------------------------------------------------------------------------- rotary embeddings

# What a kind needs besides its base; the others that transformers knows are left to it.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_TRAINED = "original_max_position_embeddings"  # of these three kinds the table depends on it
_SCALED_FROM = ("llama3", "yarn", "longrope")


def _no_rope(entries: Entries, raw: Entries) -> None:
    _expect("rope_scaling" not in raw)


def _rope(theta: float = 10_000.0) -> Callable[[Entries, Entries], None]:
    """One set of parameters for all layers; before transformers 5 they stood in rope_scaling and beside it."""

    def read(entries: Entries, raw: Entries) -> None:
        rope = _given(entries, raw)
        rope.setdefault("rope_theta", raw.pop("rope_theta", theta))
        share = raw.pop("partial_rotary_factor", None)
        if share is not None:
            rope.setdefault("partial_rotary_factor", share)
        _settle(rope, entries["max_position_embeddings"])
        entries["rope_parameters"] = rope

    return read


def _given(entries: Entries, raw: Entries) -> Entries:
    rope: Entries = raw.pop("rope_scaling", None) or entries["rope_parameters"] or {}
    _expect(type(rope) is dict)
    return rope


def _phi3_rope(entries: Entries, raw: Entries) -> None:
    """The trained length stands outside, the rotated share of a head always inside."""
    rope = _given(entries, raw)
    rope.setdefault("rope_theta", raw.pop("rope_theta", 10_000.0))
    rope.setdefault("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if rope.get("rope_type", rope.get("type")) == "longrope":
        rope[_TRAINED] = entries[_TRAINED]
    _settle(rope, entries["max_position_embeddings"])
    _expect(rope["rope_type"] in ("default", "longrope"))
    turned = int(entries["hidden_size"] // entries["num_attention_heads"] * rope["partial_rotary_factor"])
    for name in ("short_factor", "long_factor"):
        _expect(rope.get(name) is None or len(rope[name]) == turned // 2)
    entries["rope_parameters"] = rope


def _gemma3_rope(entries: Entries, raw: Entries) -> None:
    """One set for each kind of layer; rope_scaling is that of the layers that see all."""
    rope = entries["rope_parameters"]
    if rope is None:
        rope = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "default"}}
    _expect(set(rope) == {"sliding_attention", "full_attention"} and all(type(each) is dict for each in rope.values()))
    scaling = raw.pop("rope_scaling", None) or {}
    _expect(type(scaling) is dict)
    rope["full_attention"] |= scaling
    rope["full_attention"].setdefault("rope_theta", raw.pop("rope_theta", 1_000_000.0))
    rope["sliding_attention"].setdefault("rope_theta", raw.pop("rope_local_base_freq", 10_000.0))
    _expect(set(entries["layer_types"]) == set(rope) and "partial_rotary_factor" not in raw)
    for each in rope.values():
        _settle(each, entries["max_position_embeddings"])
    entries["rope_parameters"] = rope


def _settle(rope: Entries, trained: int) -> None:
    kind = str(rope.setdefault("rope_type", rope.get("type", "default")))
    _expect(kind in _NEEDED)
    if kind in _SCALED_FROM:
        rope.setdefault(_TRAINED, trained)
    for name, value in rope.items():
        wanted = list if name.endswith("_factor") and name.startswith(("short", "long")) else (int, float)
        _expect(
            name in ("rope_type", "type") or isinstance(value, wanted) or (value is None and name not in _NEVER_NONE)
        )
    _expect(all(rope.get(name) is not None for name in _NEEDED[kind]))


_NEVER_NONE = ("rope_theta", "partial_rotary_factor", _TRAINED)

# ------------------------------------------------------------------------------------------------------------- families

# Entries that change how transformers reads the others.
_INVOLVED = {
    "decoder", "generator", "get_text_config", "is_encoder_decoder", "output_attentions", "per_layer_config",
    "text_config", "text_encoder", "to_dict",
}  # fmt: skip

_NONE, _NUMBER = type(None), (int, float)
# Types that an entry may have besides its default's.
_ALSO: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("pad_token_id", "bos_token_id", "sliding_window", "n_inner", "word_embed_proj_dim"), (int, _NONE)),
    "summary_activation": (str,),
    "eos_token_id": (int, list, _NONE),
    **dict.fromkeys(("layer_types", "no_rope_layers"), (list,)),
    "rope_parameters": (dict,),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), (float, _NONE)),
    "use_bidirectional_attention": (bool, _NONE),
    **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"), _NUMBER),
    **dict.fromkeys(("layerdrop", "summary_first_dropout"), _NUMBER),
    **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), _NUMBER),
    "num_key_value_heads": (int,),
    "head_dim": (int,),
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family((_head_dim, _kv_heads, _rope())),
    "mistral": Family((_head_dim, _rope())),
    "qwen2": Family((_kv_heads, _qwen_windows, _rope())),
    "qwen3": Family((_kv_heads, _qwen_windows, _rope())),
    "gemma2": Family((_gemma2_windows, _rope())),
    "gemma3_text": Family((_gemma3_windows, _gemma3_rope)),
    "granite": Family((_kv_heads, _rope())),
    "olmo2": Family((_kv_heads, _rope())),
    "phi3": Family((_kv_heads, _phi3_rope)),
    "gpt2": Family(
        (_no_rope,),
        {
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
    "opt": Family((_narrow, _no_rope)),
    "smollm3": Family((_kv_heads, _smollm3_windows, _rope(2_000_000.0))),
}
