"""Families that transformers has no class for: checkpoints as they are published, and what they are compared with.

Their nearest class in transformers makes the numbers, and is the reference. Tensors are renamed and fused as the
published files have them; where a family computes something else, the class's modules are put together otherwise here,
by the published formulas. None of this is shared with quintet/models.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quintet_tools.checkpoints import reference_recurrent as recurrent
from quintet_tools.checkpoints.hyper_families import TEXTS, TextModel
from quintet_tools.checkpoints.layered_families import LAYERED
from quintet_tools.checkpoints.published import QKV, Settings, Tensors, fused, open_shared, renamed, stacked
from quintet_tools.checkpoints.published import Published as Published
from quintet_tools.checkpoints.scaled_families import SCALED, ling_tensors

# ------------------------------------------------------------------------------------- Llama and Qwen2 by other names


def _biased(settings: Settings) -> dict[str, Any]:
    return {**settings, "attention_bias": settings["bias"]}


def _internlm2(tensors: Tensors, settings: Settings) -> Tensors:
    """wqkv: [KV heads, queries of one + 2, features of a head], the key and the value behind their queries."""
    size, groups = settings["hidden_size"] // settings["num_attention_heads"], settings["num_key_value_heads"]

    def join(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        apart = [each.reshape(groups, -1, size, *each.shape[1:]) for each in (q, k, v)]
        return torch.cat(apart, 1).flatten(0, 2)

    names = {
        r"^model\.embed_tokens": "model.tok_embeddings",
        r"self_attn\.o_proj": "attention.wo",
        r"self_attn\.wqkv": "attention.wqkv",
        r"mlp\.gate_proj": "feed_forward.w1",
        r"mlp\.up_proj": "feed_forward.w3",
        r"mlp\.down_proj": "feed_forward.w2",
        r"input_layernorm": "attention_norm",
        r"post_attention_layernorm": "ffn_norm",
        r"^lm_head": "output",
    }
    return renamed(fused(tensors, QKV, "wqkv", join), names)


def _exaone_config(settings: Settings) -> dict[str, Any]:
    return {
        **settings,
        "num_hidden_layers": settings["num_layers"],
        "hidden_act": settings["activation_function"],
        "rms_norm_eps": settings["layer_norm_epsilon"],
    }


def _exaone(tensors: Tensors, settings: Settings) -> Tensors:
    names = {
        r"^model\.embed_tokens": "transformer.wte",
        r"^model\.layers": "transformer.h",
        r"^model\.norm": "transformer.ln_f",
        r"self_attn\.o_proj": "attn.attention.out_proj",
        r"self_attn": "attn.attention",
        r"mlp\.gate_proj": "mlp.c_fc_0",
        r"mlp\.up_proj": "mlp.c_fc_1",
        r"mlp\.down_proj": "mlp.c_proj",
        r"input_layernorm": "ln_1",
        r"post_attention_layernorm": "ln_2",
    }
    return renamed(tensors, names)


def _mimo(tensors: Tensors, settings: Settings) -> Tensors:
    """Beside the model, one layer more that guesses a further token."""
    further = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    further = {name.replace("model.layers.0.", "model.mtp_layers.0."): each.clone() for name, each in further.items()}
    return {**tensors, **further, "model.mtp_layers.0.input_proj.weight": torch.ones(4, 8)}


# ---------------------------------------------------------------------------------------------------------- Baichuan


def _baichuan_config(settings: Settings) -> dict[str, Any]:
    length = settings.get("max_position_embeddings") or settings["model_max_length"]
    return {**settings, "max_position_embeddings": length}


def _baichuan(tensors: Tensors, settings: Settings) -> Tensors:
    return fused(tensors, QKV, "W_pack", stacked)


def _baichuan_computes(model: Any, settings: Settings) -> Any:
    if "z_loss_weight" in settings:  # Baichuan 2: each token's row of the head has length 1
        head = model.lm_head.weight.data
        model.lm_head.weight = nn.Parameter(head / head.square().sum(1, keepdim=True).sqrt())
    return model if "max_position_embeddings" in settings else Sloped(model)


class Unturned(nn.Module):
    """In the place of rotary positions: angles of 0."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones(1, position_ids.shape[1], 1, dtype=x.dtype)
        return one, torch.zeros_like(one)


class Sloped(nn.Module):
    """A Llama of transformers with ALiBi (Press et al. 2022) in the place of rotary positions."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        model.model.rotary_emb = Unturned()
        self._slopes = torch.tensor(slopes(model.config.num_attention_heads))

    def forward(self, ids: Tensor, use_cache: bool = False) -> Any:
        """As the model's, without padding."""
        steps = torch.arange(ids.shape[1])
        back = (steps[:, None] - steps[None, :]).float()
        mask = -self._slopes[:, None, None] * back
        return self.model(ids, attention_mask=mask.masked_fill(back < 0, -1e9)[None], use_cache=False)


