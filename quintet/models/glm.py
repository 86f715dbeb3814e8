"""GLM-4 as of 2024 (Zeng et al. 2024): Llama with half of each head turned, neighbours paired, gate and up fused."""

from typing import Any

from quintet.layers.attention import Heads, SelfAttention
from quintet.layers.build import Build
from quintet.layers.decoder import CausalLM, Decoder, PreNormBlock, head_source
from quintet.layers.linear import LMHead, Stored
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary


class Model(CausalLM):
    """Pre-norm blocks, biases on q, k and v where the checkpoint says so."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(build)
        rotary, shape = Rotary.of(build, config, partial=True, neighbours=True), self._heads(config)

        def block(config: Any, build: Build, index: int) -> PreNormBlock:
            fused = Stored(fused="gate_up_proj")
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, stored=fused)
            return PreNormBlock(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = Decoder(config, build, block)
        self.lm_head = LMHead(build, config.hidden_size, config.vocab_size, head_source(config))

    def _heads(self, config: Any) -> Heads:
        return Heads.of(config, bias=config.attention_bias)
