"""Command R7B, Command A (Cohere 2024): windows, and positions in windowed layers alone."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import ParallelBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, layer_window
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary


class Cohere2ForCausalLM(CausalLM):
    """Parallel blocks under a LayerNorm without bias, neighbours turned, scaled logits, a tied head."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        norm = partial(self._norm, config, build)
        rotary = Rotary.from_config(build, config, interleaved=True)

        def block(config: Any, build: BuildContext, index: int) -> ParallelBlock:
            attention = self._attention(config, build, rotary, index)
            mlp = self._feed_forward(config, build, index)
            return ParallelBlock(build, {"input_layernorm": norm(), "self_attn": attention, "mlp": mlp})

        self.model = DecoderTrunk(config, build, block, norm=norm())
        self.lm_head = LMHead.from_config(build, config)
        self._ops, self._scale = build.ops.take("scale"), config.logit_scale

    def _norm(self, config: Any, build: BuildContext) -> nn.Module:
        return LayerNorm(build, config.hidden_size, config.layer_norm_eps, ("weight",))

    def _feed_forward(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)

    def _attention(self, config: Any, build: BuildContext, rotary: Rotary, index: int) -> SelfAttention:
        window, biased = layer_window(config, index), config.attention_bias
        shape = AttentionSizes.from_config(config, window=window, bias=biased, output_bias=biased)
        return SelfAttention(build, shape, None if window is None else rotary)

    def head(self, x: Tensor) -> Tensor:
        out: Tensor = self._ops.scale(super().head(x), self._scale)
        return out
