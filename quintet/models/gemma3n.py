"""Gemma 3n (Google 2025), the text model: four streams (AltUp), and embeddings of each layer's own."""

import itertools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from quintet.layers.altup import AltUp, AltUpProjections, AltUpSizes, SparseMLP, Streams
from quintet.layers.attention.attention import AttentionSizes, SelfAttention, SharedKVAttention
from quintet.layers.build import BuildContext, replicated
from quintet.layers.decoder import CausalLM, layer_window, rounded, select_output_rows
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead, column_parallel
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.pipeline import Stage, drop_other_layers
from quintet.layers.rope import Rotary

HALF = 2.0**-0.5


class Gemma3nAttention(SelfAttention):
    """Attention that normalises each head's v too."""

    v_norm: RMSNorm

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return q, k, self.v_norm(v)


class Laurel(nn.Module):
    """x plus a product of low rank, normalised (LAuReL; Menghani et al. 2024)."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        hidden, rank, size = config.hidden_size, config.laurel_rank, build.size
        self.left = column_parallel(build, hidden, {"linear_left": replicated(rank, size)})
        self.right = column_parallel(build, rank, {"linear_right": replicated(hidden, size)})
        self.post_laurel_norm = RMSNorm(build, hidden, config.rms_norm_eps)
        self._ops = build.ops.take("add")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._ops.add(self.post_laurel_norm(self.right(self.left(x))), x)
        return out


class Gemma3nDecoderLayer(nn.Module):
    """Streams and the layer's own embeddings [T, P] -> streams."""

    def __init__(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        hidden, eps, inner = config.hidden_size, config.rms_norm_eps, config.hidden_size_per_layer_input
        self._active = config.altup_active_idx
        self.altup = AltUp(
            build, AltUpSizes(hidden, config.altup_num_inputs, self._active, eps, config.altup_correct_scale)
        )
        self.laurel = Laurel(config, build)
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = RMSNorm(build, hidden, eps)
        self.post_attention_layernorm = RMSNorm(build, hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(build, hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(build, hidden, eps)
        self.into = column_parallel(build, hidden, {"per_layer_input_gate": replicated(inner, build.size)})
        self.back = column_parallel(build, inner, {"per_layer_projection": replicated(hidden, build.size)})
        self.post_per_layer_input_norm = RMSNorm(build, hidden, eps)
        self._ops, self._kind = build.ops.take("add", "scale", "beside", "gated"), config.hidden_activation

    def forward(self, streams: Streams, own: Tensor, cache: StepState) -> Streams:
        ops, predicted = self._ops, self.altup.predict(streams)
        normed = self.input_layernorm(predicted[self._active])
        x = ops.add(self.post_attention_layernorm(self.self_attn(normed, cache)), predicted[self._active])
        x = ops.scale(ops.add(x, self.laurel(normed)), HALF)
        x = ops.add(self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), x)
        (first, *others), scaled = self.altup.correct(predicted, x)
        gated = ops.gated(ops.beside(self.into(scaled), own), self._kind)
        more = self.post_per_layer_input_norm(self.back(gated))
        return (first, *(ops.add(each, more) for each in others))


class Gemma3nModel(nn.Module):
    """A step -> normalised hidden states of its rows."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        if build.requested_outputs.aux_hidden_states:
            raise ValueError("gemma3n's layers have several streams: no taps of them are given")
        if config.altup_active_idx >= config.altup_num_inputs:
            raise ValueError(
                f"altup_active_idx is {config.altup_active_idx}, and there are {config.altup_num_inputs} streams "
                "(altup_num_inputs); correct config.json"
            )
        hidden, layers, inner = config.hidden_size, config.num_hidden_layers, config.hidden_size_per_layer_input
        self._layers, self._inner, self._known = layers, inner, config.vocab_size_per_layer_input
        self._build, self._hidden, self._others = build, hidden, config.altup_num_inputs - 1
        self._scales = rounded(hidden**0.5, build.dtype), rounded(inner**0.5, build.dtype)
        self._ops = build.ops.take("known_ids", "scale", "add", "take_rows", "choose_rows")
        self._shrinks = rounded(hidden**-0.5, build.dtype), rounded(HALF, build.dtype)
        self.embed_tokens = VocabParallelEmbedding(build, config.vocab_size, hidden)
        self.embed_tokens_per_layer = VocabParallelEmbedding(build, self._known, layers * inner)
        self.projection = column_parallel(
            build, hidden, {"per_layer_model_projection": replicated(layers * inner, build.size)}
        )
        self.per_layer_projection_norm = RMSNorm(build, inner, config.rms_norm_eps)

        def products() -> nn.ModuleList:
            outputs = replicated(hidden, build.size)
            return nn.ModuleList(
                column_parallel(build, hidden, {str(i): outputs}) for i in range(config.altup_num_inputs - 1)
            )

        self.altup_projections, self.altup_unembed_projections = products(), products()
        self._apart = AltUpProjections(build, self.altup_projections)
        self._together = AltUpProjections(build, self.altup_unembed_projections)
        self.layers = _layers(config, build)
        self._sources = _sources(self.layers)
        self.norm = RMSNorm(build, hidden, config.rms_norm_eps)

    @property
    def blocks(self) -> nn.ModuleList:
        """Its layers."""
        return self.layers

    def keep_stage(self, stage: Stage) -> None:
        """Drops the parts of other pipeline stages; the first stage looks up the per-layer embeddings of all layers."""
        tables = ["embed_tokens", "embed_tokens_per_layer"]
        before = [*tables, "projection", "per_layer_projection_norm", "altup_projections"]
        drop_other_layers(self, stage, before, "layers", ["altup_unembed_projections", "norm"])

    def reads(self, at: int) -> tuple[int, ...]:
        """Widths of what layers from `at` on read beside the first stream: the others, embeddings of their own, and of
        each that they read K and V."""
        sizes = [each.spec.kv_heads * each.spec.head_dim for each in self._read(at)]
        return (*[self._hidden] * self._others, (self._layers - at) * self._inner, *(n for n in sizes for _ in "kv"))

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        stage = self._build.stage
        if stage.first:
            x = self.embed_tokens.embed(cache.batch, self._scales[0])
            own, streams = self._of_layers(x, cache), self._apart.expand(x)
        else:
            own, streams = self._handed(cache)
        for index, layer in stage.select_layers([*self.layers]):
            streams = streams if layer is None else layer(streams, own[:, index - stage.start], cache)
        if not stage.last:
            kept = [each for source in self._read(stage.stop) for each in cache.shared_kv[source.mixing]]
            cache.intermediate_tensors = (*streams, own[:, stage.stop - stage.start :], *kept)
            return streams[0], []
        rows = tuple(select_output_rows(each, cache, self._ops) for each in streams)
        return self.norm(self._together.merge(rows)), []

    def _read(self, at: int) -> list[SelfAttention]:
        """Returns the layers before `at` with a KV cache that layers from there on read."""
        return [each for place, last, each in self._sources if place < at <= last]

    def _handed(self, cache: StepState) -> tuple[Tensor, Streams]:
        """Embeddings of the layers from here on, and the streams. K and V go where their readers look for them."""
        x, _ = cache.received_hidden_states(self._build.dtype)
        start = self._build.stage.start
        beside = iter(cache.shared_tensors(self._build.dtype, self.reads(start)))
        streams = (x, *itertools.islice(beside, self._others))
        own = next(beside).view(len(x), -1, self._inner)
        for source in self._read(start):
            k, v = (next(beside).view(len(x), -1, source.spec.head_dim) for _ in "kv")
            cache.shared_kv[source.mixing] = k, v
        return own, streams

    def _of_layers(self, x: Tensor, cache: StepState) -> Tensor:
        """Each layer's embeddings of the tokens [T, layers, P]: made of what goes into the first, and of ids."""
        ops, given, ids = self._ops, cache.batch.inputs, self._ops.known_ids(cache.batch.token_ids, self._known)
        looked_up = ops.scale(self.embed_tokens_per_layer(ids), self._scales[1])
        made = self._made(x)
        both = ops.scale(ops.add(looked_up, made), self._shrinks[1])  # add() may overwrite the first
        if given.embed_indices is not None:  # what has no id has nothing to look up
            both = ops.choose_rows(both, made, given.embed_indices)
        return both.reshape(x.shape[0], self._layers, self._inner)

    def _made(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, layers * P]"""
        wide = self._ops.scale(self.projection(x), self._shrinks[0])
        normed: Tensor = self.per_layer_projection_norm(wide.reshape(x.shape[0], self._layers, self._inner))
        return normed.reshape(wide.shape)


def _layers(config: Any, build: BuildContext) -> nn.ModuleList:
    """The last of them read what the last layer of their kind before them keeps."""
    kinds, eps, own = config.layer_types, config.rms_norm_eps, config.num_hidden_layers - config.num_kv_shared_layers
    trained, size = config.max_position_embeddings, config.head_dim
    rotaries = {kind: Rotary(build, size, config.rope_parameters[kind], trained) for kind in sorted(set(kinds))}
    keeping: dict[str, SelfAttention] = {}
    blocks = []
    for index, kind in enumerate(kinds):
        bias = config.attention_bias
        shape = AttentionSizes.from_config(
            config, scale=1.0, window=layer_window(config, index), bias=bias, output_bias=bias
        )
        attention: nn.Module
        q_norm = RMSNorm(build, size, eps)
        if index < own:
            attention = keeping[kind] = made = Gemma3nAttention(build, shape, rotaries[kind])
            made.q_norm, made.k_norm = q_norm, RMSNorm(build, size, eps)
            made.v_norm = RMSNorm(build, size, eps, has_weight=False)
        elif kind not in keeping:
            raise ValueError(
                f"layer {index} of {config.model_type} reads a {kind} layer's cache, and none is before it"
            )
        else:
            attention = SharedKVAttention(build, shape, rotaries[kind], keeping[kind], q_norm)
        width, sparsity = config.intermediate_size[index], config.activation_sparsity_pattern[index]
        mlp: nn.Module
        if sparsity > 0:
            mlp = SparseMLP(build, (config.hidden_size, width), config.hidden_activation, sparsity)
        else:
            mlp = GatedMLP(build, config.hidden_size, width, config.hidden_activation)
        blocks.append(Gemma3nDecoderLayer(config, build, attention, mlp))
    return nn.ModuleList(blocks)


def _sources(layers: Iterable[nn.Module]) -> tuple[tuple[int, int, SelfAttention], ...]:
    """Attention layers with a KV cache that others read: (its index, the index of its last reader, the layer)."""
    attending: list[Any] = [layer.self_attn for layer in layers]
    last = {each.source: place for place, each in enumerate(attending) if isinstance(each, SharedKVAttention)}
    return tuple((place, last[each], each) for place, each in enumerate(attending) if each in last)


class Gemma3nForCausalLM(CausalLM):
    """Gemma 3n's text model."""

    model: Gemma3nModel

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        first = config.num_hidden_layers - config.num_kv_shared_layers
        reading = "|".join(str(index) for index in range(first, config.num_hidden_layers))
        if not config.altup_correct_scale:
            self.ignored_tensors = (*self.ignored_tensors, r"model\.layers\.\d+\.altup\.correct_output_scale")
        self.ignored_tensors = (
            *self.ignored_tensors,
            rf"model\.layers\.({reading})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*",
        )
        self.model = Gemma3nModel(config, build)
        self.lm_head = LMHead.from_config(build, config)
        self._ops, self._softcap = build.ops.take("softcap"), config.final_logit_softcapping

    def shared_tensor_widths(self, at: int) -> tuple[int, ...]:
        """Streams, embeddings, K and V."""
        return self.model.reads(at)

    def head(self, x: Tensor) -> Tensor:
        logits = super().head(x)
        return logits if self._softcap is None else self._ops.softcap(logits, self._softcap)
