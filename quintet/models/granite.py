"""Granite 3 (IBM 2024): Llama with a multiplier on the embedding, each branch, the scores and the logits."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import BlockFactory, DecoderTrunk, PreNormBlock
from quintet.layers.layer_state import StepState
from quintet.models.llama import LlamaForCausalLM


class GraniteDecoderLayer(PreNormBlock):
    """A pre-norm block that scales its branches before they join the residual."""

    def __init__(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(config, build, attention, mlp)
        self._ops, self._scale = build.ops.take("scale"), self.multiplier(config)

    @staticmethod
    def multiplier(config: Any) -> float:
        """Returns the factor of each branch."""
        return float(config.residual_multiplier)

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self._ops.scale(self.self_attn(x, cache), self._scale)
        x, residual = self.post_attention_layernorm(x, residual)
        return self._ops.scale(self.mlp(x), self._scale), residual


class GraniteForCausalLM(LlamaForCausalLM):
    """Scaled embedding, pre-norm blocks with scaled branches, rotary positions, divided logits."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self._ops, self._factor = build.ops.take("scale"), 1 / config.logits_scaling

    def _trunk(self, config: Any, build: BuildContext, block: BlockFactory) -> DecoderTrunk:
        return DecoderTrunk(config, build, block, scale=config.embedding_multiplier, scales_input_embeds=True)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        scale, bias = config.attention_multiplier, config.attention_bias
        return AttentionSizes.from_config(config, scale=scale, bias=bias, output_bias=bias)

    def _block(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> nn.Module:
        return GraniteDecoderLayer(config, build, attention, mlp)

    def head(self, x: Tensor) -> Tensor:
        out: Tensor = self._ops.scale(super().head(x), self._factor)
        return out
