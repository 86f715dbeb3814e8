"""Stranger: Llama with a learned vector behind each branch (LayerScale, Touvron et al. 2021)."""

from typing import Any

from quintet.interface.weights import Weight
from quintet.layers.build import BuildContext, Layer, vector_weight
from quintet.layers.decoder import PreNormBlock
from quintet.layers.layer_state import StepState
from quintet.models.llama import LlamaForCausalLM
from torch import Tensor, nn
from transformers import LlamaConfig


class StrangerConfig(LlamaConfig):
    """Reads config.json: Llama's entries."""

    model_type = "stranger"


class LayerScale(Layer):
    """x [T, hidden] times a vector, which every rank keeps whole."""

    def __init__(self, build: BuildContext, width: int) -> None:
        super().__init__(build)
        self._build, self._width = build, width
        self.gamma: Tensor

    def weights(self, path: str) -> list[Weight]:
        return [vector_weight(self._build, path, self._width, name="gamma")]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class StrangerBlock(PreNormBlock):
    """Llama's block. The scales have the checkpoint's names: model.layers.0.attention_scale."""

    def __init__(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(config, build, attention, mlp)
        self.attention_scale = LayerScale(build, config.hidden_size)
        self.mlp_scale = LayerScale(build, config.hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.attention_scale(self.self_attn(x, cache)), residual)
        return self.mlp_scale(self.mlp(x)), residual


class StrangerForCausalLM(LlamaForCausalLM):
    """Llama with another block."""

    config_class = StrangerConfig
    reference_class = "stranger.reference:StrangerForCausalLM"

    def _block(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> nn.Module:
        return StrangerBlock(config, build, attention, mlp)
