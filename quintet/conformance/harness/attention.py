"""One attention layer as a model that looks up its tokens' Q, K and V in tables: all goes through the contract."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quintet.conformance.cases.random_arguments import randn
from quintet.conformance.check import NotSupported
from quintet.conformance.formats import away_from_rounding_ties, through_cache
from quintet.conformance.harness.manual_steps import Stretch, host_batch
from quintet.conformance.harness.subject import Subject
from quintet.engine.executor.batch_builder import pad
from quintet.engine.kv_cache.groups import KVCacheGroup, group_layers
from quintet.interface.platform import Mixer, Platform, SingleRank, State
from quintet.interface.types import AttentionSpec, Batch, Outputs, ShapeBucket
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, Layer, replacements, replicated
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.layer_state import LayerMixer, StepState

PADDED = 64  # tokens of a step where shapes are fixed
REQUESTS = 8  # of such a step


def mixer_of(platform: Platform, spec: AttentionSpec, ops: Any) -> Mixer:
    """Lacking if the platform refuses."""
    if spec.chunk is not None and "chunk" not in platform.optional_spec_fields:
        raise NotSupported("no attention within chunks: Platform.optional_spec_fields lacks 'chunk'")
    if spec.source == "cross" and "cross" not in platform.optional_spec_fields:
        raise NotSupported("no attention to an encoder's rows: Platform.optional_spec_fields lacks 'cross'")
    try:
        return platform.mixer(spec, ops, 0)
    except ValueError as reasons:
        raise NotSupported(str(reasons), "Platform.mixer") from reasons


@dataclass(frozen=True)
class AttentionInputs:
    """Q, K and V of every token, in the layer's type on the host. Token 0 is padding: nothing of it is a number."""

    q: Tensor  # [N, H, D]
    k: Tensor  # [N, Hkv, D]
    v: Tensor  # [N, Hkv, D]
    sinks: Tensor | None = None  # [H]

    @classmethod
    def random(cls, spec: AttentionSpec, count: int) -> "AttentionInputs":
        """Random Q, K and V of `count` tokens besides token 0, which is NaN."""
        q = randn(count + 1, spec.heads, spec.head_dim, dtype=spec.dtype)
        k, v = randn(2, count + 1, spec.kv_heads, spec.head_dim, dtype=spec.dtype, scale=1.5)
        if spec.kv_dtype is not None:
            k, v = (away_from_rounding_ties(x, spec.kv_dtype) for x in (k, v))
        sinks = randn(spec.heads, dtype=spec.dtype) if spec.sinks else None
        for each in (q, k, v):
            each[0] = torch.nan
        return cls(q, k, v, sinks)


class _Sinks(Layer):
    def __init__(self, build: BuildContext, heads: int) -> None:
        super().__init__(build)
        self._heads, self._dtype = heads, build.dtype
        self.weight: Tensor

    def weights(self, path: str) -> list[Weight]:
        part = CheckpointSlice(f"{path}.weight", (self._heads,), replicated(self._heads, 1).ranges)
        return [Weight("weight", (part,), 0, 0, self._dtype, "vector")]


