"""The cache: the pages that a layout describes, and the formats of 8 and 4 bits that a platform keeps in them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.conformance.cases.random_arguments import randn
from quintet.conformance.check import ContractViolation, NotSupported, Trial, check, require
from quintet.conformance.close import dtype_name, require_close
from quintet.conformance.formats import FLOATS
from quintet.conformance.harness import cache_round_trip as stored
from quintet.conformance.harness.attention import mixer_of, subject_for_page_size
from quintet.conformance.harness.batches import spec
from quintet.conformance.harness.cache_round_trip import RoundTripCache
from quintet.conformance.harness.subject import Subject
from quintet.interface.platform import Mixer
from quintet.interface.types import INT4, AttentionSpec, HostBatch, HostGroup, IntArray, StepContext, cache_dtype_name
from quintet.ops.attention import row_width

CACHED = (torch.int8, INT4, *FLOATS)
CODES = {torch.int8: stored.int8_codes, INT4: stored.int4_codes}
ROUNDINGS = {torch.int8: stored.int8_rounding, INT4: stored.int4_rounding}
PAGES = 5
WINDOW = 40  # tokens that a layer keeps, where it does not keep all
LAYERS = tuple(itertools.product((1, 4), (64, 128), (8, 16, 32)))  # KV heads, head_dim, tokens of a page


@check("cache.layout")
def pages_are_as_described(subject: Subject) -> Iterator[Trial]:
    for cached in (None, *CACHED):
        kind = "the layer's type" if cached is None else cache_dtype_name(cached)
        yield Trial(f"pages in {kind}", partial(_allocated, subject, cached))


@check("cache.format")
def every_code(subject: Subject) -> Iterator[Trial]:
    for cached in CACHED:
        proof = CODES.get(cached, stored.float8_codes)
        yield Trial(
            f"all codes of {cache_dtype_name(cached)}",
            partial(_proven, subject, cached, proof),
            (f"kv/{cache_dtype_name(cached)}",),
        )


@check("cache.format")
def the_nearest_is_stored(subject: Subject) -> Iterator[Trial]:
    for cached in CACHED:
        proof = ROUNDINGS.get(cached, stored.float8_rounding)
        yield Trial(
            f"rounding to {cache_dtype_name(cached)}",
            partial(_proven, subject, cached, proof),
            (f"kv/{cache_dtype_name(cached)}",),
        )


@check("cache.tagged")
def no_format_is_read_as_another(subject: Subject) -> Iterator[Trial]:
    """A format that a platform does not have is refused when the layer is built; one that it has is its own."""
    for cached, dtype in itertools.product(CACHED, subject.facts.dtypes):
        yield Trial(f"{cache_dtype_name(cached)} in {dtype_name(dtype)}", partial(_tagged, subject, cached, dtype))


@check("cache.cross")
def rows_of_an_encoder(subject: Subject) -> Iterator[Trial]:
    for dtype in subject.facts.dtypes:
        yield Trial(f"an encoder's rows in {dtype_name(dtype)}", partial(_cross, subject, dtype))


def _cross(subject: Subject, dtype: torch.dtype) -> None:
    """Two items on shuffled pages; four requests of several tokens, which share them."""
    of = spec(4, 2, 64, dtype=dtype, causal=False, source="cross")
    there = subject_for_page_size(subject, of.page_size)
    mixer = mixer_of(there.platform, of, there.ops)
    require(all(layout.cross for layout in mixer.layouts), "the layouts of a layer that reads an encoder are `cross`")
    tables, items = [[3, 1, 5], [2]], (37, 9)
    owners, counts = (0, 1, 0, 1), (3, 1, 2, 1)  # the item of each request, and its tokens
    state, kept = there.device.allocate(mixer.layouts, 6), []
    for pages, rows in zip(tables, items, strict=True):
        k, v = randn(2, rows, of.kv_heads, of.head_dim, dtype=dtype)
        slots = [pages[at // of.page_size] * of.page_size + at % of.page_size for at in range(rows)]
        context = _context(there, mixer, [rows], _group(slots, [pages], [rows]))
        state = mixer.keep(there.up(k), there.up(v), state, context)
        kept.append((k, v))
    table = [tables[item] + [0] * (3 - len(tables[item])) for item in owners]
    group = _group([0] * sum(counts), table, [items[item] for item in owners])
    q = randn(sum(counts), of.heads, of.head_dim, dtype=dtype)
    nothing: Any = None
    out, _ = mixer(there.up(q), nothing, None, state, _context(there, mixer, counts, group))
    tokens = [owners[row] for row, count in enumerate(counts) for _ in range(count)]
    want = torch.stack([_attended(query, *kept[item], of) for query, item in zip(q, tokens, strict=True)])
    require_close("attention to an encoder's rows", there.down(out), want)


def _context(there: Subject, mixer: Mixer, counts: Sequence[int], group: HostGroup) -> StepContext:
    """A step with so many tokens of each request, planned, on the device."""
    owners = [row for row, count in enumerate(counts) for _ in range(count)]
    places = [at for count in counts for at in range(count)]
    starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
    ids, at, rows, bounds, wanted = map(_int32, ([0] * len(owners), places, owners, starts, owners))
    host = HostBatch(ids, at, rows, bounds, wanted, (group,))
    host = host._replace(groups=(group._replace(plan=mixer.plan(host, group)),))
    batch = host.on(there.device.to_device(host.leaves()))
    return StepContext(batch, batch.groups[0])


def _group(slots: Sequence[int], table: Sequence[Sequence[int]], lengths: Sequence[int]) -> HostGroup:
    return HostGroup(_int32(slots), _int32(table), _int32(lengths))


def _attended(q: Tensor, k: Tensor, v: Tensor, of: AttentionSpec) -> Tensor:
    """One token's q [H, D] over k and v [E, Hkv, D] -> [H, D], in float64."""
    k, v = (x.double().repeat_interleave(of.heads // of.kv_heads, 1) for x in (k, v))
    weights = (torch.einsum("hd,shd->hs", q.double(), k) * of.scale).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, v)


def _int32(values: Any) -> IntArray:
    return np.array(values, np.int32)


def _proven(subject: Subject, cached: torch.dtype, proof: Callable[[RoundTripCache], None]) -> None:
    proof(RoundTripCache(subject, cached))


def _tagged(subject: Subject, cached: torch.dtype, dtype: torch.dtype) -> None:
    try:
        cache = RoundTripCache(subject, cached, dtype)
    except NotSupported:
        return
    try:
        stored.own_numbers(cache)
    except ContractViolation:
        raise
    except Exception as error:  # too late: an engine would have loaded a model by now
        raise ContractViolation(
            f"a cache of {cache_dtype_name(cached)} was not refused when the attention was built, and then its step "
            f"raised {type(error).__name__}: {error}"
        ) from error


def _allocated(subject: Subject, cached: torch.dtype | None) -> None:
    """For several sizes of layers, with a window and without; what is refused for its size alone is left out."""
    reasons = []
    layers = list(itertools.product(LAYERS, (None, WINDOW)))
    for (kv_heads, dim, size), window in layers:
        dtype = subject.facts.dtypes[0]
        of = spec(4, kv_heads, dim, dtype=dtype, page_size=size, kv_dtype=cached, window=window)
        try:
            _as_described(subject, of)
        except NotSupported as reason:
            reasons.append(str(reason))
    if len(reasons) == len(layers):
        raise NotSupported("; ".join(dict.fromkeys(reasons)), "Platform.mixer")


def _as_described(subject: Subject, of: AttentionSpec) -> None:
    there = subject_for_page_size(subject, of.page_size)
    (layout,) = mixer_of(there.platform, of, there.ops).layouts
    what = f"{of.kv_heads} KV heads of {of.head_dim} in {cache_dtype_name(of.cache_dtype)}, pages of {of.page_size}"
    require(layout.unit == "page", f"{what}: the layout is of one {layout.unit}, and attention keeps pages")
    reach = of.window or of.chunk
    require(layout.window == reach, f"{what}: keeps {layout.window} positions, and the layer sees {reach}")
    require(layout.chunked == (of.chunk is not None), f"{what}: says chunked={layout.chunked}, chunks of {of.chunk}")
    rows = 2 * of.kv_heads * of.page_size * row_width(of.head_dim, of.cache_dtype)
    least = rows * of.cache_dtype.itemsize // layout.shards
    says = layout.nbytes
    require(says >= least, f"{what}: a page of {says} bytes, and its keys and values alone are {least}")
    made = there.device.allocate([layout, layout], PAGES)
    shapes, want = [tuple(each.shape) for each in made], (PAGES, *layout.shape)
    require(shapes == [want, want], f"{what}: {PAGES} pages for two layers are {shapes}, {[want] * 2} is wanted")
