"""DeBERTa v2 and v3 (He et al. 2021), the trunk: BERT with disentangled attention, distances in ever wider buckets."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from quintet.interface.weights import FLOATS
from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.attention.disentangled import (
    DisentangledAttention,
    DistanceColumns,
    bucketed_columns,
    disentangled_scale,
    distance_table,
    plain_columns,
)
from quintet.layers.build import BuildContext
from quintet.layers.decoder import refuse
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder import Encoder, PostNormEncoderBlock, encoder_attention_sizes, eps, plain_mlp
from quintet.layers.rope import Rotary
from quintet.layers.weight_transform import TransformedTensor
from quintet.models.bert import NAMES

VECTORS, NORM = "encoder.rel_embeddings.weight", "encoder.LayerNorm"
MAX_REACH = 2**20  # of distances, whose columns are made at load
TABLES = {"c2p": ("of_queries", "pos_key_proj"), "p2c": ("of_keys", "pos_query_proj")}  # and what makes their vectors
SHARED = {"pos_key_proj": "k_proj", "pos_query_proj": "q_proj"}  # with share_att_key


class DebertaV2Model(Encoder):
    """Vectors of distances go through each layer's projections when they are loaded, and are held for each head."""

    prefixes = ("deberta.",)
    names: ClassVar[Sequence[tuple[str, str]]] = (
        ("attention.self.query_proj.", "attention.q_proj."),
        ("attention.self.key_proj.", "attention.k_proj."),
        ("attention.self.value_proj.", "attention.v_proj."),
        ("attention.self.", "attention."),
        *NAMES,
    )
    ignored_tensors = (*Encoder.ignored_tensors, r"(lm|mask)_predictions\..*")

    def __init__(self, config: Any, build: BuildContext) -> None:
        refuse(config, "conv_kernel_size", "talking_head")
        if getattr(config, "embedding_size", config.hidden_size) != config.hidden_size:
            raise ValueError(f"{config.model_type} with embedding_size={config.embedding_size} is not supported")
        self._kinds = [kind for kind in config.pos_att_type or [] if kind in ("c2p", "p2c")]
        self._shares = bool(self._kinds and config.relative_attention and getattr(config, "share_att_key", False))
        if self._shares and build.lora is not None:
            raise ValueError(
                f"{config.model_type} with share_att_key projects distances by the weights of its queries and keys, "
                "which adapters would change too; leave enable_lora out, and merge the adapter (quintet merge-lora)"
            )
        if not config.position_biased_input:
            self.ignored_tensors = (*self.ignored_tensors, r"places\.weight")
        normed = "layer_norm" in str(getattr(config, "norm_rel_ebd", "none")).lower()
        self._norm_eps, self._heads = eps(config) if normed else None, config.num_attention_heads
        columns = self.columns(config) if config.relative_attention and self._kinds else None
        distances = None if columns is None else DistanceColumns(build, columns)
        self._width, self._distances = 0 if columns is None else int(columns.max()) + 1, (distances,)
        super().__init__(config, build)
        self.distances = distances

    def columns(self, config: Any) -> Tensor:
        """Returns the column of each distance: int32 [2 * reach + 1]."""
        reach, buckets = _reach(config), getattr(config, "position_buckets", -1)
        return bucketed_columns(reach, buckets) if buckets > 0 else plain_columns(reach)

    def attention_sizes(self, config: Any) -> AttentionSizes:
        """The sizes of its attention, whose scores are sums of as many products as the scale says."""
        width = getattr(config, "attention_head_size", config.hidden_size // config.num_attention_heads)
        sizes = encoder_attention_sizes(config, scale=disentangled_scale(width, 1 + len(self._kinds)))
        return replace(sizes, head_dim=width)

    def positions(self, config: Any, build: BuildContext, width: int) -> PositionEmbedding | None:
        return super().positions(config, build, width) if config.position_biased_input else None

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        sizes, (distances,) = self.attention_sizes(config), self._distances
        attention = (
            SelfAttention(build, sizes, None)
            if distances is None
            else DisentangledAttention(build, sizes, distances, self._width, self._kinds)
        )
        return PostNormEncoderBlock(build, attention, plain_mlp(config, build), config.hidden_size, eps(config))

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Makes each layer's tables of distances of the vectors that all layers have in common."""
        found = {name: entry for name, entry in entries.items() if not name.startswith((VECTORS, f"{NORM}."))}
        for layer in sorted({name.split(".")[1] for name in entries if name.startswith("layers.")}):
            path = f"layers.{layer}.attention"
            for kind in self._kinds if self._width else ():
                table, projection = TABLES[kind]
                if self._shares:
                    weight, bias = (found.get(f"{path}.{SHARED[projection]}.{end}") for end in ("weight", "bias"))
                else:
                    weight, bias = (found.pop(f"{path}.{projection}.{end}", None) for end in ("weight", "bias"))
                found[f"{path}.{table}.table"] = self._table(entries, path, weight, bias)
        return found

    def _table(self, entries: Mapping[str, Any], path: str, weight: Any, bias: Any) -> TransformedTensor:
        """Returns the entry of a layer's table."""
        names = [VECTORS, *([] if self._norm_eps is None else [f"{NORM}.weight", f"{NORM}.bias"])]
        parts = [weight, *(entries.get(name) for name in names), *([] if bias is None else [bias])]
        if any(each is None or each.dtype not in FLOATS for each in parts):
            raise ValueError(
                f"tables of distances for {path} are made of floats: a projection, {', '.join(names)}; some are not in "
                "the files, or quantized; use the model's original"
            )
        make = partial(_made, width=self._width, norm_eps=self._norm_eps, heads=self._heads)
        rows = self._heads * self._width
        return TransformedTensor(weight, make, tuple(parts[1:]), (rows, weight.shape[0] // self._heads))


def _made(weight: Tensor, vectors: Tensor, *more: Tensor, width: int, norm_eps: float | None, heads: int) -> Tensor:
    """Returns a table; `more`: the norm's weight and bias where there is an epsilon, and the projection's bias."""
    if len(vectors) < width:
        raise ValueError(f"{VECTORS} has {len(vectors)} vectors, and config.json asks for {width}; fetch it anew")
    norm = None if norm_eps is None else (more[0], more[1], norm_eps)
    bias = more[-1] if len(more) % 2 else None
    return distance_table(weight, vectors[:width], bias, norm, heads)


def _reach(config: Any) -> int:
    reach = int(getattr(config, "max_relative_positions", -1))
    reach = int(config.max_position_embeddings) if reach < 1 else reach
    if reach > MAX_REACH:
        raise ValueError(f"{config.model_type} with distances up to {reach} is not computed; {MAX_REACH} are")
    return reach
