"""OLMoE (Muennighoff et al. 2024): a mixture of experts in every layer, q and k normalised over all heads together."""

from typing import Any

from torch import nn

from quintet.layers.build import BuildContext, split_heads
from quintet.layers.decoder import refuse
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.norm import ShardedRMSNorm
from quintet.layers.rope import Rotary, head_dim
from quintet.models.llama import LlamaForCausalLM


class OlmoeForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, QK-norm over the whole projection, rotary positions, experts."""

    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        refuse(config, "clip_qkv")
        super().__init__(config, build)

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        attention = super()._attention(config, build, index, rotary)
        queries, keys = split_heads(config.num_attention_heads, config.num_key_value_heads, build.size)
        attention.q_norm = ShardedRMSNorm(build, queries.times(head_dim(config)), config.rms_norm_eps)
        attention.k_norm = ShardedRMSNorm(build, keys.times(head_dim(config)), config.rms_norm_eps)
        return attention

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.intermediate_size,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=config.norm_topk_prob,
        )
        return MoE(build, mixture)
