"""Gemma 4's assistants (Google 2026): layers of Gemma 4 that have queries alone, over the model's own KV cache.

All drafts of a request are drawn at the place of its last token. They see the tokens before it, which the model has
computed; the draft before each one, and the hidden state that stands for it, are what the layers read.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.types import Batch
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.attention.attention import AttentionSizes, QueryAttention, SelfAttention
from quintet.layers.attention.kv_scales import KVScales
from quintet.layers.build import BuildContext, Layer, replicated
from quintet.layers.decoder import CausalLM, rounded
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.layer_state import LayerMixer, StepState
from quintet.layers.linear import LMHead, column_parallel
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.models.draft_heads.base import DraftHead, fusion
from quintet.models.gemma4 import Gemma4DecoderLayer, Gemma4Model, layer_entries, make_rotaries

SLIDING, FULL = "sliding_attention", "full_attention"


class CacheReader(QueryAttention):
    """Attention over the pages of one of the model's layers, at the place of the last token that the model computed.

    Queries are turned by the position after it. The step's K and V, which a platform writes, are the queries: their
    slots are the null page's.
    """

    mixing: LayerMixer

    def __init__(self, build: BuildContext, shape: AttentionSizes, rotary: Rotary, norm: RMSNorm) -> None:
        super().__init__(build, shape, rotary, norm)
        self._make_mixer, self._shape = build.make_mixer, shape
        self._scales: tuple[KVScales, ...] = ()  # the other layer's, which are no part of this one
        self._written = 0  # KV heads of this rank

    def attach(self, source: SelfAttention) -> None:
        """Has it read this layer's pages; behind a window, those that the model's next token sees, which alone are
        kept. ValueError if the layer's heads are others."""
        sizes = self._shape.kv_heads, self._shape.head_dim
        if sizes != (theirs := (source.mixing.kv_heads, source.spec.head_dim)):
            raise ValueError(
                f"the draft head reads {sizes[0]} KV heads of {sizes[1]} features, and the model's layers have "
                f"{theirs[0]} of {theirs[1]}; use a head that was trained for this model"
            )
        window = source.spec.window
        spec = replace(source.spec, heads=self.heads, window=None if window is None else max(window - 1, 1))
        self.mixing, self._scales, self._written = self._make_mixer(spec), (source.kv_scales,), spec.kv_heads
        self.mixing.source = source.mixing

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        q = self.queries(x, cache, self.rotary.table[1:])
        (scales,), written = self._scales, q[:, : self._written]
        if not scales.enabled:
            mixed = self.mixing(q, written, written, cache)
        else:
            mixed = scales.scale_output(self.mixing(scales.scale_queries(q), written, written, cache).reshape(q.shape))
        out: Tensor = self.out(mixed.reshape(q.shape[0], -1))
        return out


class ClusteredHead(Layer):
    """Logits of the tokens whose clusters score highest; the others' are -inf."""

    token_ordering: Tensor  # [V] int32: tokens, cluster by cluster

    def __init__(self, build: BuildContext, config: Any) -> None:
        super().__init__(build)
        self._build, self._vocab, self._count = build, config.vocab_size, config.num_centroids
        self._chosen = config.centroid_intermediate_top_k
        self.scores = column_parallel(
            build, config.hidden_size, {"centroids": replicated(config.num_centroids, build.size)}
        )

    def weights(self, path: str) -> list[Weight]:
        part = CheckpointSlice(f"{path}.token_ordering", (self._vocab,), ((0, self._vocab),) * self._build.size)
        return [Weight("token_ordering", (part,), 0, self._build.rank, torch.int32, "vector")]

    def forward(self, x: Tensor, table: VocabParallelEmbedding) -> Tensor:  # [L, H] -> [L, V]
        clusters = self.scores(x).topk(self._chosen, dim=-1).indices
        ids = self.token_ordering.view(self._count, -1)[clusters].flatten(1)  # [L, tokens of the clusters]
        logits = (table(ids.flatten()).view(*ids.shape, -1) @ x[:, :, None])[..., 0]
        return x.new_full((len(x), self._vocab), float("-inf")).scatter_(1, ids.long(), logits)


class Gemma4AssistantHead(DraftHead):
    """The model's embedding of a token and the hidden state before it, joined by a product, go through all layers."""

    reads_cache = True

    def __init__(self, config: Any, build: BuildContext) -> None:
        """`config`: of the layers, with the entries around it."""
        super().__init__(config, build)
        width, wide = config.hidden_size, config.backbone_hidden_size
        self._scale, self._kinds = rounded(wide**0.5, build.dtype), config.layer_types
        self.pre_projection = fusion(build, "pre_projection", 2 * wide, width)
        self.post_projection = fusion(build, "post_projection", width, wide)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Gemma4DecoderLayer(config, build, each) for each in _readers(config, build))
        self.model.norm = RMSNorm(build, width, config.rms_norm_eps)
        if config.use_ordered_embeddings:
            self.recordable = False
            self.model.embed_tokens = VocabParallelEmbedding(build, config.vocab_size, width)
            self.masked_embedding = ClusteredHead(build, config)
        else:
            self.lm_head = LMHead.from_config(build, config)

    def borrow(self, model: CausalLM) -> None:
        super().borrow(model)
        trunk = model.get_submodule(model.trunk_name)
        if not isinstance(trunk, Gemma4Model):
            raise ValueError("Gemma 4's assistant needs Gemma 4 by quintet's own code; leave model_impl out")
        attending = [layer.self_attn for layer in trunk.layers]
        keeping = [each for each in attending if isinstance(each, SelfAttention)]
        last = {FULL if each.spec.window is None else SLIDING: each for each in keeping}
        for kind, layer in zip(self._kinds, self.model.layers, strict=True):  # type: ignore[arg-type]
            if kind not in last:
                raise ValueError(
                    f"the draft head reads layers of {kind}, and the model has none with a cache of its own; use a "
                    "head that was trained for this model"
                )
            layer.self_attn.attach(last[kind])

    def combine(self, states: Tensor, places: Tensor | None) -> Tensor:
        out: Tensor = self._borrowed[1](states)
        return out

    def embed(self, batch: Batch) -> Tensor:
        out: Tensor = self._borrowed[0].embed(batch, self._scale)
        return out

    def hidden_states(self, embeds: Tensor, hidden: Tensor, cache: StepState) -> tuple[Tensor, Tensor]:
        streams = (self.pre_projection(self._ops.beside(embeds, hidden)),)
        for layer in self.model.layers:  # type: ignore[union-attr]
            streams = layer(streams, None, cache)
        normalized = self.model.norm(self.rows(streams[0], cache))  # type: ignore[operator]
        return normalized, self.post_projection(normalized)

    def head(self, x: Tensor) -> Tensor:
        if not hasattr(self, "masked_embedding"):
            return super().head(x)
        out: Tensor = self.masked_embedding(x, self.model.embed_tokens)
        return out


def _readers(config: Any, build: BuildContext) -> list[CacheReader]:
    """Makes the attention of each layer."""
    rotaries, found = make_rotaries(config, build), []
    for kind, own in zip(config.layer_types, layer_entries(config), strict=True):
        shape = AttentionSizes(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=own["num_key_value_heads"],
            head_dim=own["head_dim"],
            bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        found.append(CacheReader(build, shape, rotaries[kind], RMSNorm(build, own["head_dim"], config.rms_norm_eps)))
    return found