def slopes(heads: int) -> list[float]:
    """As the paper's own code has them."""

    def of_power(n: int) -> list[float]:
        first = 2 ** -(2 ** -(math.log2(n) - 3))
        return [first ** (i + 1) for i in range(n)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    nearest = 2 ** int(math.log2(heads))
    return of_power(nearest) + of_power(2 * nearest)[0::2][: heads - nearest]


# ----------------------------------------------------------------------------------------------------------- ChatGLM


def _chatglm_config(settings: Settings) -> dict[str, Any]:
    return {
        "vocab_size": settings["padded_vocab_size"],
        "hidden_size": settings["hidden_size"],
        "intermediate_size": settings["ffn_hidden_size"],
        "num_hidden_layers": settings["num_layers"],
        "num_attention_heads": settings["num_attention_heads"],
        "num_key_value_heads": settings["multi_query_group_num"],
        "head_dim": settings["kv_channels"],
        "rms_norm_eps": settings["layernorm_epsilon"],
        "attention_bias": settings["add_qkv_bias"],
        "max_position_embeddings": settings["seq_length"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0 * settings.get("rope_ratio", 1),
            "partial_rotary_factor": 0.5,
        },
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }


def _chatglm(tensors: Tensors, settings: Settings) -> Tensors:
    names = {
        r"^model\.embed_tokens": "transformer.embedding.word_embeddings",
        r"^model\.norm": "transformer.encoder.final_layernorm",
        r"^model\.layers": "transformer.encoder.layers",
        r"^lm_head": "transformer.output_layer",
        r"self_attn\.o_proj": "self_attention.dense",
        r"self_attn": "self_attention",
        r"gate_up_proj": "dense_h_to_4h",
        r"down_proj": "dense_4h_to_h",
    }
    named = renamed(fused(tensors, QKV, "query_key_value", stacked), names)
    return {**named, "transformer.rotary_pos_emb.inv_freq": torch.ones(settings["kv_channels"] // 4)}


# ------------------------------------------------------------------------------------------------------ Ling and Ring


def _bailing_config(settings: Settings) -> dict[str, Any]:
    shared = settings["moe_intermediate_size"] * settings["num_shared_experts"]
    return {
        **settings,
        "shared_expert_intermediate_size": shared,
        "mlp_only_layers": list(range(settings.get("first_k_dense_replace", 0))),
        "qkv_bias": settings.get("use_qkv_bias", False),
    }


def _bailing_v2_config(settings: Settings) -> dict[str, Any]:
    return {
        **settings,
        "n_routed_experts": settings["num_experts"],
        "n_shared_experts": settings["num_shared_experts"],
        "use_qk_norm": True,
    }


def _bailing_computes(model: Any, settings: Settings) -> Any:
    open_shared(model, settings)
    if settings.get("norm_head"):  # each feature's length over all tokens is 1
        head = model.lm_head.weight.data
        model.lm_head.weight = nn.Parameter(head / (head.square().sum(0, keepdim=True).sqrt() + 1e-7))
    return model


# ------------------------------------------------------------------------------------------------------------- Solar


def _solar_computes(model: Any, settings: Settings) -> Any:
    """Before a layer of bskcn_1 or bskcn_2 what goes in is kept; before one of bskcn_3 or bskcn_4 it is mixed in."""
    kept: dict[int, Tensor] = {}
    share = settings["bskcn_tv"][1]

    def enter(index: int) -> Callable[[Any, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        def hook(layer: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x, *rest = given
            for which in (1, 2):
                if index in settings[f"bskcn_{which}"]:
                    kept[which] = x
            for which in (1, 2):
                if index in settings[f"bskcn_{which + 2}"]:
                    x = kept[which] * share + x * (1 - share)
            return x, *rest

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(enter(index))
    return model


def _as_they_are(tensors: Tensors, settings: Settings) -> Tensors:
    return tensors


def _own(settings: Settings, trunk: type[nn.Module]) -> recurrent.Causal:
    return recurrent.Causal(settings, trunk(settings))


def _text(family: str, wrapper: str) -> Published:
    return Published(wrapper, "", dict, _as_they_are, own=lambda said: TextModel(family, said))


PUBLISHED: Mapping[str, Published] = {
    **{family: _text(family, wrapper) for family, wrapper in TEXTS.items()},
    **LAYERED,
    **SCALED,
    "plamo2": Published("Plamo2ForCausalLM", "", dict, _as_they_are, own=lambda said: _own(said, recurrent.Plamo)),
    "rwkv7": Published("RWKV7ForCausalLM", "", dict, _as_they_are, own=lambda said: _own(said, recurrent.Goose)),
    "baichuan": Published(
        "BaichuanForCausalLM",
        "llama",
        _baichuan_config,
        _baichuan,
        _baichuan_computes,
        "for 13B with slopes by the paper's code, for the second generation with a normalised head",
    ),
    "bailing_moe": Published(
        "BailingMoeForCausalLM",
        "qwen2_moe",
        _bailing_config,
        ling_tensors,
        _bailing_computes,
        "its shared expert ungated",
    ),
    "bailing_moe_v2": Published("BailingMoeV2ForCausalLM", "glm4_moe", _bailing_v2_config, ling_tensors),
    "chatglm": Published("ChatGLMModel", "glm", _chatglm_config, _chatglm),
    "exaone": Published("ExaoneForCausalLM", "llama", _exaone_config, _exaone),
    "internlm": Published("InternLMForCausalLM", "llama", _biased, _as_they_are),
    "internlm2": Published("InternLM2ForCausalLM", "llama", _biased, _internlm2),
    "mimo": Published("MiMoForCausalLM", "qwen2", dict, _mimo),
    "solar": Published(
        "SolarForCausalLM", "llama", dict, _as_they_are, _solar_computes, "its layers' inputs mixed as published"
    ),
}
