"""Ling and Ring (inclusionAI 2025): q, k and v in one, and experts of which some serve every token."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import refuse
from quintet.layers.linear import CheckpointLayout
from quintet.layers.moe.moe import MoE, MoESizes
from quintet.layers.weight_transform import normalise_columns, normalise_head
from quintet.models.glm4_moe import Glm4MoeForCausalLM

RENAMED = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.query_layernorm.": ".self_attn.q_norm.",
    ".attention.key_layernorm.": ".self_attn.k_norm.",
    ".attention.": ".self_attn.",
}


class BailingMoeForCausalLM(Glm4MoeForCausalLM):
    """Pre-norm blocks. The first generation chooses experts by softmax, the second by sigmoid and out of groups, and
    normalises q and k of each head, of which it turns a part."""

    renamed_tensors = RENAMED

    def __init__(self, config: Any, build: BuildContext) -> None:
        self._check(config)
        super().__init__(config, build)
        self._normalised = getattr(config, "norm_head", False)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        stored = CheckpointLayout(fused="query_key_value")
        return AttentionSizes.from_config(config, bias=getattr(config, "use_qkv_bias", False), stored=stored)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        if index < config.first_k_dense_replace:
            return super()._mlp(config, build, index)
        return MoE(build, _mixture(config))

    def _check(self, config: Any) -> None:
        refuse(config, "use_bias", "multi_gate", "use_sliding_window")
        biased = bool(getattr(config, "moe_router_enable_expert_bias", config.score_function == "sigmoid"))
        if config.score_function not in ("softmax", "sigmoid") or biased != (config.score_function == "sigmoid"):
            raise ValueError(
                f"{config.model_type} with score_function={config.score_function!r} and "
                f"moe_router_enable_expert_bias={biased} is not supported; a bias goes with sigmoid alone"
            )

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        return normalise_head(entries, normalise_columns) if self._normalised else entries


def _mixture(config: Any) -> MoESizes:
    sigmoid = config.score_function == "sigmoid"
    shared = getattr(config, "moe_shared_expert_intermediate_size", None) or config.moe_intermediate_size
    return MoESizes(
        hidden=config.hidden_size,
        width=config.moe_intermediate_size,
        experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        activation=config.hidden_act,
        renormalize=config.norm_topk_prob,
        scores=config.score_function,
        bias="gate.expert_bias" if sigmoid else None,
        groups=config.n_group if sigmoid else 1,
        top_k_groups=config.topk_group if sigmoid else 1,
        scale=config.routed_scaling_factor,
        fp32_router=sigmoid,
        shared=shared * config.n_shared_experts,
    )
