"""A whole model in the place of quintet's: Llama whose last feed-forward serves no more rows than are asked for."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary
from torch import Tensor


class LastBlock(PreNormBlock):
    """Every token's K and V go to the cache; then the tokens go whose logits nobody wants."""

    def __init__(self, config: Any, build: BuildContext, attention: SelfAttention, mlp: GatedMLP) -> None:
        super().__init__(config, build, attention, mlp)
        self._ops = build.ops.take("take_rows")

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, rows = self.self_attn(x, cache), cache.batch.logits_indices
        x, residual = (self._ops.take_rows(each, rows) for each in (x, residual))
        if cache.lora is not None:
            cache.lora.select_output_rows(self._ops.take_rows)  # of tokens' adapters, the same
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class AcmeLlamaModel(DecoderTrunk):
    """Its last block hands on the wanted rows alone."""

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        x, residual = self.embed_tokens.embed(cache.batch), None
        for layer in self.layers:
            x, residual = layer(x, residual, cache)
        return self.norm(x, residual)[0], []


class AcmeLlamaForCausalLM(CausalLM):
    """As quintet.models.llama, but for the last block."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary, last = Rotary.from_config(build, config), config.num_hidden_layers - 1
        whole = bool(build.requested_outputs.aux_hidden_states)  # of every token, in every layer

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            shape = AttentionSizes.from_config(config, bias=config.attention_bias, output_bias=config.attention_bias)
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
            kind = LastBlock if index == last and not whole else PreNormBlock
            return kind(config, build, SelfAttention(build, shape, rotary), mlp)

        self.supports_pipeline = whole  # AcmeLlamaModel goes through all layers
        self.model = (DecoderTrunk if whole else AcmeLlamaModel)(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
