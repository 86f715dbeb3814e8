"""Reads config.json of the families that we know into a plain object, as transformers' classes would.

Importing those takes a second, and what they add is little: defaults, a few values that follow from others, and one form
for the parameters of rotary embeddings. Where a file holds anything that we do not know to be plain, `plain_config` says
so by None, and transformers' class reads it, or refuses it with its own reasons.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

Entries = dict[str, Any]


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
    """What a file may leave out, and what follows from what it says."""

    defaults: Mapping[str, Any]
    derive: tuple[Callable[[Entries], None], ...] = ()
    rope: Callable[[Entries, Entries], None] | None = None  # takes the rotary entries out of those that are left over
    aliases: Mapping[str, str] = field(default_factory=dict)  # our name -> the file's


def plain_config(kind: str, raw: Mapping[str, Any]) -> ModelConfig | None:
    """The configuration of this model_type, or None where the family or an entry is not known to be plain."""
    family = FAMILIES.get(kind)
    if family is None:
        return None
    try:
        return ModelConfig(**_read(family, deepcopy(dict(raw))))
    except NotPlain:
        return None


def _read(family: Family, raw: Entries) -> Entries:
    _expect(not _INVOLVED & {name for name, value in raw.items() if value})
    _expect(not set(family.aliases) & set(raw))
    entries = {name: raw.pop(name, deepcopy(default)) for name, default in family.defaults.items()}
    for name, value in entries.items():
        _expect(type(value) in (type(family.defaults[name]), *_ALSO.get(name, ())))
    entries["dtype"] = _dtype(raw)
    for step in family.derive:
        step(entries)
    if family.rope is not None:
        family.rope(entries, raw)
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


def _kv_heads(entries: Entries) -> None:
    if entries["num_key_value_heads"] is None:
        entries["num_key_value_heads"] = entries["num_attention_heads"]


def _head_dim(entries: Entries) -> None:
    if entries["head_dim"] is None:
        _expect(entries["num_attention_heads"] > 0)
        entries["head_dim"] = entries["hidden_size"] // entries["num_attention_heads"]


def _qwen_windows(entries: Entries) -> None:
    if not entries["use_sliding_window"]:
        entries["sliding_window"] = None
    first = entries["max_window_layers"] if entries["sliding_window"] is not None else entries["num_hidden_layers"]
    _layer_types(entries, [index >= first for index in range(entries["num_hidden_layers"])])


def _gemma2_windows(entries: Entries) -> None:
    _layer_types(entries, [index % 2 == 0 for index in range(entries["num_hidden_layers"])])


def _gemma3_windows(entries: Entries) -> None:
    _expect(not entries["use_bidirectional_attention"])  # which halves the window
    pattern = entries["sliding_window_pattern"]
    _expect(pattern > 0)
    _layer_types(entries, [(index + 1) % pattern != 0 for index in range(entries["num_hidden_layers"])])


def _smollm3_windows(entries: Entries) -> None:
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


def _narrow(entries: Entries) -> None:
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


def _rope(theta: float = 10_000.0) -> Callable[[Entries, Entries], None]:
    """One set of parameters for all layers; before transformers 5 they stood in rope_scaling and beside it."""

    def read(entries: Entries, raw: Entries) -> None:
        rope = raw.pop("rope_scaling", None) or entries["rope_parameters"] or {}
        rope.setdefault("rope_theta", raw.pop("rope_theta", theta))
        share = raw.pop("partial_rotary_factor", None)
        if share is not None:
            rope.setdefault("partial_rotary_factor", share)
        _settle(rope, entries["max_position_embeddings"])
        entries["rope_parameters"] = rope

    return read


def _phi3_rope(entries: Entries, raw: Entries) -> None:
    """The trained length stands outside, the rotated share of a head always inside."""
    rope = raw.pop("rope_scaling", None) or entries["rope_parameters"] or {}
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
    rope["full_attention"] |= raw.pop("rope_scaling", None) or {}
    rope["full_attention"].setdefault("rope_theta", raw.pop("rope_theta", 1_000_000.0))
    rope["sliding_attention"].setdefault("rope_theta", raw.pop("rope_local_base_freq", 10_000.0))
    _expect(set(entries["layer_types"]) == set(rope) and "partial_rotary_factor" not in raw)
    for each in rope.values():
        _settle(each, entries["max_position_embeddings"])
    entries["rope_parameters"] = rope


def _settle(rope: Entries, trained: int) -> None:
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    _expect(isinstance(kind, str) and kind in _NEEDED)
    if kind in _SCALED_FROM:
        rope.setdefault(_TRAINED, trained)
    for name, value in rope.items():
        wanted = list if name.endswith("_factor") and name.startswith(("short", "long")) else (int, float)
        _expect(name in ("rope_type", "type") or isinstance(value, wanted) or (value is None and name not in _NEVER_NONE))
    _expect(all(rope.get(name) is not None for name in _NEEDED[kind]))


_NEVER_NONE = ("rope_theta", "partial_rotary_factor", _TRAINED)

# ------------------------------------------------------------------------------------------------------------- families

# Entries that change how transformers reads the others.
_INVOLVED = {
    "per_layer_config", "output_attentions", "text_config", "text_encoder", "decoder", "generator", "is_encoder_decoder",
}  # fmt: skip

_NONE, _NUMBER = type(None), (int, float)
# Types that an entry may have besides its default's.
_ALSO: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("pad_token_id", "bos_token_id", "sliding_window", "n_inner", "word_embed_proj_dim"), (int, _NONE)),
    "eos_token_id": (int, list, _NONE),
    **dict.fromkeys(("layer_types", "no_rope_layers"), (list,)),
    "rope_parameters": (dict,),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), (float, _NONE)),
    "use_bidirectional_attention": (bool, _NONE),
    **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "layerdrop"), _NUMBER),
    **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), _NUMBER),
    "num_key_value_heads": (int,),
    "head_dim": (int,),
}

# What most families have, with Llama's values.
_COMMON: Entries = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_dropout": 0.0,
}
_QWEN: Entries = {
    **_COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA2: Entries = {
    **{name: value for name, value in _COMMON.items() if name != "hidden_act"},
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "use_bidirectional_attention": None,
}
_GEMMA3: Entries = {
    **_GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "sliding_window_pattern": 6,
}
_GPT2: Entries = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "scale_attn_weights": True,
    "use_cache": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "pad_token_id": None,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_OPT: Entries = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "word_embed_proj_dim": None,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "num_attention_heads": 12,
    "activation_function": "relu",
    "layerdrop": 0.0,
    "init_std": 0.02,
    "use_cache": True,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}
_SMOLLM3: Entries = {
    **_COMMON,
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "pad_token_id": 128004,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "layer_types": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
_BIASES: Entries = {"attention_bias": False, "mlp_bias": False}

FAMILIES: Mapping[str, Family] = {
    "llama": Family({**_COMMON, **_BIASES, "pretraining_tp": 1, "head_dim": None}, (_head_dim, _kv_heads), _rope()),
    "mistral": Family(
        {
            **_COMMON,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "head_dim": None,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        (_head_dim,),
        _rope(),
    ),
    "qwen2": Family(_QWEN, (_kv_heads, _qwen_windows), _rope()),
    "qwen3": Family({**_QWEN, "head_dim": 128, "attention_bias": False}, (_kv_heads, _qwen_windows), _rope()),
    "gemma2": Family(_GEMMA2, (_gemma2_windows,), _rope()),
    "gemma3_text": Family(_GEMMA3, (_gemma3_windows,), _gemma3_rope),
    "granite": Family(
        {
            **_COMMON,
            **_BIASES,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        (_kv_heads,),
        _rope(),
    ),
    "olmo2": Family(
        {
            **_COMMON,
            "vocab_size": 50304,
            "pad_token_id": 1,
            "bos_token_id": None,
            "eos_token_id": 50279,
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
        },
        (_kv_heads,),
        _rope(),
    ),
    "phi3": Family(
        {
            **_COMMON,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "max_position_embeddings": 4096,
            _TRAINED: 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
            "pad_token_id": 32000,
            "sliding_window": None,
        },
        (_kv_heads,),
        _phi3_rope,
    ),
    "gpt2": Family(
        _GPT2,
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
    "opt": Family(_OPT, (_narrow,)),
    "smollm3": Family(_SMOLLM3, (_kv_heads, _smollm3_windows), _rope(2_000_000.0)),
}
