"""Granite 3 (IBM 2024): Llama with a multiplier on the embedding, each branch, the scores and the logits."""

from typing import Any, ClassVar

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary


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


class GraniteForCausalLM(CausalLM):
    """Scaled embedding, pre-norm blocks with scaled branches, rotary positions, divided logits."""

    block: ClassVar[type[GraniteDecoderLayer]] = GraniteDecoderLayer

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config)

        def made(config: Any, build: BuildContext, index: int) -> GraniteDecoderLayer:
            shape = AttentionSizes.from_config(
                config,
                scale=config.attention_multiplier,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
            )
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
            return self.block(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = DecoderTrunk(config, build, made, scale=config.embedding_multiplier, scales_input_embeds=True)
        self.lm_head = LMHead.from_config(build, config)
        self._ops, self._factor = build.ops.take("scale"), 1 / config.logits_scaling

    def head(self, x: Tensor) -> Tensor:
        out: Tensor = self._ops.scale(super().head(x), self._factor)
        return out
