"""OLMoE (Muennighoff et al. 2024): a mixture of experts in every layer, q and k normalised over all heads together."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, split_heads
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock, refuse
from quintet.layers.linear import LMHead
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.norm import ShardedRMSNorm
from quintet.layers.rope import Rotary, head_dim


class OlmoeForCausalLM(CausalLM):
    """Pre-norm blocks, QK-norm over the whole projection, rotary positions, experts."""

    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "clip_qkv")
        rotary = Rotary.from_config(build, config)
        queries, keys = split_heads(config.num_attention_heads, config.num_key_value_heads, build.size)
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.intermediate_size,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=config.norm_topk_prob,
        )

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            shape = AttentionSizes.from_config(config, bias=config.attention_bias, output_bias=config.attention_bias)
            attention = SelfAttention(build, shape, rotary)
            attention.q_norm = ShardedRMSNorm(build, queries.times(head_dim(config)), config.rms_norm_eps)
            attention.k_norm = ShardedRMSNorm(build, keys.times(head_dim(config)), config.rms_norm_eps)
            return PreNormBlock(config, build, attention, MoE(build, mixture))

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
