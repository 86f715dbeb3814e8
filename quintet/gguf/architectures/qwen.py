"""Qwen's families."""

from collections.abc import Mapping
from dataclasses import replace

from quintet.gguf.architectures.architecture import Architecture, Entries, experts, query_bias
from quintet.gguf.architectures.rope import rope
from quintet.gguf.architectures.tables import EXPERTS, LATER_NORM, LLAMA, MIXTURE
from quintet.gguf.cursor import Array
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames, Computed, Joined


def _qwen2(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model), "use_sliding_window": False}


def _sections(model: GGUFModel) -> Entries:
    """Rotary entries of a model with three positions of a token: how many frequencies each of them turns."""
    value = model.metadata.get(f"{model.prefix}.rope.dimension_sections")
    sections = list(value)[:3] if isinstance(value, Array) and not value.of_strings else []
    if len(sections) != 3:
        raise ValueError(f"{model.path}: {model.prefix}.rope.dimension_sections is not three numbers; fetch it again")
    return {"mrope_section": sections}


def _qwen2_vl(model: GGUFModel) -> Entries:
    entries, sections = _qwen2(model), _sections(model)
    if sum(sections["mrope_section"]) != model.rotary_dim // 2:
        raise ValueError(
            f"{model.path}: rope.dimension_sections are not of {model.rotary_dim // 2} frequencies together"
        )
    return entries | {"rope_parameters": entries["rope_parameters"] | sections}


def _qwen3_vl(model: GGUFModel) -> Entries:
    return _qwen3(model) | _qwen2_vl(model)


def _qwen3_vl_moe(model: GGUFModel) -> Entries:
    return _qwen3_moe(model) | _qwen2_vl(model)


def _qwen3(model: GGUFModel) -> Entries:
    return _qwen2(model) | {"attention_bias": query_bias(model)} | _reranker(model)


def _reranker(model: GGUFModel) -> Entries:
    """Qwen3-Reranker: the file has the rows of "yes" and "no" of the vocabulary's head, and a score compares both."""
    is_one = model.has("cls.output.weight")
    return {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1} if is_one else {}


def _qwen2_moe(model: GGUFModel) -> Entries:
    entries = {"shared_expert_intermediate_size": _shared(model), "qkv_bias": query_bias(model)}
    return _qwen2(model) | entries | _experts(model, renormalized=False)


def _qwen3_moe(model: GGUFModel) -> Entries:
    return _qwen3(model) | _experts(model, renormalized=True)


