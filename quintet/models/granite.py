"""Granite 3 (IBM 2024): Llama with a multiplier on the embedding, each branch, the scores and the logits."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention import Heads, SelfAttention
from quintet.layers.build import Build
from quintet.layers.decoder import CausalLM, Decoder, PreNormBlock, head_source
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary
from quintet.platforms.interface import KV
from quintet.types import Batch


class Block(PreNormBlock):
    """A pre-norm block whose branches are scaled before they join the residual."""

    def __init__(self, config: Any, build: Build, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(config, build, attention, mlp)
        self._ops, self._scale = build.ops.take("scale"), config.residual_multiplier

    def forward(self, x: Tensor, residual: Tensor | None, kv: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, kv = self.self_attn(x, kv, batch)
        x, residual = self.post_attention_layernorm(self._ops.scale(x, self._scale), residual)
        return self._ops.scale(self.mlp(x), self._scale), residual, kv


class Model(CausalLM):
    """Scaled embedding, pre-norm blocks with scaled branches, rotary positions, divided logits."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        rotary = Rotary.of(build, config)

        def block(config: Any, build: Build, index: int) -> Block:
            shape = Heads.of(
                config,
                scale=config.attention_multiplier,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
            )
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
            return Block(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = Decoder(config, build, block, scale=config.embedding_multiplier)
        self.lm_head = LMHead(build, config.hidden_size, config.vocab_size, head_source(config))
        self._ops, self._factor = build.ops.take("scale"), 1 / config.logits_scaling

    def forward(self, kv: KV, batch: Batch) -> tuple[Tensor, KV]:
        logits, kv = super().forward(kv, batch)
        return self._ops.scale(logits, self._factor), kv
