"""config.json of types that transformers does not know, in the words of the nearest type that it does.

Published checkpoints of these bring Python for it (auto_map). None of that runs: what it does to the entries is here,
family by family, and transformers' class of the nearest type fills in the rest. Nothing is registered with
transformers.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.hub.config_adapters.adapter import ConfigAdapter, Entries
from quintet.hub.config_adapters.scaled import SCALED_ADAPTERS
from quintet.hub.config_checks import BY_LAYER, check_entries

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SLOPED_WIDTH = 5120  # hidden_size of both Baichuan 13B
NORMALISED_VOCAB = 125696  # tokens of Baichuan 2, by which vLLM knows its head, too


def _internlm(entries: Entries) -> Entries:
    return {**entries, "attention_bias": bool(entries.get("bias"))}


def _internlm1(entries: Entries) -> Entries:
    """Rotary settings are in an entry of their own, `rotary`; "dynamic" has a factor of 1 by default."""
    rotary = entries.get("rotary")
    if rotary is None:
        return _internlm(entries)
    if not isinstance(rotary, Mapping) or rotary.get("type", "dynamic") not in ("origin", "dynamic"):
        raise ValueError(f"rotary is {rotary!r}, not an object whose type is origin or dynamic")
    plain = rotary.get("type") == "origin"
    kind = {"rope_type": "default"} if plain else {"rope_type": "dynamic", "factor": rotary.get("scaling_factor", 1.0)}
    rope = {**kind, "rope_theta": rotary.get("base", 10000)}
    return _internlm({"rope_parameters": rope, **entries})


def _baichuan(entries: Entries) -> Entries:
    """The 13B models have model_max_length alone: they use ALiBi, not rotary positions, also if an override lengthens
    them. The head is normalised from the second generation on; its training loss had one term more (z_loss_weight)."""
    alibi = "max_position_embeddings" not in entries or entries.get("hidden_size") == SLOPED_WIDTH
    length = entries.get("max_position_embeddings") or entries.get("model_max_length") or 4096
    second = "z_loss_weight" in entries or entries.get("vocab_size") == NORMALISED_VOCAB
    return {**entries, "max_position_embeddings": length, "alibi": alibi, "normalised_head": second}


def _chatglm(entries: Entries) -> Entries:
    biased = bool(entries.get("add_qkv_bias") or entries.get("add_bias_linear"))
    heads = {} if entries.get("multi_query_attention") else {"num_key_value_heads": entries.get("num_attention_heads")}
    size = (
        {"vocab_size": entries["padded_vocab_size"]} if entries.get("padded_vocab_size") else {}
    )  # rows of the tables
    return {
        **entries,
        **heads,
        **size,
        "rope_theta": 10000.0 * (entries.get("rope_ratio") or 1.0),
        "attention_bias": biased,
    }


def _bailing(entries: Entries) -> Entries:
    heads = entries.get("num_attention_heads") or 1
    size = entries.get("head_dim") or entries.get("hidden_size", 0) // heads
    if entries.get("rotary_dim") and size:
        entries = {**entries, "partial_rotary_factor": entries["rotary_dim"] / size}
    return {**entries, "head_dim": size, "num_key_value_heads": entries.get("num_key_value_heads") or heads}


BAILING_NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
BAILING = {"n_group": 1, "topk_group": 1, "n_shared_experts": 0, "num_nextn_predict_layers": 0}


def _plamo2(entries: Entries) -> Entries:
    """Attention in every `mamba_step`th layer, in windows unless its index is named."""
    step, layers = entries["mamba_step"], entries["num_hidden_layers"]
    if step <= 1:
        raise ValueError(f"mamba_step={step}: state spaces and attention take turns of two layers or more")

    def kind(index: int) -> str:
        last = layers <= step // 2
        if entries["mamba_enabled"] and (index != layers - 1 if last else index % step != step // 2):
            return "linear_attention"
        return "full_attention" if index in (entries["full_attention_idx"] or ()) else "sliding_attention"

    return {**entries, "layer_types": [kind(index) for index in range(layers)]}


def _rwkv7(entries: Entries) -> Entries:
    """A state holds a text of any length: config.json's max_position_embeddings is that of the training."""
    hidden = entries["hidden_size"]
    dim = entries["head_dim"] or hidden // entries["num_heads"]
    width = entries["intermediate_size"] or -(-int(hidden * (entries["hidden_ratio"] or 4)) // 32) * 32
    values = entries["value_dim"] if isinstance(entries["value_dim"], list) else [entries["value_dim"] or hidden]
    ranks = {
        f"{name}_low_rank_dim": entries[f"{name}_low_rank_dim"] or max(32, round(by * hidden**0.5 * size / 32) * 32)
        for name, by, size in (("decay", 2.5, dim / 64), ("a", 2.5, dim / 64), ("v", 1.7, dim / 64), ("gate", 5, 1))
    }
    rest = {name: value for name, value in entries.items() if name != "max_position_embeddings"}
    sizes = {"head_dim": dim, "num_heads": hidden // dim, "expand": 1, "intermediate_size": width, "value_dim": values}
    return {**rest, **sizes, **ranks}


def _jina_bert(entries: Entries) -> Entries:
    """Later ones norm q and k, and say so by the name of their code alone."""
    later = bool(entries.get("qk_post_norm", "qk-post-norm" in str(entries.get("auto_map"))))
    return {"feed_forward_type": "geglu" if later else "original", **entries, "qk_post_norm": later}


def _jina_flash(entries: Entries) -> Entries:
    rotary = {"rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None}
    for name, known in rotary.items():
        if entries.get(name, known) != known:
            raise ValueError(f"{name} is {entries[name]!r}; {known!r} is known")
    return {**entries, "rope_parameters": {"rope_type": "default", "rope_theta": entries["rotary_emb_base"]}}


def _llama_bidirectional(entries: Entries) -> Entries:
    """Tokens see both ways; `pooling` is how texts become embeddings, or what a score is computed of."""
    known = {"avg": "MEAN", "cls": "CLS", "last": "LAST", "weighted_avg": "WEIGHTED"}
    if entries["pooling"] not in known:
        raise ValueError(f"pooling is {entries['pooling']!r}; {', '.join(known)} are known")
    return {**entries, "is_causal": False, "pooling_type": known[entries["pooling"]]}


def _nomic_moe(entries: Entries) -> Entries:
    """Refuses switches of its code that published checkpoints do not have."""
    for name, known in NOMIC_SWITCHES.items():
        if entries.get(name, known) != known:
            raise ValueError(f"{name} is {entries[name]!r}; {known!r} is known")
    rope = {"rope_type": "default", "rope_theta": entries.pop("rotary_emb_base")}
    return {"has_experts_bias": True, **entries, "rope_parameters": rope}


def _new(entries: Entries) -> Entries:
    """Positions may be learned, and heads' features in pairs or scaled by the length of a text: no published one is."""
    if entries["position_embedding_type"] != "rope":
        raise ValueError(f"position_embedding_type is {entries['position_embedding_type']!r}; 'rope' is known")
    if entries["layer_norm_type"] != "layer_norm":
        raise ValueError(f"layer_norm_type is {entries['layer_norm_type']!r}; 'layer_norm' is known")
    if entries["logn_attention_scale"]:
        raise ValueError("logn_attention_scale, by which scores grow with the length of a text, is not computed")
    scaling = entries.pop("rope_scaling", None) or {}
    kind = {"rope_type": scaling.get("rope_type", scaling.get("type", "default"))}
    rope = {**{name: each for name, each in scaling.items() if name != "type"}, **kind}
    return {"rope_parameters": {**rope, "rope_theta": entries.pop("rope_theta")}, **entries}


NOMIC_SWITCHES = {
    "prenorm": False,
    "causal": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "use_rms_norm": None,
    "expert_choice_router": False,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
}
PLAMO2 = {  # its class's defaults for missing entries
    "attention_window_size": 2048,
    "full_attention_idx": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_num_heads": 64,
    "mamba_step": 2,
    "mamba_enabled": True,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "pad_token_id": None,
}
RWKV7 = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "head_dim": 64,
    "num_heads": None,
    "value_dim": None,
    "hidden_act": "sqrelu",
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "attn": None,
    "tie_word_embeddings": False,
    "vocab_size": 65536,
    **dict.fromkeys(("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim")),
}
FLASH, NOMIC_MOE = "xlm-roberta-flash", "nomic_bert_moe"
# (a type, how positions come in) -> which other the file means: repositories with code of their own say another's
POSITIONS = {("bert", "alibi"): "jina_bert", ("xlm-roberta", "rotary"): FLASH}
# by model_type
LEGACY_ADAPTERS: Mapping[str, ConfigAdapter] = {
    **SCALED_ADAPTERS,
    "baichuan": ConfigAdapter("llama", read=_baichuan),
    "bailing_moe": ConfigAdapter(
        "glm4_moe",
        BAILING_NAMES,
        {**BAILING, "partial_rotary_factor": 1.0, "score_function": "softmax", "first_k_dense_replace": 0},
        _bailing,
    ),
    "bailing_moe_v2": ConfigAdapter(
        "glm4_moe",
        BAILING_NAMES,
        {**BAILING, "partial_rotary_factor": 0.5, "score_function": "sigmoid", "use_qk_norm": True},
        _bailing,
    ),
    "chatglm": ConfigAdapter(
        "glm",
        {
            "num_layers": "num_hidden_layers",
            "ffn_hidden_size": "intermediate_size",
            "kv_channels": "head_dim",
            "multi_query_group_num": "num_key_value_heads",
            "seq_length": "max_position_embeddings",
            "layernorm_epsilon": "rms_norm_eps",
        },
        {"pad_token_id": 0},
        _chatglm,
    ),
    "exaone": ConfigAdapter(
        "llama",
        {
            "num_layers": "num_hidden_layers",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
    ),
    "internlm": ConfigAdapter("llama", defaults={"bias": True}, read=_internlm1),
    "internlm2": ConfigAdapter("llama", defaults={"bias": True}, read=_internlm),
    "jina_bert": ConfigAdapter("bert", read=_jina_bert),
    FLASH: ConfigAdapter(
        "jina_embeddings_v3", defaults={"rotary_emb_base": 10000.0, "lora_adaptations": None}, read=_jina_flash
    ),
    "llama_bidirec": ConfigAdapter("llama", defaults={"pooling": "avg"}, read=_llama_bidirectional),
    "mimo": ConfigAdapter("qwen2", defaults={"num_nextn_predict_layers": 0}),
    "new": ConfigAdapter(
        "gte",
        defaults={
            "position_embedding_type": "rope",
            "layer_norm_type": "layer_norm",
            "logn_attention_scale": False,
            "rope_theta": 10000.0,
            "type_vocab_size": 2,
            "vocab_size": 30528,
            "pad_token_id": 0,
        },
        read=_new,
    ),
    NOMIC_MOE: ConfigAdapter(
        "nomic_bert",
        {
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "n_layer": "num_hidden_layers",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps",
            "activation_function": "hidden_act",
        },
        {"rotary_emb_base": 10000.0, "moe_top_k": 1},
        _nomic_moe,
    ),
    "plamo2": ConfigAdapter("llama", {"hidden_size_per_head": "head_dim"}, PLAMO2, _plamo2),
    "rwkv7": ConfigAdapter("mamba2", defaults=RWKV7, read=_rwkv7),
    "solar": ConfigAdapter(
        "llama",
        defaults={f"bskcn_{which}": [] for which in range(1, 5)} | {"bskcn_tv": [0.9, 0.8]},
    ),
}
# classes with files that name an earlier generation's type (Ling 2.0) -> how their entries are read
TYPE_BY_CLASS = {"BailingMoeV2ForCausalLM": "bailing_moe_v2"}
UNTYPED = {"MiniCPMForCausalLM": "minicpm"}  # classes with early files that name no type -> the type


def resolved_model_type(kind: str, entries: Mapping[str, Any]) -> str:
    """The type that a file means by its model_type."""
    if kind == "nomic_bert" and entries.get("moe_every_n_layers"):
        return NOMIC_MOE
    return POSITIONS.get((kind, str(entries.get("position_embedding_type"))), kind)


def with_model_type(entries: Entries) -> Entries:
    """Returns the entries of a file, with the type that its class implies where it names none."""
    names = entries.get("architectures")
    if "model_type" in entries or not isinstance(names, list):
        return entries
    kind = next((UNTYPED[name] for name in names if isinstance(name, str) and name in UNTYPED), None)
    return entries if kind is None else {**entries, "model_type": kind}


def version() -> bytes:
    """Changes with this file and those of config_adapters: what they made before is then read anew."""
    here = Path(__file__)
    files = [here, *sorted((here.parent / "config_adapters").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


def adapted_config(kind: str, entries: Entries) -> "PretrainedConfig":
    """An object of transformers' class that reads the nearest type, which goes by its own model_type."""
    from transformers import CONFIG_MAPPING

    read_as = (TYPE_BY_CLASS.get(name, kind) for name in entries.get("architectures") or ())
    known = LEGACY_ADAPTERS[next(read_as, kind)]
    for name in BY_LAYER:
        if isinstance(entries.get(name), list):
            raise ValueError(f"{name} is a list, and all layers of {kind} are alike")
    # an override may name an entry as the class does: that one counts
    renamed = {known.names[name]: value for name, value in entries.items() if name in known.names}
    rest = {name: value for name, value in entries.items() if name not in known.names}
    base = CONFIG_MAPPING[known.target_type]
    named = type(f"Foreign{base.__name__}", (base,), {"model_type": kind, "__module__": __name__})
    read = _read_entries(known, {**known.defaults, **renamed, **rest})
    check_entries(read, kind)
    made: PretrainedConfig = named(**{**read, "model_type": kind})
    return made


def _read_entries(known: ConfigAdapter, entries: Entries) -> Entries:
    """Reads the entries by an adapter. ValueError names what they lack, and what is 0 where that is divided by."""
    try:
        return known.read(entries)
    except KeyError as error:
        raise ValueError(f"the entry {error} is missing") from error
    except ZeroDivisionError as error:
        zeros = [name for name, value in entries.items() if value == 0 and not isinstance(value, bool)]
        raise ValueError(f"one of these entries is 0, and may not be: {', '.join(zeros)}") from error
    except TypeError as error:
        raise ValueError(f"an entry has a wrong type: {error}") from error
