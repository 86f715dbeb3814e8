"""LFM2 with experts (Liquid AI 2025): LFM2 that has a mixture of experts behind the first layers."""

from typing import Any

from torch import nn

from quintet.layers.build import BuildContext
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.models import lfm2


class Lfm2MoeForCausalLM(lfm2.Lfm2ForCausalLM):
    """Experts are chosen by sigmoid, with a bias where the checkpoint has one.

    Weights that add up to 1 do so exactly; transformers divides by their sum and a millionth.
    """

    unstacked = staticmethod(unstacked)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        if index < config.num_dense_layers:
            return GatedMLP(build, config.hidden_size, config.intermediate_size, "silu")
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.moe_intermediate_size,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            activation="silu",
            renormalize=config.norm_topk_prob,
            scores="sigmoid",
            bias="expert_bias" if config.use_expert_bias else None,
            scale=config.routed_scaling_factor,
        )
        return MoE(build, mixture)
