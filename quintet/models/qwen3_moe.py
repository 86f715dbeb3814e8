"""Qwen3-MoE (Yang et al. 2025): Qwen3 with a mixture of experts in most layers."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock, refuse_long_chunks
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim


class Qwen3MoeForCausalLM(CausalLM):
    """Pre-norm blocks, QK-norm before the rotation, experts where the checkpoint has them."""

    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse_long_chunks(config, build)
        rotary = Rotary.from_config(build, config)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            shape = AttentionSizes.from_config(
                config,
                window=config.sliding_window,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
            )
            attention = SelfAttention(build, shape, rotary)
            attention.q_norm = RMSNorm(build, head_dim(config), config.rms_norm_eps)
            attention.k_norm = RMSNorm(build, head_dim(config), config.rms_norm_eps)
            mlp: nn.Module
            if mixes(config, index):
                mlp = MoE(build, mixture(config))
            else:
                mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)
            return PreNormBlock(config, build, attention, mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)


def mixes(config: Any, index: int) -> bool:
    """Returns whether the layer has experts; else it has one feed-forward."""
    if index in getattr(config, "mlp_only_layers", ()) or (index + 1) % getattr(config, "decoder_sparse_step", 1):
        return False
    return bool(config.num_experts > 0)


def mixture(config: Any) -> MoESizes:
    """Under the names of Qwen's configs."""
    return MoESizes(
        hidden=config.hidden_size,
        width=config.moe_intermediate_size,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        activation=config.hidden_act,
        renormalize=getattr(config, "norm_topk_prob", True),
    )
