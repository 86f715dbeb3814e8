"""BART (Lewis et al. 2020) and mBART, Marian, Pegasus, M2M-100, NLLB, PLBART, MVP, Blenderbot: text by an encoder."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.decoder import require, run_layers, select_output_rows
from quintet.layers.encoder_decoder import BlockSizes, CrossDecoderBlock, CrossDecoderLM
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead
from quintet.models.encoders.bart import (
    COMPUTED,
    LOGITS_BIAS,
    SHARED,
    TRAITS,
    BartEncoder,
    BartStack,
    canonical_name,
    with_own_tables,
)


class BartDecoder(BartStack):
    """The decoder: a step -> hidden states of its rows, and taps."""

    def __init__(self, config: Any, build: BuildContext, vocab_size: int) -> None:
        sizes = BlockSizes.of(config, "decoder", TRAITS[config.model_type].pre_norm)
        layers = nn.ModuleList(CrossDecoderBlock(sizes, build) for _ in range(config.decoder_layers))
        super().__init__(config, build, vocab_size, layers)
        self._ops, self._build = build.ops.take("take_rows", "add"), build
        self._norms_tokens = TRAITS[config.model_type].norms_tokens

    def embed(self, cache: StepState) -> Tensor:
        if not self._norms_tokens:
            return super().embed(cache)
        tokens = self.layernorm_embedding(self.embed_tokens.embed(cache.batch, self._scale))
        out: Tensor = self._ops.add(tokens, self.embed_positions(cache.batch.positions))
        return out

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        x, taps = run_layers(self.layers, self.embed(cache), cache, self._build)
        return self.layer_norm(select_output_rows(x, cache, self._ops)), taps


class BartForConditionalGeneration(CrossDecoderLM):
    """The decoder and its head."""

    encoder_class = BartEncoder
    positions_entry = "max_position_embeddings"
    gathered_from = (SHARED, LOGITS_BIAS)
    ignored_tensors = (*CrossDecoderLM.ignored_tensors, COMPUTED)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        if config.model_type == "mvp":
            require(config, {"use_prompt": False})
        vocab = config.vocab_size
        if not getattr(config, "share_encoder_decoder_embeddings", True):
            vocab = config.decoder_vocab_size
        self.model = nn.ModuleDict({"decoder": BartDecoder(config, build, vocab)})
        source = "/model.decoder.embed_tokens" if build.ties_head(config) else "/lm_head"
        self.lm_head = LMHead(build, config.d_model, vocab, source, TRAITS[config.model_type].logits_bias)

    canonical = staticmethod(canonical_name)  # no other name depends on the class

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Each part gets the table of both, and the head its bias."""
        return with_own_tables(entries)
