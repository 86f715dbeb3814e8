"""Families with a state per request in some layers or all: state spaces, and short convolutions."""

from collections.abc import Mapping

from quintet.gguf.architectures.architecture import (
    LAYER_NORM_EPS,
    RMS_EPS,
    SIZES,
    Architecture,
    Entries,
    experts,
    query_bias,
)
from quintet.gguf.architectures.llama import multipliers
from quintet.gguf.architectures.mixtures import LATENT, LATENT_COMPUTED, grouped, latent
from quintet.gguf.architectures.rope import rope
from quintet.gguf.architectures.tables import EXPERTS, LLAMA, bias_of_choice, state_space
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames, Computed, Joined


def _attending(model: GGUFModel, other: str, attention: str = "full_attention") -> list[str]:
    """Kinds of the layers: those with queries attend."""
    attends = [model.has(f"blk.{index}.attn_q.weight") for index in range(model.layers)]
    return [attention if each else other for each in attends]


def _lfm2(model: GGUFModel) -> Entries:
    """The file has the width that the feed-forward layers come to."""
    for what, is_there in (("tokens that see both ways", model.get("attention.causal") is False),
                           ("a projection of each token (ColBERT)", model.has("dense_2.weight"))):  # fmt: skip
        if is_there:
            raise ValueError(f"{model.path} has {what}, which quintet does not compute for LFM2; use another model")
    return {
        "rope_parameters": rope(model),
        "layer_types": _attending(model, "conv"),
        "conv_L_cache": model.required_number("shortconv.l_cache"),
        "conv_bias": model.in_any_layer("shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(model: GGUFModel) -> Entries:
    return {
        **_lfm2(model),
        **experts(model),
        "num_dense_layers": model.count("leading_dense_block_count"),
        "moe_intermediate_size": model.required_number("expert_feed_forward_length"),
        "use_expert_bias": model.in_any_layer("exp_probs_b.bias"),
        "norm_topk_prob": True,
    }


def _mamba(model: GGUFModel) -> Entries:
    return {
        "state_size": model.required_number("ssm.state_size"),
        "conv_kernel": model.required_number("ssm.conv_kernel"),
        "expand": model.required_number("ssm.inner_size") // model.required_number("embedding_length"),
        "time_step_rank": model.required_number("ssm.time_step_rank"),
        "use_conv_bias": model.has("blk.0.ssm_conv1d.bias"),
        "use_bias": False,
    }


def _mamba_kind(model: GGUFModel) -> str:
    return "falcon_mamba" if model.get("ssm.dt_b_c_rms") else "mamba"


def _mamba2(model: GGUFModel) -> Entries:
    heads = model.required_number("ssm.time_step_rank")
    entries = {name: value for name, value in _mamba(model).items() if name != "time_step_rank"}
    sizes = {"num_heads": heads, "head_dim": model.required_number("ssm.inner_size") // heads}
    return {**entries, **sizes, "n_groups": model.required_number("ssm.group_count", 1)}


def _spaces(model: GGUFModel) -> Entries:
    """Mamba 2 by the names of configs that have attention too."""
    heads, inner = model.required_number("ssm.time_step_rank"), model.required_number("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": model.required_number("ssm.group_count", 1),
        "mamba_d_state": model.required_number("ssm.state_size"),
        "mamba_d_conv": model.required_number("ssm.conv_kernel"),
        "mamba_conv_bias": model.in_any_layer("ssm_conv1d.bias"),
        "mamba_proj_bias": model.in_any_layer("ssm_in.bias"),
    }


def _falcon_h1(model: GGUFModel) -> Entries:
    """The converter multiplies the weights by all of the multipliers."""
    names = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
    return {
        **_spaces(model),
        "rope_parameters": rope(model),
        "attention_bias": query_bias(model),
        "mamba_d_ssm": model.required_number("ssm.inner_size"),
        "mamba_rms_norm": model.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": model.has("blk.0.ssm_out.bias"),
        **{f"{name}_multiplier": 1.0 for name in names},
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }


def _granite_hybrid(model: GGUFModel) -> Entries:
    finetuned = bool(model.get("rope.scaling.finetuned", False))
    mixed = bool(model.get("expert_count", 0))
    shared = model.get("expert_shared_feed_forward_length") or model.get("feed_forward_length")
    return {
        **_spaces(model),
        **multipliers(model),
        **(experts(model, "num_local_experts") if mixed else {"num_local_experts": 0}),
        "layer_types": _attending(model, "linear_attention"),
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if finetuned else "nope",
        "rope_parameters": rope(model),
        "attention_bias": query_bias(model),
        "mamba_expand": model.required_number("ssm.inner_size") // model.required_number("embedding_length"),
    }


def _jamba(model: GGUFModel) -> Entries:
    """The layers that attend and those with experts are each so-many-th ones."""
    mixed = [model.has(f"blk.{index}.ffn_gate_inp.weight") for index in range(model.layers)]
    attends = [kind == "attention" for kind in _attending(model, "mamba", "attention")]
    return {
        **_period(model, "attn", attends),
        **_period(model, "expert", mixed),
        **experts(model),
        "mamba_d_state": model.required_number("ssm.state_size"),
        "mamba_d_conv": model.required_number("ssm.conv_kernel"),
        "mamba_expand": model.required_number("ssm.inner_size") // model.required_number("embedding_length"),
        "mamba_dt_rank": model.required_number("ssm.time_step_rank"),
        "mamba_conv_bias": model.in_any_layer("ssm_conv1d.bias"),
        "mamba_proj_bias": model.in_any_layer("ssm_in.bias"),
    }


def _period(model: GGUFModel, name: str, chosen: list[bool]) -> Entries:
    """Offset and period of the layers that are chosen; ValueError if they have none."""
    places = [index for index, each in enumerate(chosen) if each]
    offset = places[0] if places else len(chosen)
    period = places[1] - offset if len(places) > 1 else len(chosen) + 1
    if places != list(range(offset, len(chosen), period)):
        raise ValueError(f"{model.path}: layers {places[:8]} are no regular ones, which jamba's config has")
    return {f"{name}_layer_offset": offset, f"{name}_layer_period": period}


def _nemotron_h(model: GGUFModel) -> Entries:
    """A layer is what its tensors are of."""
    heads, inner = model.required_number("ssm.time_step_rank"), model.required_number("ssm.inner_size")
    known = {"attn_q": "full_attention", "ssm_in": "linear_attention", "ffn_gate_inp": "moe"}
    kinds = [
        next((kind for name, kind in known.items() if model.has(f"blk.{index}.{name}.weight")), "mlp")
        for index in range(model.layers)
    ]
    feed_forwards = [f"blk.{index}.ffn_up.weight" for index in range(model.layers)]
    entries: Entries = {
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": model.required_number("ssm.group_count", 1),
        "ssm_state_size": model.required_number("ssm.state_size"),
        "conv_kernel": model.required_number("ssm.conv_kernel"),
        "use_conv_bias": model.in_any_layer("ssm_conv1d.bias"),
        "use_bias": model.in_any_layer("ssm_in.bias"),
        "mlp_bias": model.in_any_layer("ffn_up.bias"),
        "intermediate_size": next((model.shape(name)[0] for name in feed_forwards if model.has(name)), 1),
        "time_step_min": 0.001,  # of all that are published; the file does not have it
    }
    if "moe" in kinds:
        shared = model.required_number("expert_shared_feed_forward_length")
        latent = {"moe_latent_size": model.count("moe_latent_size") or None}
        entries |= {**grouped(model), "moe_shared_expert_intermediate_size": shared, **latent}
    return entries


def _kimi_linear(model: GGUFModel) -> Entries:
    """Layers with a latent attend. The weights of experts are divided by their sum, as in llama.cpp."""
    attends = [model.has(f"blk.{index}.attn_kv_a_mqa.weight") for index in range(model.layers)]
    if all(attends):
        raise ValueError(f"{model.path}: kimi_linear without layers of Kimi Delta Attention; fetch it again")
    dim, known = model.required_number("kda.head_dim"), grouped(model)
    return {
        **latent(model),
        **known,
        "num_local_experts": known.pop("n_routed_experts"),
        "norm_topk_prob": True,
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "linear_head_dim": dim,
        "linear_num_heads": model.shape(f"blk.{attends.index(False)}.ssm_f_b.weight")[0] // dim,
        "linear_conv_kernel_dim": model.required_number("ssm.conv_kernel"),
    }


def _plamo2(model: GGUFModel) -> Entries:
    """Attention without windows, as llama.cpp computes it: the file has none."""
    attends = [model.has(f"blk.{index}.attn_qkv.weight") for index in range(model.layers)]
    places = [index for index, each in enumerate(attends) if each]
    step = places[1] - places[0] if len(places) > 1 else 2 * places[0] if places else 0
    if step < 2 or places != list(range(step // 2, model.layers, step)):
        raise ValueError(f"{model.path}: layers {places[:8]} attend, which are no regular ones, as plamo2's config has")
    return {
        "rope_theta": rope(model)["rope_theta"],
        "hidden_size_per_head": model.head_dim,
        "mamba_num_heads": model.required_number("ssm.time_step_rank"),
        "mamba_d_state": model.required_number("ssm.state_size"),
        "mamba_d_conv": model.required_number("ssm.conv_kernel"),
        "mamba_step": step,
        "full_attention_idx": places,
    }


def _rwkv7(model: GGUFModel) -> Entries:
    ranks = {"decay": "decay", "a": "iclr", "v": "value_residual_mix", "gate": "gate"}
    return {
        "head_dim": model.required_number("wkv.head_size"),
        **{f"{name}_low_rank_dim": model.required_number(f"attention.{key}_lora_rank") for name, key in ranks.items()},
    }


def _granite_names(model: GGUFModel) -> ArchitectureNames:
    """The feed-forward that serves every token is one of the shared experts, where there are others."""
    return _GRANITE_MIXTURE if model.get("expert_count", 0) else _GRANITE_DENSE


_CONV = {
    **LLAMA,
    "shortconv.in_proj": "self_attn.in_proj",
    "shortconv.out_proj": "self_attn.out_proj",
    "attn_output": "self_attn.out_proj",
}
_CONV_ENDS = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.norm", "output": "lm_head"}
_CONV_WEIGHT = {"self_attn.conv.weight": Computed("one_channel", ("shortconv.conv.weight",))}
_LFM2_SIZES = {**SIZES, RMS_EPS: "norm_eps"}
_MIXERS = {
    "attn_norm": "norm", "ssm_in": "mixer.in_proj", "ssm_x": "mixer.x_proj", "ssm_dt": "mixer.dt_proj",
    "ssm_out": "mixer.out_proj", "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate", "ffn_up_exps": "mixer.experts.up_proj", "ffn_down_exps": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
_SPACE = {
    **LLAMA, "ssm_in": "self_attn.in_proj", "ssm_x": "self_attn.x_proj", "ssm_dt": "self_attn.dt_proj",
    "ssm_out": "self_attn.out_proj", "ssm_dt_norm": "self_attn.dt_layernorm", "ssm_b_norm": "self_attn.b_layernorm",
    "ssm_c_norm": "self_attn.c_layernorm",
}  # fmt: skip
_FALCON_H1 = {
    **LLAMA, "ssm_in": "self_attn.space.in_proj", "ssm_out": "self_attn.space.out_proj",
    **{f"attn_{name}": f"self_attn.attention.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.attention.o_proj",
}  # fmt: skip
_FALCON_H1_NORM = {"post_attention_layernorm.weight": Computed("same", ("ffn_norm",))}  # without ".weight" there
_GRANITE = {
    **LLAMA, "ssm_in": "self_attn.in_proj", "ssm_out": "self_attn.out_proj", "ffn_gate_inp": "mlp.moe.gate",
    **{f"ffn_{name}_exps": f"mlp.moe.experts.{name}_proj" for name in ("gate", "up", "down")},
    "ffn_down_shexp": "mlp.shared.down_proj", "ffn_down": "mlp.shared.down_proj",
}  # fmt: skip
_GRANITE_DENSE, _GRANITE_MIXTURE = (
    ArchitectureNames(
        {name: module for name, module in _GRANITE.items() if name not in sources},
        permutes_qk=True,
        computed=state_space("self_attn"),
        joined={"mlp.shared.input_linear": Joined(sources)},
    )
    for sources in (("ffn_gate", "ffn_up"), ("ffn_gate_shexp", "ffn_up_shexp"))
)
_KIMI = {
    **LLAMA, **LATENT, "ssm_f_a": "self_attn.f_a_proj", "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj", "ssm_g_b": "self_attn.g_b_proj", "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}  # fmt: skip
_KIMI_COMPUTED = {
    **LATENT_COMPUTED,
    **{f"self_attn.{x}_conv1d.weight": Computed("one_channel", (f"ssm_conv1d_{x}.weight",)) for x in "qkv"},
    "self_attn.A_log": Computed("log_of_negative", ("ssm_a",)),
    "self_attn.dt_bias": Computed("same", ("ssm_dt.bias",)),
}
_PLAMO2 = {
    "attn_qkv": "mixer.qkv_proj", "attn_q_norm": "mixer.q_norm", "attn_k_norm": "mixer.k_norm",
    "attn_output": "mixer.o_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
    "ssm_in": "mixer.in_proj", "ssm_x": "mixer.bcdt_proj", "ssm_dt": "mixer.dt_proj", "ssm_out": "mixer.out_proj",
}  # fmt: skip
_PLAMO2_NORMS = {  # those without ".weight" have none in the file
    **{f"mixer.{x}_norm.weight": Computed("same", (f"ssm_{x.lower()}_norm",)) for x in ("B", "C", "dt")},
    "pre_mixer_norm.weight": Computed("less_one", ("attn_norm.weight",)),
    "post_mixer_norm.weight": Computed("less_fifth", ("post_attention_norm",)),
    "pre_mlp_norm.weight": Computed("less_one", ("ffn_norm.weight",)),
    "post_mlp_norm.weight": Computed("less_root_of_fifths", ("post_ffw_norm",)),
    "/model.norm.weight": Computed("less_one", ("output_norm.weight",)),
}
_RWKV7 = {
    "attn_norm": "attn_norm", "attn_norm_2": "ffn_norm", "time_mix_ln": "attn.g_norm",
    **{f"time_mix_{name}": f"attn.{name[0]}_proj" for name in ("key", "value", "receptance")},
    "time_mix_output": "attn.o_proj",
    **{f"time_mix_{x}{n}": f"attn.{x}_lora.lora.{2 * n - 2}" for x in "wavg" for n in (1, 2)},
    "channel_mix_key": "ffn.key", "channel_mix_value": "ffn.value",
}  # fmt: skip
_RWKV7_ENDS = {
    "token_embd": "model.embeddings", "token_embd_norm": "model.pre_norm", "output_norm": "model.norm",
    "output": "lm_head",
}  # fmt: skip
_RWKV7_COMPUTED = {
    **{f"attn.{x}_lora.lora.2.bias": Computed("flat", (f"time_mix_{x}0.weight",)) for x in "wav"},
    **{f"attn.x_{x}": Computed(f"part {at}", ("time_mix_lerp_fused.weight",)) for at, x in enumerate("rwkvag")},
    **{f"attn.{name}": Computed("flat", (f"time_mix_{name}.weight",)) for name in ("k_k", "k_a")},
    "attn.r_k": Computed("by_head", ("time_mix_r_k.weight",)),
    "ffn.x_k": Computed("flat", ("channel_mix_lerp_k.weight",)),
}
_RWKV7_SIZES = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    LAYER_NORM_EPS: "norm_eps",
}  # fmt: skip
_NEMOTRON_SIZES = {key: name for key, name in SIZES.items() if key != "feed_forward_length"}
_NEMOTRON_SIZES |= {RMS_EPS: "layer_norm_epsilon"}
_MAMBA_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    RMS_EPS: "layer_norm_epsilon",
    "context_length": "max_position_embeddings",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "falcon-h1": Architecture(
        "falcon_h1",
        ArchitectureNames(_FALCON_H1, computed={**state_space("self_attn.space"), **_FALCON_H1_NORM}),
        _falcon_h1,
    ),
    "granitehybrid": Architecture("granitemoehybrid", _granite_names, _granite_hybrid),
    "jamba": Architecture(
        "jamba",
        ArchitectureNames({**_SPACE, **EXPERTS}, computed=state_space("self_attn", version=1)),
        _jamba,
        has_head_dim=False,
    ),
    "kimi-linear": Architecture(
        "kimi_linear", ArchitectureNames(_KIMI, computed=_KIMI_COMPUTED), _kimi_linear, has_head_dim=False
    ),
    "lfm2": Architecture("lfm2", ArchitectureNames(_CONV, _CONV_ENDS, computed=_CONV_WEIGHT), _lfm2, _LFM2_SIZES),
    "lfm2moe": Architecture(
        "lfm2_moe",
        ArchitectureNames(
            {**_CONV, **EXPERTS}, _CONV_ENDS, computed={**_CONV_WEIGHT, **bias_of_choice("mlp.expert_bias")}
        ),
        _lfm2_moe,
        _LFM2_SIZES,
    ),
    "mamba": Architecture(
        _mamba_kind,
        ArchitectureNames(_MIXERS, computed=state_space("mixer", version=1)),
        _mamba,
        _MAMBA_SIZES,
        has_head_dim=False,
    ),
    "mamba2": Architecture(
        "mamba2", ArchitectureNames(_MIXERS, computed=state_space("mixer")), _mamba2, _MAMBA_SIZES, has_head_dim=False
    ),
    **{
        name: Architecture(
            "nemotron_h",
            ArchitectureNames(
                _MIXERS,
                computed={**state_space("mixer"), **bias_of_choice("mixer.gate.e_score_correction_bias")},
            ),
            _nemotron_h,
            _NEMOTRON_SIZES,
        )
        for name in ("nemotron_h", "nemotron_h_moe")
    },
    "plamo2": Architecture(
        "plamo2",
        ArchitectureNames(
            _PLAMO2, computed={**state_space("mixer", convolution_bias=False), **_PLAMO2_NORMS}, fused={}
        ),
        _plamo2,
        has_head_dim=False,
    ),
    "rwkv7": Architecture(
        "rwkv7",
        ArchitectureNames(_RWKV7, _RWKV7_ENDS, computed=_RWKV7_COMPUTED),
        _rwkv7,
        _RWKV7_SIZES,
        has_head_dim=False,
    ),
}
