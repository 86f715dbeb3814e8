"""MiniMax-M2 (MiniMax 2025): q and k normalised over all heads together, experts chosen by sigmoid in every layer."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, split_heads
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import LMHead
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.norm import ShardedRMSNorm
from quintet.layers.rope import Rotary, head_dim
from quintet.models.mixtral import MixtralForCausalLM


class MiniMaxM2ForCausalLM(CausalLM):
    """Pre-norm blocks, partly transposed heads; the bias of the choice stands beside the router."""

    ignored_tensors = (*CausalLM.ignored_tensors, r"model\.mtp.*")
    unstacked = staticmethod(unstacked)
    canonical = staticmethod(MixtralForCausalLM.canonical)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config, partial=True)
        queries, keys = split_heads(config.num_attention_heads, config.num_key_value_heads, build.size)
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.intermediate_size,
            experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=True,
            scores="sigmoid",
            bias="e_score_correction_bias",
        )

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            attention = SelfAttention(build, AttentionSizes.from_config(config), rotary)
            attention.q_norm = ShardedRMSNorm(build, queries.times(head_dim(config)), config.rms_norm_eps)
            attention.k_norm = ShardedRMSNorm(build, keys.times(head_dim(config)), config.rms_norm_eps)
            return PreNormBlock(config, build, attention, MoE(build, mixture))

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
