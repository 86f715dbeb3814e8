"""Qwen3-MoE (Yang et al. 2025): Qwen3 with a mixture of experts in most layers."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Pre-norm blocks, QK-norm before the rotation, experts where the checkpoint has them."""

    unstacked = staticmethod(unstacked)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        window, bias = config.sliding_window, config.attention_bias
        return AttentionSizes.from_config(config, window=window, bias=bias, output_bias=bias)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return MoE(build, mixture(config)) if mixes(config, index) else super()._mlp(config, build, index)


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