class AttentionModel(nn.Module):
    """A step -> attention's results of its rows [L, H * D] in the place of logits."""

    def __init__(self, build: BuildContext, spec: AttentionSpec, count: int) -> None:
        super().__init__()
        self._spec, self._ops, self.vocab_size = spec, build.ops.take("take_rows"), spec.heads * spec.value_dim
        keys = spec.kv_heads * spec.head_dim
        self.q = VocabParallelEmbedding(build, count, spec.heads * spec.head_dim, is_replicated=True)
        self.k = VocabParallelEmbedding(build, count, keys, is_replicated=True)
        self.v = None if spec.shared else VocabParallelEmbedding(build, count, keys, is_replicated=True)
        self.sinks = _Sinks(build, spec.heads) if spec.sinks else None
        self.mixing = build.make_mixer(spec)
        group_layers([self.mixing])

    def load(self, platform: Platform, numbers: AttentionInputs) -> None:
        given = {"q": numbers.q, "k": numbers.k, "v": numbers.v, "sinks": numbers.sinks}
        for name, layer in self.named_children():
            if isinstance(layer, Layer):
                (weight,), tensor = layer.weights(name), given[name]
                assert tensor is not None
                tensor = tensor.flatten(1) if tensor.dim() > 1 else tensor
                layer.assign(platform.place(weight, {weight.slices[0].source: tensor.clone()}))

    def forward(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        q, k, v = (self._looked_up(table, batch.token_ids) for table in (self.q, self.k, self.v))
        assert q is not None and k is not None
        sinks = None if self.sinks is None else self.sinks.weight
        cache = StepState(state, batch)
        rows = self.mixing(q, k, v, cache, sinks).reshape(batch.token_ids.shape[0], self.vocab_size)
        return Outputs(self._ops.take_rows(rows, batch.logits_indices)), cache.state

    def _looked_up(self, table: VocabParallelEmbedding | None, token_ids: Tensor) -> Tensor | None:
        """[T, heads, D]"""
        return None if table is None else table(token_ids).reshape(token_ids.shape[0], -1, self._spec.head_dim)


class AttentionSession:
    """A compiled layer, its cache, and requests that are so many tokens long in the end.

    Pages are handed out in a shuffled order; those of a request that has finished are the next ones, and those that
    trim() gave back. A layer that keeps nothing has none: its requests run whole.
    """

    def __init__(
        self, subject: Subject, spec: AttentionSpec, lengths: Sequence[int], numbers: AttentionInputs | None = None,
        requests: int = REQUESTS,
    ) -> None:  # fmt: skip
        """The tokens of request 0 are 1, 2, ...; those of the next follow. Lacking says what the platform refuses.

        `requests`: of a step, where shapes are fixed.
        """
        self.spec, self.lengths = spec, list(lengths)
        self.firsts = [1 + sum(lengths[:row]) for row in range(len(lengths))]
        self.numbers = numbers or AttentionInputs.random(spec, sum(lengths))
        self._there = there = subject_for_page_size(subject, spec.page_size)
        widest = -(-max(lengths) // spec.page_size)
        build = BuildContext(
            there.ops, lambda _: LayerMixer(mixer_of(there.platform, spec, there.ops)), SingleRank(), spec.dtype,
            spec.page_size, widest * spec.page_size, kv_dtype=spec.kv_dtype, layers=replacements(there.platform.layers),
        )  # fmt: skip
        model = AttentionModel(build, spec, len(self.numbers.q)).eval()
        self.mixer: Mixer = model.mixing.mixer
        model.load(there.platform, self.numbers)
        pages = 1 + sum(-(-length // spec.page_size) for length in lengths)
        self.state = there.device.allocate(self.mixer.layouts, pages)
        self._kept = [KVCacheGroup(spec.window or spec.chunk, spec.chunk is not None)] if self.mixer.layouts else []
        tables = (widest,) * len(self._kept)
        self.fixed = [ShapeBucket(PADDED, requests, PADDED, tables)] if there.facts.static_shapes else []
        self._step = there.platform.compile(model, self.fixed)
        torch.set_num_threads(1)  # see tiny.make
        self._free = list(range(1, pages))
        random.Random(len(lengths)).shuffle(self._free)
        self._pages: dict[int, list[int]] = {}
        self._there_already: dict[int, int] = {}

    @property
    def max_step(self) -> tuple[int, int]:
        """Tokens and requests that a step may have."""
        return (self.fixed[0].tokens, self.fixed[0].requests) if self.fixed else (512, 64)

    def cached(self, row: int) -> int:
        """Returns the number of the request's tokens in the cache."""
        return self._there_already.get(row, 0)

    def run(self, chunks: Mapping[int, int]) -> dict[int, Tensor]:
        """One step of each request's next tokens, so many -> their results [n, H, D], in the layer's type."""
        firsts = {row: self.cached(row) for row in chunks}
        for row, count in chunks.items():
            self._grow(row, firsts[row] + count)
        stretches = [
            Stretch(range(self.firsts[row] + first, self.firsts[row] + first + chunks[row]), first, [self._pages[row]])
            for row, first in firsts.items()
        ]
        rows = self._ran(stretches)[: sum(chunks.values())]
        shaped = rows.reshape(len(rows), self.spec.heads, self.spec.value_dim)
        return dict(zip(chunks, shaped.split(list(chunks.values())), strict=True))

    def fill_null_page_with_nan(self) -> None:
        """Leaves what is no number in every place of page 0."""
        count = min(self.spec.page_size, self.max_step[0])
        for first in range(0, self.spec.page_size, count):
            self._ran([Stretch([0] * count, first, [[0]])])

    def trim(self, row: int) -> None:
        """Gives back the pages that no later token of the request can see, as an engine does behind a window."""
        pages = self._pages[row]
        gone = self._kept[0].first_visible(self.cached(row)) // self.spec.page_size
        self._free += [page for page in pages[:gone] if page]
        pages[:gone] = [0] * gone

    def forget(self, row: int) -> None:
        """The request has finished; its pages stay as they are, and the next request gets them."""
        self._free += [page for page in self._pages.pop(row) if page]
        del self._there_already[row]

    def _ran(self, stretches: Sequence[Stretch]) -> Tensor:
        """One step -> its rows on the host, padding's too."""
        host = host_batch(stretches, self.spec.page_size, self._kept)
        host = pad(host, self.fixed) if self.fixed else host
        groups = [group._replace(plan=self.mixer.plan(host, group)) for group in host.groups]
        host = host._replace(groups=tuple(groups))
        out, self.state = self._step(self.state, host.on(self._there.device.to_device(host.leaves())))
        assert out.logits is not None
        return self._there.down(out.logits)

    def _grow(self, row: int, length: int) -> None:
        pages = self._pages.setdefault(row, [])
        while len(pages) * self.spec.page_size < length:
            pages.append(self._free.pop())
        self._there_already[row] = length


def subject_for_page_size(subject: Subject, page_size: int) -> Subject:
    """With a platform of its own for this page size; Lacking if there is none."""
    there = subject.with_new_platform(page_size=page_size)
    try:
        _ = there.device
    except ValueError as reason:
        raise NotSupported(str(reason)) from reason
    return there


def make_mixer(subject: Subject, spec: AttentionSpec) -> Mixer:
    """The mixer alone; Lacking if it is refused."""
    there = subject_for_page_size(subject, spec.page_size)
    return mixer_of(there.platform, spec, there.ops)


def first_served(subject: Subject, specs: Iterable[AttentionSpec]) -> AttentionSpec:
    """The first that is not refused; Lacking with all reasons if all are."""
    reasons = []
    for spec in specs:
        try:
            make_mixer(subject, spec)
        except NotSupported as reason:
            reasons.append(str(reason))
        else:
            return spec
    raise NotSupported("; ".join(dict.fromkeys(reasons)), "Platform.mixer")


def reference_attention(session: AttentionSession, row: int, wanted: range | None = None) -> Tensor:
    """Softmax written out: a request's results [n, H, value_dim] in float64, at all of its positions or the wanted
    ones. Where a layer is not causal the request is whole in its step."""
    spec, sinks = session.spec, session.numbers.sinks
    own = slice(session.firsts[row], session.firsts[row] + session.lengths[row])
    group = spec.heads // spec.kv_heads
    q = session.numbers.q[own].double() * spec.scale
    k, v = (
        through_cache(x[own], spec.cache_dtype).repeat_interleave(group, 1)
        for x in (session.numbers.k, session.numbers.v)
    )
    v = k[..., : spec.shared] if spec.shared else v
    places = torch.arange(len(q))
    found = []
    for rows in (places if wanted is None else places[wanted.start : wanted.stop]).split(
        256
    ):  # a long request's scores would fill the memory
        scores = torch.einsum("qhd,shd->hqs", q[rows], k)
        back = rows[:, None] - places  # how far behind its query a key is
        if spec.softcap is not None:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        if spec.alibi is not None:
            scores = scores - torch.tensor(spec.alibi, dtype=torch.float64)[:, None, None] * back.abs()
        chunk = spec.chunk or len(q)
        same = rows[:, None] // chunk == places // chunk
        seen = same & ((back >= 0) | (not spec.causal)) & (back.abs() < (spec.window or len(q)))
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, len(rows), 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        found.append(torch.einsum("hqs,shd->qhd", weights, v))
    return torch.cat(found)
