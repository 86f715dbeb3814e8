"""A whole model in the place of quintet's: Llama whose last feed-forward serves no more rows than are asked for."""

from typing import Any

from quintet.layers.attention import Heads, SelfAttention
from quintet.layers.build import Build
from quintet.layers.decoder import CausalLM, Decoder, PreNormBlock, head_source
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary
from quintet.platforms.interface import KV
from quintet.types import Batch
from torch import Tensor


class LastBlock(PreNormBlock):
    """Every token's K and V go to the cache; then the tokens go whose logits nobody wants."""

    def __init__(self, config: Any, build: Build, attention: SelfAttention, mlp: GatedMLP) -> None:
        super().__init__(config, build, attention, mlp)
        self._ops = build.ops.take("embedding")

    def forward(self, x: Tensor, residual: Tensor | None, kv: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, kv = self.self_attn(x, kv, batch)
        x, residual = (self._ops.embedding(batch.logit_rows, each, 0, False) for each in (x, residual))
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual, kv


class Trunk(Decoder):
    """Its last block hands on the wanted rows alone."""

    def forward(self, kv: KV, batch: Batch) -> tuple[Tensor, KV]:
        x, residual, cache = self.embed_tokens(batch.token_ids), None, []
        for layer, pages in zip(self.layers, kv, strict=True):
            x, residual, pages = layer(x, residual, pages, batch)
            cache.append(pages)
        return self.norm(x, residual)[0], tuple(cache)


class Model(CausalLM):
    """As quintet.models.llama, but for the last block."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        rotary, last = Rotary.of(build, config), config.num_hidden_layers - 1

        def block(config: Any, build: Build, index: int) -> PreNormBlock:
            shape = Heads.of(config, bias=config.attention_bias, output_bias=config.attention_bias)
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
            kind = LastBlock if index == last else PreNormBlock
            return kind(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = Trunk(config, build, block)
        self.lm_head = LMHead(build, config.hidden_size, config.vocab_size, head_source(config))