def _experts(model: GGUFModel, renormalized: bool) -> Entries:
    """Experts as llama.cpp computes them: the weights are renormalized or not by the architecture alone."""
    both = model.has("blk.0.ffn_gate_up_exps.weight")
    name = "blk.0.ffn_gate_up_exps.weight" if both else "blk.0.ffn_gate_exps.weight"
    width = model.shape(name, axes=3)[1] // (2 if both else 1)
    entries = {"moe_intermediate_size": width, "norm_topk_prob": renormalized}
    return {**experts(model), **entries, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _shared(model: GGUFModel) -> int:
    return model.shape("blk.0.ffn_gate_shexp.weight")[0]


def _qwen35(model: GGUFModel) -> Entries:
    """Delta nets, and gated attention in each so-many-th layer."""
    values = model.required_number("ssm.time_step_rank")
    return {
        "rope_parameters": rope(model, partial=True)
        | (_sections(model) if f"{model.prefix}.rope.dimension_sections" in model.metadata else {}),
        "layer_types": _delta_layers(model),
        "attention_bias": False,
        "linear_num_key_heads": model.required_number("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": model.required_number("ssm.state_size"),
        "linear_value_head_dim": model.required_number("ssm.inner_size") // values,
        "linear_conv_kernel_dim": model.required_number("ssm.conv_kernel"),
    }


def _delta_layers(model: GGUFModel) -> list[str]:
    """Kinds of the layers: a layer whose output projection is a delta net's is one."""
    nets = [model.has(f"blk.{index}.ssm_out.weight") for index in range(model.layers)]
    return ["linear_attention" if each else "full_attention" for each in nets]


def _qwen35_moe(model: GGUFModel) -> Entries:
    shared = {"shared_expert_intermediate_size": _shared(model)}
    return _qwen35(model) | _experts(model, renormalized=True) | shared


def _is_joined(model: GGUFModel) -> bool:
    """True of Qwen3-Next's first files, in which all that a delta net is made of is one matrix."""
    return model.in_any_layer("ssm_in.weight")


_QWEN3 = replace(MIXTURE, computed={"/score.weight": Computed("first_less_second", ("cls.output.weight",))})
_NET = "self_attn"  # of a delta net, too
_NAMES = {**LLAMA, **LATER_NORM, **EXPERTS}
QWEN35 = ArchitectureNames(
    _NAMES,
    offset=1.0,
    joined={
        f"{_NET}.in_proj_qkv": Joined(("attn_qkv",), "tiled after keys"),
        f"{_NET}.in_proj_z": Joined(("attn_gate",), "tiled"),
        f"{_NET}.in_proj_a": Joined(("ssm_alpha",), "tiled"),
        f"{_NET}.in_proj_b": Joined(("ssm_beta",), "tiled"),
    },
    computed={
        f"{_NET}.A_log": Computed("tiled_log_of_negative", ("ssm_a",)),
        f"{_NET}.dt_bias": Computed("tiled", ("ssm_dt.bias",)),
        f"{_NET}.conv1d.weight": Computed("tiled_channels", ("ssm_conv1d.weight",)),
        f"{_NET}.norm.weight": Computed("same", ("ssm_norm.weight",)),
        f"{_NET}.out_proj.weight": Computed("tiled_columns", ("ssm_out.weight",)),
    },
)

_NEXT = {
    f"{_NET}.A_log": Computed("log_of_negative", ("ssm_a",)),
    f"{_NET}.dt_bias": Computed("same", ("ssm_dt.bias",)),
    f"{_NET}.conv1d.weight": Computed("one_channel", ("ssm_conv1d.weight",)),
    f"{_NET}.norm.weight": Computed("same", ("ssm_norm.weight",)),
}
_QWEN3_NEXT = ArchitectureNames(
    {**_NAMES, "ssm_out": f"{_NET}.out_proj", "attn_qkv": f"{_NET}.in_proj_qkv", "attn_gate": f"{_NET}.in_proj_z"},
    offset=1.0,
    computed={
        **_NEXT,
        f"{_NET}.in_proj_b.weight": Computed("rates_b", ("ssm_ba.weight",)),
        f"{_NET}.in_proj_a.weight": Computed("rates_a", ("ssm_ba.weight",)),
    },
)
_QWEN3_NEXT_JOINED = ArchitectureNames(
    {**_NAMES, "ssm_out": f"{_NET}.out_proj", "ssm_in": f"{_NET}.in_proj_qkvz", "ssm_ba": f"{_NET}.in_proj_ba"},
    offset=1.0,
    computed=_NEXT,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen2": Architecture("qwen2", MIXTURE, _qwen2),
    "qwen2vl": Architecture("qwen2_vl_text", MIXTURE, _qwen2_vl),
    "qwen2moe": Architecture("qwen2_moe", MIXTURE, _qwen2_moe),
    "qwen3": Architecture("qwen3", _QWEN3, _qwen3),
    "qwen3next": Architecture(
        lambda model: "qwen3_next" if _is_joined(model) else "qwen3_5_moe_text",
        lambda model: _QWEN3_NEXT_JOINED if _is_joined(model) else _QWEN3_NEXT,
        _qwen35_moe,
    ),
    "qwen3vl": Architecture("qwen3_vl_text", _QWEN3, _qwen3_vl),
    "qwen3vlmoe": Architecture("qwen3_vl_moe_text", MIXTURE, _qwen3_vl_moe),
    "qwen3moe": Architecture("qwen3_moe", MIXTURE, _qwen3_moe),
    "qwen35": Architecture("qwen3_5_text", QWEN35, _qwen35),
    "qwen35moe": Architecture("qwen3_5_moe_text", QWEN35, _qwen35_moe),
}
