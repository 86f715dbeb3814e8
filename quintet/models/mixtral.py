"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in every layer."""

import re
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.moe.moe import DOWN, GATE, UP, MoE, MoESizes, unstacked
from quintet.models.llama import LlamaForCausalLM

PROJECTIONS = {"w1": GATE, "w3": UP, "w2": DOWN}


def mixture_of(config: Any) -> MoESizes:
    """A softmax over the experts that a token has; every layer's feed-forward is made of them."""
    return MoESizes(
        hidden=config.hidden_size,
        width=config.intermediate_size,
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        activation=config.hidden_act,
        renormalize=True,
    )


class MixtralForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, rotary positions, windowed attention, a softmax over the experts that a token has."""

    unstacked = staticmethod(unstacked)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config, window=config.sliding_window)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return MoE(build, mixture_of(config))

    @staticmethod
    def canonical(name: str) -> str:
        """Checkpoints call the layer block_sparse_moe, and an expert's projections w1 (gate), w3 (up) and w2 (down)."""
        name = name.replace(".block_sparse_moe.", ".mlp.")
        return re.sub(r"(?<=\.)w[123](?=\.[^.]+$)", lambda found: PROJECTIONS[found[0]], name)
