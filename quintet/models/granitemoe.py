"""Granite 3 MoE and PowerMoE (IBM 2024): Granite with a mixture of experts in every layer."""

from typing import Any

from torch import nn

from quintet.layers.build import BuildContext
from quintet.layers.moe.moe import DOWN, GATE, UP, MoE, unstacked
from quintet.models.granite import GraniteForCausalLM
from quintet.models.mixtral import mixture_of

RENAMED = {
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
    ".block_sparse_moe.input_linear.weight": f".mlp.experts.{GATE[:4]}_{UP}",
    ".block_sparse_moe.output_linear.weight": f".mlp.experts.{DOWN}",
}  # a checkpoint's names -> those of transformers' other mixtures


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite's multipliers; a softmax over the experts that a token has."""

    renamed_tensors = RENAMED
    unstacked = staticmethod(unstacked)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return MoE(build, mixture_of(config))
