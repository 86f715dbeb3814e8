"""Moonshine (Jeffries et al. 2024): a gated decoder of text, whose layers read what an encoder hears."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import SelfAttention
from quintet.layers.attention.cross import CrossAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import DecoderTrunk
from quintet.layers.encoder_decoder import EPS, CrossDecoderLM
from quintet.layers.layer_state import StepState
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary
from quintet.models.encoders.moonshine import (
    MoonshineBlock,
    MoonshineEncoder,
    attention_sizes,
    canonical_name,
    rotary_of,
)

UP_GATE = CheckpointLayout(fused="fc1", order=(1, 0))


class MoonshineDecoderBlock(MoonshineBlock):
    """The same with attention to the encoder's rows between, and a gated feed-forward."""

    def __init__(self, config: Any, build: BuildContext, rotary: Rotary) -> None:
        sizes, width = attention_sizes(config), config.hidden_size
        kind = config.decoder_hidden_act
        mlp = GatedMLP(build, width, config.intermediate_size, kind, bias=True, stored=UP_GATE)
        super().__init__(config, build, SelfAttention(build, sizes, rotary), mlp)
        self.encoder_attn = CrossAttention(build, sizes)
        self.final_layernorm = LayerNorm(build, width, EPS, ("weight",))

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x, cache), residual)
        x, residual = self.final_layernorm(self.encoder_attn(x, cache), residual)
        return self.mlp(x), residual


class MoonshineForConditionalGeneration(CrossDecoderLM):
    """The decoder and its head, which is the token embedding."""

    encoder_class = MoonshineEncoder
    positions_entry = "max_position_embeddings"

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = rotary_of(config, build)

        def block(config: Any, build: BuildContext, index: int) -> nn.Module:
            return MoonshineDecoderBlock(config, build, rotary)

        norm = LayerNorm(build, config.hidden_size, EPS, ("weight",))
        self.model = nn.ModuleDict({"decoder": DecoderTrunk(config, build, block, norm=norm)})
        source = "/model.decoder.embed_tokens" if build.ties_head(config) else "/lm_head"
        self.lm_head = LMHead(build, config.hidden_size, config.vocab_size, source)

    canonical = staticmethod(canonical_name)  # no other name depends on the class
