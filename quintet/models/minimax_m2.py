"""MiniMax-M2 (MiniMax 2025): q and k normalised over all heads together, experts chosen by sigmoid in every layer."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext, split_heads
from quintet.layers.decoder import CausalLM
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.norm import ShardedRMSNorm
from quintet.layers.rope import Rotary, head_dim
from quintet.models.llama import LlamaForCausalLM
from quintet.models.mixtral import MixtralForCausalLM


class MiniMaxM2ForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, partly transposed heads; the bias of the choice stands beside the router."""

    ignored_tensors = (*CausalLM.ignored_tensors, r"model\.mtp.*")
    unstacked = staticmethod(unstacked)
    canonical = staticmethod(MixtralForCausalLM.canonical)

    def _rotary(self, config: Any, build: BuildContext) -> Rotary:
        return Rotary.from_config(build, config, partial=True)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config)

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
            experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=True,
            scores="sigmoid",
            bias="e_score_correction_bias",
        )
        return MoE(build, mixture)
