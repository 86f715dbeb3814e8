"""Whisper (Radford et al. 2022), Distil-Whisper: a decoder of text whose layers read what an encoder hears."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.decoder import refuse, run_layers, select_output_rows
from quintet.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from quintet.layers.encoder_decoder import EPS, BlockSizes, CrossDecoderBlock, CrossDecoderLM
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead
from quintet.layers.norm import LayerNorm
from quintet.models.encoders.whisper import WhisperEncoder, canonical_name, with_plain_products


class WhisperDecoder(nn.Module):
    """Token and position embeddings, blocks, a last norm."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        self._ops, self._build = build.ops.take("add", "take_rows"), build
        self.embed_tokens = VocabParallelEmbedding(build, config.vocab_size, config.d_model)
        self.embed_positions = PositionEmbedding(build, config.max_target_positions, config.d_model)
        sizes = BlockSizes.of(config, "decoder")
        self.layers = nn.ModuleList(CrossDecoderBlock(sizes, build) for _ in range(config.decoder_layers))
        self.layer_norm = LayerNorm(build, config.d_model, EPS)

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        batch = cache.batch
        x = self._ops.add(self.embed_tokens.embed(batch), self.embed_positions(batch.positions))
        x, taps = run_layers(self.layers, x, cache, self._build)
        return self.layer_norm(select_output_rows(x, cache, self._ops)), taps


class WhisperForConditionalGeneration(CrossDecoderLM):
    """The decoder and its head, which is the token embedding."""

    encoder_class = WhisperEncoder
    positions_entry = "max_target_positions"

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "scale_embedding")
        self.model = nn.ModuleDict({"decoder": WhisperDecoder(config, build)})
        source = "/model.decoder.embed_tokens" if build.ties_head(config) else "/lm_head"
        self.lm_head = LMHead(build, config.d_model, config.vocab_size, source)

    canonical = staticmethod(canonical_name)  # no other name depends on the class

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keys get a bias of zeros."""
        return with_plain_products(entries)
