"""gpt-oss (OpenAI 2025): windows in every other layer, a sink for each head, experts with biases and a clamped gate."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import layer_window
from quintet.layers.moe.biased import BOTH, BiasedMoE
from quintet.layers.moe.moe import DOWN, MAX_EXPERTS, MoESizes
from quintet.models.llama import LlamaForCausalLM

RENAMED = {".mlp.router.": ".mlp.gate."}

STACK = re.compile(rf"(.+\.experts)\.({BOTH}|{DOWN})(|_bias|_blocks|_scales)")
OWN = {"": ".weight", "_bias": ".bias", "_blocks": "_blocks", "_scales": "_scales"}  # of an expert, by the stack's end


class GptOssForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, YaRN, a softmax over the experts that a token has."""

    renamed_tensors = RENAMED

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        window, bias = layer_window(config, index), config.attention_bias
        return AttentionSizes.from_config(config, window=window, bias=bias, output_bias=bias, sinks=True)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.intermediate_size,
            experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=True,
        )
        clamp = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
        return BiasedMoE(build, mixture, clamp)

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """[E, D, 2 I] and [E, I, D], or blocks of 4 bits and their scales [E, outputs, ...]; biases [E, outputs]."""
        found = STACK.fullmatch(name)
        if found is None or len(shape) < 2 or not 0 < shape[0] <= MAX_EXPERTS:
            return {}
        return {f"{found[1]}.{expert}.{found[2]}{OWN[found[3]]}": (expert,) for expert in range(shape[0])}
