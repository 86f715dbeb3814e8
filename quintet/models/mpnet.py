"""MPNet (Song et al. 2020), the trunk: BERT with an attention bias by distance, from one table for all layers."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from quintet.layers.attention.relative_bias import MAX_DISTANCE, RelativeAttention, RelativeBias, bias_by_distance
from quintet.layers.build import BuildContext
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder import Encoder, PostNormEncoderBlock, encoder_attention_sizes, eps, plain_mlp
from quintet.layers.rope import Rotary
from quintet.layers.weight_transform import TransformedTensor
from quintet.models.bert import NAMES

FIRST = 2  # of the learned positions: those before it are padding's, whatever config.json calls the padding
LEARNED, TABLE = "encoder.relative_attention_bias.weight", "distances.table"


class MPNetModel(Encoder):
    """Learned positions, and no segments."""

    prefixes = ("mpnet.",)
    names = (
        (".attention.attn.q.", ".attention.q_proj."),
        (".attention.attn.k.", ".attention.k_proj."),
        (".attention.attn.v.", ".attention.v_proj."),
        (".attention.attn.o.", ".attention.o_proj."),
        (".attention.LayerNorm.", ".attention_norm."),
        *NAMES,
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        config.type_vocab_size = 0
        bias = RelativeBias(build, encoder_attention_sizes(config))
        self._bias = (bias,)  # blocks are built before modules can be named
        super().__init__(config, build)
        self.distances = bias

    @classmethod
    def max_text_length(cls, config: Any) -> int | None:
        count: int = config.max_position_embeddings - FIRST
        return count

    def positions(self, config: Any, build: BuildContext, width: int) -> PositionEmbedding | None:
        return PositionEmbedding(build, config.max_position_embeddings - FIRST, width, FIRST)

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        (bias,) = self._bias
        attention = RelativeAttention(build, encoder_attention_sizes(config), bias)
        return PostNormEncoderBlock(build, attention, plain_mlp(config, build), config.hidden_size, eps(config))

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Expands the biases of buckets of distances to one bias for each distance."""
        found = dict(entries)
        if LEARNED in found:
            learned = found.pop(LEARNED)
            if len(learned.shape) != 2:
                raise ValueError(f"{LEARNED} is {list(learned.shape)}, and must be [buckets, heads]; fetch it anew")
            found[TABLE] = TransformedTensor(
                learned, bias_by_distance, new_shape=(learned.shape[1], 2 * MAX_DISTANCE + 1)
            )
        return found
