"""Trunk of layers that have embeddings of their own, and of which some read the KV cache of an earlier one.

Gemma 3n and Gemma 4 (Google 2025 and 2026).
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import SelfAttention, SharedKVAttention
from quintet.layers.build import BuildContext, replicated
from quintet.layers.decoder import CausalLM, rounded, select_output_rows
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.gemma.altup import Streams
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead, column_parallel
from quintet.layers.norm import RMSNorm
from quintet.layers.pipeline import Stage, drop_other_layers

HALF = 2.0**-0.5


class PerLayerTrunk(nn.Module):
    """A step -> normalised hidden states of its rows, and taps.

    Its layers are called with (streams, the layer's own embeddings [T, P] or None, cache) and return streams: one, but
    for subclasses that expand() the embeddings into more, and merge() those that the last layer returns.
    """

    num_streams = 1
    pads_rows = False  # True: rows in the places of tokens have the first token's layer embeddings; False: no token's
    first_stage: tuple[str, ...] = (
        "embed_tokens", "embed_tokens_per_layer", "projection", "per_layer_projection_norm",
    )  # fmt: skip
    last_stage: tuple[str, ...] = ("norm",)

    def __init__(self, config: Any, build: BuildContext, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, getattr(config, "hidden_size_per_layer_input", 0)
        self._build, self._hidden, self._count, self._inner = build, hidden, len(layers), inner
        self._ops = build.ops.take("take_rows")
        self._scales = rounded(hidden**0.5, build.dtype), rounded(inner**0.5, build.dtype)
        self.embed_tokens = VocabParallelEmbedding(build, config.vocab_size, hidden)
        if inner:
            build.ops.take("known_ids", "scale", "add", "choose_rows")
            self._shrinks = rounded(hidden**-0.5, build.dtype), rounded(HALF, build.dtype)
            self._known, width = config.vocab_size_per_layer_input, self._count * inner
            self.embed_tokens_per_layer = VocabParallelEmbedding(build, self._known, width)
            self.projection = column_parallel(
                build, hidden, {"per_layer_model_projection": replicated(width, build.size)}
            )
            self.per_layer_projection_norm = RMSNorm(build, inner, config.rms_norm_eps)
        self.layers = nn.ModuleList(layers)
        self._sources = _sources(layers)
        self.norm = RMSNorm(build, hidden, config.rms_norm_eps)

    def expand(self, x: Tensor) -> Streams:
        """Returns the streams of the first layer, made of the embeddings [T, H]."""
        return (x,)

    def merge(self, streams: Streams) -> Tensor:
        """Returns the hidden states that the last layer's streams stand for."""
        return streams[0]

    @property
    def blocks(self) -> nn.ModuleList:
        """Its layers."""
        return self.layers

    def keep_stage(self, stage: Stage) -> None:
        """Drops the parts of other pipeline stages; the first stage looks up the per-layer embeddings of all layers."""
        before = [name for name in self.first_stage if hasattr(self, name)]
        drop_other_layers(self, stage, before, "layers", self.last_stage)

    def reads(self, at: int) -> tuple[int, ...]:
        """Widths of what layers from `at` on read beside the first stream: the others, embeddings of their own, and of
        each that they read K and V."""
        own = [(self._count - at) * self._inner] * bool(self._inner)
        sizes = [each.spec.kv_heads * each.spec.head_dim for each in self._read(at)]
        return (*[self._hidden] * (self.num_streams - 1), *own, *(n for n in sizes for _ in "kv"))

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        stage, wanted, taps = self._build.stage, self._build.requested_outputs.aux_hidden_states, []
        if stage.first:
            x = self.embed_tokens.embed(cache.batch, self._scales[0])
            own, streams = self._embed_layers(x, cache), self.expand(x)
        else:
            own, streams = self._receive(cache)
        for index, layer in stage.select_layers([*self.layers]):
            if index in wanted:
                taps.append(streams[0])
            if layer is not None:
                streams = layer(streams, None if own is None else own[:, index - stage.start], cache)
        if not stage.last:
            rest = () if own is None else (own[:, stage.stop - stage.start :],)
            kept = [each for source in self._read(stage.stop) for each in cache.shared_kv[source.mixing]]
            cache.intermediate_tensors = (*streams, *rest, *kept)
            return streams[0], taps
        rows = tuple(select_output_rows(each, cache, self._ops) for each in streams)
        return self.norm(self.merge(rows)), taps

    def _read(self, at: int) -> list[SelfAttention]:
        """Returns the layers before `at` with a KV cache that layers from there on read."""
        return [each for place, last, each in self._sources if place < at <= last]

    def _receive(self, cache: StepState) -> tuple[Tensor | None, Streams]:
        """Embeddings of the layers from here on, and the streams. K and V go where their readers look for them."""
        x, _ = cache.received_hidden_states(self._build.dtype)
        start = self._build.stage.start
        beside = iter(cache.shared_tensors(self._build.dtype, self.reads(start)))
        streams = (x, *itertools.islice(beside, self.num_streams - 1))
        own = next(beside).view(len(x), -1, self._inner) if self._inner else None
        for source in self._read(start):
            k, v = (next(beside).view(len(x), -1, source.spec.head_dim) for _ in "kv")
            cache.shared_kv[source.mixing] = k, v
        return own, streams

    def _embed_layers(self, x: Tensor, cache: StepState) -> Tensor | None:
        """Each layer's embeddings of the tokens [T, layers, P]: made of what goes into the first, and of ids."""
        if not self._inner:
            return None
        ops, rows = self._ops, cache.batch.inputs.embed_indices
        ids = ops.known_ids(cache.batch.token_ids, self._known)
        looked_up, made = self.embed_tokens_per_layer(ids), self._made(x)
        if rows is not None and self.pads_rows:
            looked_up = ops.choose_rows(looked_up, self.embed_tokens_per_layer(ops.known_ids(ids, 1)), rows)
        looked_up = ops.scale(looked_up, self._scales[1])
        both = ops.scale(ops.add(looked_up, made), self._shrinks[1])  # add() may overwrite the first
        if rows is not None and not self.pads_rows:  # what has no id has nothing to look up
            both = ops.choose_rows(both, made, rows)
        return both.reshape(x.shape[0], self._count, self._inner)

    def _made(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, layers * P]"""
        wide = self._ops.scale(self.projection(x), self._shrinks[0])
        normed: Tensor = self.per_layer_projection_norm(wide.reshape(x.shape[0], self._count, self._inner))
        return normed.reshape(wide.shape)


def attention_layers(
    config: Any,
    make: Callable[[int], SelfAttention],
    make_shared: Callable[[int, SelfAttention], SharedKVAttention],
) -> list[nn.Module]:
    """Attention of each layer: the last num_kv_shared_layers read what the last of their kind before them keeps."""
    keeping: dict[str, SelfAttention] = {}
    found: list[nn.Module] = []
    own = config.num_hidden_layers - config.num_kv_shared_layers
    for index, kind in enumerate(config.layer_types):
        if index < own:
            keeping[kind] = make(index)
            found.append(keeping[kind])
        elif kind not in keeping:
            raise ValueError(
                f"layer {index} of {config.model_type} reads a {kind} layer's cache, and none is before it"
            )
        else:
            found.append(make_shared(index, keeping[kind]))
    return found


def _sources(layers: Iterable[Any]) -> tuple[tuple[int, int, SelfAttention], ...]:
    """Attention layers with a KV cache that others read: (its index, the index of its last reader, the layer)."""
    attending: list[Any] = [layer.self_attn for layer in layers]
    last = {each.source: place for place, each in enumerate(attending) if isinstance(each, SharedKVAttention)}
    return tuple((place, last[each], each) for place, each in enumerate(attending) if each in last)


class ValueNormAttention(SelfAttention):
    """Attention that normalises each head's v too."""

    v_norm: RMSNorm

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return q, k, self.v_norm(v)


class PerLayerCausalLM(CausalLM):
    """The trunk and a head with a soft-cap."""

    model: PerLayerTrunk

    def __init__(self, config: Any, build: BuildContext, model: PerLayerTrunk) -> None:
        super().__init__(build)
        first = config.num_hidden_layers - config.num_kv_shared_layers
        reading = "|".join(str(index) for index in range(first, config.num_hidden_layers))
        self.ignored_tensors = (
            *self.ignored_tensors,
            rf"model\.layers\.({reading})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*",
        )
        self.model = model
        self.lm_head = LMHead.from_config(build, config)
        self._ops, self._softcap = build.ops.take("softcap"), config.final_logit_softcapping

    def shared_tensor_widths(self, at: int) -> tuple[int, ...]:
        """Streams, embeddings, K and V."""
        return self.model.reads(at)

    def head(self, x: Tensor) -> Tensor:
        logits = super().head(x)
        return logits if self._softcap is None else self._ops.softcap(logits, self._softcap)
