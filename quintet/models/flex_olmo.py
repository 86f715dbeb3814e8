"""FlexOlmo (Ai2 2025): OLMo 2 with a mixture of experts that were trained apart."""

from typing import Any

from torch import nn

from quintet.layers.build import BuildContext
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.models.olmo2 import Olmo2ForCausalLM


class FlexOlmoForCausalLM(Olmo2ForCausalLM):
    """The same blocks."""

    unstacked = staticmethod(unstacked)

    def _feed(self, config: Any, build: BuildContext) -> nn.Module:
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.intermediate_size,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=config.norm_topk_prob,
        )
        return MoE(build, mixture)
