"""Our own attention: each instruction set against the specification, and the bits of a token in whatever company."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.conformance.cases.attention import MIXES
from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.interface.types import INT4, AttentionSpec, StepContext
from quintet.ops import Op
from quintet.ops.attention import row_width, to_cache_rows
from quintet.platforms.cpu.ops import attention as native_attention

if reason := native_attention.probe():
    pytest.skip(reason, allow_module_level=True)

from quintet import _cpu

ROUNDINGS = {torch.float32: 20, torch.bfloat16: 3, torch.float16: 3}  # of the type, at the size of the result
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "window of one": {"window": 1},
    "window over blocks": {"window": 140},
    "soft-cap, window": {"softcap": 20.0, "window": 33, "scale": 0.7},
    "soft-cap": {"softcap": 3.0},
    "sinks, window": {"sinks": True, "window": 70},
    "alibi": {"alibi": True},
    "alibi, soft-cap, window": {"alibi": True, "softcap": 9.0, "window": 100},
    "chunk": {"chunk": 37},
    "chunk of whole blocks, sinks": {"chunk": 128, "sinks": True},
    "both ways": {"causal": False},
    "both ways, window": {"causal": False, "window": 50},
    "V in K": {"shared": 8},
    "V is K, window": {"shared": -1, "window": 70},
}
# of queries and results, and of the cache where that is another
TYPES = [(dtype, cached) for dtype in ROUNDINGS for cached in (None, torch.int8, torch.float8_e4m3fn, INT4)]
Types = tuple[torch.dtype, torch.dtype | None]
# heads, KV heads, head dim, page size: odd groups, heads that fill no vector, a group larger than an item
SHAPES = ((6, 3, 16, 16), (5, 1, 24, 8), (3, 3, 32, 32), (4, 2, 64, 16), (14, 2, 128, 16), (40, 1, 8, 8))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Threads of torch wait by spinning: the specification takes many times as long with two on busy cores."""
    torch.set_num_threads(1)


@pytest.fixture
def threads() -> Iterator[None]:
    before = _cpu.threads()
    yield
    _cpu.set_threads(before)


def native(q: Tensor, kv: Tensor, context: StepContext, of: AttentionSpec) -> Tensor:
    sinks = torch.linspace(-1, 2, of.heads) if of.sinks else None
    return Op.registry["paged_attention"].providers["native"](q, kv, context, of, sinks)


def specified(q: Tensor, kv: Tensor, context: StepContext, of: AttentionSpec) -> Tensor:
    sinks = torch.linspace(-1, 2, of.heads) if of.sinks else None
    kv = kv if of.kv_dtype else kv.float()
    return Op.registry["paged_attention"].reference(q.float(), kv, context, of, sinks)


def batched(of: AttentionSpec, requests: list[AttentionRequest]) -> tuple[Tensor, Tensor, StepContext]:
    cache = RandomKVCache(of, [r.cached + r.new for r in requests])
    q, context = cache.batch(dict(enumerate(requests)))
    return q, cache.kv, context


def broken(of: AttentionSpec, x: float = float("nan")) -> Tensor:
    """A row of the cache that holds no numbers."""
    return to_cache_rows(torch.full((of.head_dim,), x), of.cache_dtype)


@functools.lru_cache(maxsize=1)  # hundreds of MB
def cases(
    dtype: torch.dtype, cached: torch.dtype | None
) -> list[tuple[str, AttentionSpec, tuple[Tensor, Tensor, StepContext], Tensor]]:
    """What it is, the layer, its arguments, and what the specification makes of them in float32."""
    made = []
    for n, ((what, settings), shape) in enumerate(itertools.product(SPECS.items(), SHAPES)):
        heads, kv_heads, dim, page_size = shape
        settings = {**settings, "shared": dim} if settings.get("shared") == -1 else settings
        of = spec(heads, kv_heads, dim, dtype=dtype, kv_dtype=cached, page_size=page_size, **settings)
        for mix in list(MIXES)[n % 2 :: 2]:
            args = batched(of, MIXES[mix])
            made.append((f"{what}, {shape}, {mix}", of, args, specified(*args, of)))
    return made


@pytest.mark.grid(cases=5)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_every_instruction_set_equals_the_specification(isa: str, types: Types) -> None:
    dtype = types[0]
    for what, of, args, want in cases(*types):
        got = native(*args, of)
        worst = float((got.float() - want).abs().max())
        limit = ROUNDINGS[dtype] * torch.finfo(dtype).eps * max(1.0, float(want.abs().max()))
        assert got.dtype == dtype and got.shape == want.shape
        assert worst <= limit, f"{what}: off by {worst:.3g}, {limit:.3g} allowed"


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
def test_extreme_scores_give_finite_results(isa: str, dtype: torch.dtype) -> None:
    of = spec(4, 2, 32, dtype=dtype, scale=300.0)
    q, kv, context = batched(of, [AttentionRequest(0, 130)])
    assert native(q, kv, context, of).isfinite().all()


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("left", [float("nan"), float("inf")])
def test_what_a_page_holds_past_the_end_does_not_leak(isa: str, types: Types, left: float) -> None:
    for heads, kv_heads, dim, page_size in SHAPES:
        of = spec(heads, kv_heads, dim, dtype=types[0], kv_dtype=types[1], page_size=page_size)
        lengths = [37, 129, 3]
        q, kv, context = batched(of, [AttentionRequest(length - 1, 1) for length in lengths])
        want = native(q, kv, context, of)
        for row, length in enumerate(lengths):
            last = int(context.group.block_table[row, (length - 1) // page_size])
            kv[last, :, :, (length - 1) % page_size + 1 :] = broken(of, left)
        kv[0] = broken(of, left)
        assert torch.equal(native(q, kv, context, of), want)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("left", [float("nan"), float("inf")])
def test_pages_that_were_given_back_do_not_leak(isa: str, types: Types, left: float) -> None:
    """Behind a window the table holds page 0, and page 0 holds no numbers; step by step over a page's border."""
    for heads, kv_heads, dim, page_size in SHAPES:
        of = spec(heads, kv_heads, dim, dtype=types[0], kv_dtype=types[1], page_size=page_size, window=50)
        for length in (130, 63, 64, 65, 66):
            q, kv, context = batched(of, [AttentionRequest(length - 3, 3), AttentionRequest(20, 1)])
            want = native(q, kv, context, of)
            table = context.group.block_table.clone()
            table[0, : (length - 3 - 50 + 1) // page_size] = 0
            kv[0] = broken(of, left)
            got = native(q, kv, context._replace(group=context.group._replace(block_table=table)), of)
            assert torch.equal(got, want), length


@pytest.mark.parametrize("types", TYPES[:2], ids=str)
def test_pages_of_earlier_chunks_do_not_leak(isa: str, types: Types) -> None:
    """The step's tokens are in the chunk from 50 on, whose first page holds the end of the one before."""
    for heads, kv_heads, dim, page_size in SHAPES[:3]:
        of = spec(heads, kv_heads, dim, dtype=types[0], kv_dtype=types[1], page_size=page_size, chunk=50)
        q, kv, context = batched(of, [AttentionRequest(60, 30), AttentionRequest(20, 1)])
        want = native(q, kv, context, of)
        table = context.group.block_table.clone()
        table[0, : 50 // page_size] = 0
        kv[0] = broken(of, float("nan"))
        got = native(q, kv, context._replace(group=context.group._replace(block_table=table)), of)
        assert torch.equal(got, want)


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_keys_alone_are_written_where_values_are_part_of_them(isa: str, types: Types) -> None:
    op, (dtype, cached) = Op.registry["write_kv"], types
    of = spec(4, 2, 24, dtype=dtype, kv_dtype=cached, shared=16)
    _, kv, context = batched(of, [AttentionRequest(37, 20), AttentionRequest(8, 1)])
    k = torch.randn(21, 2, 24).to(dtype)
    want = op.reference(kv.clone(), k, None, context)
    assert kv.shape[1] == 1 and torch.equal(bits(op.providers["native"](kv, k, None, context)), bits(want))
    with pytest.raises(ValueError, match="do not fit a cache"):
        op.providers["native"](kv, k, k, context)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
@pytest.mark.parametrize("settings", [{"causal": False}, {}, {"causal": False, "window": 9, "softcap": 5.0}], ids=str)
def test_attention_that_keeps_nothing_is_the_specifications(isa: str, dtype: torch.dtype, settings: Any) -> None:
    """Each request has the bits that it has alone."""
    op = Op.registry["attention"]
    for heads, kv_heads, dim, page_size in SHAPES:
        of = spec(heads, kv_heads, dim, dtype=dtype, page_size=page_size, source="none", **settings)
        lengths = (33, 1, 64, 17, 150)
        q, k, v = (torch.randn(sum(lengths), count, dim).to(dtype) for count in (heads, kv_heads, kv_heads))
        _, _, context = batched(replace(of, source="self"), [AttentionRequest(0, length) for length in lengths])
        got = op.providers["native"](q, k, v, context.batch, of, None)
        want = op.reference(q.float(), k.float(), v.float(), context.batch, of, None)
        limit = ROUNDINGS[dtype] * torch.finfo(dtype).eps * max(1.0, float(want.abs().max()))
        assert float((got.float() - want).abs().max()) <= limit
        first = 0
        for length in lengths:
            own = slice(first, first + length)
            _, _, alone = batched(replace(of, source="self"), [AttentionRequest(0, length)])
            assert torch.equal(op.providers["native"](q[own], k[own], v[own], alone.batch, of, None), got[own])
            first += length


def test_windows_begin_at_any_position(isa: str) -> None:
    """Products of bfloat16 take positions in pairs, and a window may begin within one."""
    op, length = Op.registry["attention"], 40
    for window, causal in itertools.product(range(2, 10), (False, True)):
        of = spec(14, 2, 16, dtype=torch.bfloat16, source="none", causal=causal, window=window)
        q, k, v = (torch.randn(length, count, 16).to(torch.bfloat16) for count in (14, 2, 2))
        _, _, context = batched(replace(of, source="self"), [AttentionRequest(0, length)])
        got = op.providers["native"](q, k, v, context.batch, of, None)
        want = op.reference(q.float(), k.float(), v.float(), context.batch, of, None)
        limit = ROUNDINGS[torch.bfloat16] * torch.finfo(torch.bfloat16).eps * max(1.0, float(want.abs().max()))
        assert float((got.float() - want).abs().max()) <= limit, (window, causal)


@pytest.mark.parametrize("starts", [[0, 77], [0, -1], [3, 10], [0, 4, 77], [0, 4, 3]])
def test_whole_requests_that_point_outside_are_refused(starts: list[int]) -> None:
    of = spec(4, 2, 16, source="none")
    q, k, v = (torch.randn(10, heads, 16) for heads in (4, 2, 2))
    _, _, context = batched(replace(of, source="self"), [AttentionRequest(0, 10)])
    batch = context.batch._replace(query_start_loc=torch.tensor(starts, dtype=torch.int32))
    with pytest.raises(ValueError, match="query_start_loc"):
        Op.registry["attention"].providers["native"](q, k, v, batch, of, None)


@pytest.mark.grid(cases=60)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("settings", SPECS.values(), ids=SPECS)
def test_a_tokens_bits_depend_on_its_request_alone(isa: str, types: Types, settings: dict[str, Any]) -> None:
    """A prompt of 300 whole, in chunks, and a token at a time; alone and beside others."""
    if not settings.get("causal", True):
        pytest.skip("a token that sees what follows depends on how much of it is there")
    for heads, kv_heads, dim, page_size in ((4, 2, 64, 16), (3, 1, 24, 8), (7, 1, 16, 32)):
        more = {**settings, "shared": dim} if settings.get("shared") == -1 else settings
        of = spec(heads, kv_heads, dim, dtype=types[0], kv_dtype=types[1], page_size=page_size, **more)
        cache = RandomKVCache(of, [300, 90, 211])

        def run(requests: dict[int, AttentionRequest], cache: RandomKVCache = cache, of: AttentionSpec = of) -> Tensor:
            q, context = cache.batch(requests)
            return native(q, cache.kv, context, of)

        whole = run({0: AttentionRequest(0, 300)})
        for size in (7, 64, 100):
            chunks = [AttentionRequest(first, min(size, 300 - first)) for first in range(0, 300, size)]
            assert torch.equal(torch.cat([run({0: chunk}) for chunk in chunks]), whole)
        for first in (0, 1, 63, 64, 150, 299):
            assert torch.equal(run({0: AttentionRequest(first, 1)})[0], whole[first])
            beside = run({1: AttentionRequest(80, 10), 0: AttentionRequest(first, 1), 2: AttentionRequest(0, 211)})
            assert torch.equal(beside[10], whole[first])
        assert torch.equal(
            run({2: AttentionRequest(5, 40), 0: AttentionRequest(0, 300), 1: AttentionRequest(89, 1)})[40:340], whole
        )


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_a_broken_token_does_not_reach_those_before_it(isa: str, types: Types) -> None:
    """In a prefill the values of later tokens are there already; in a decode they are not."""
    of = spec(6, 3, 16, dtype=types[0], kv_dtype=types[1])
    q, kv, context = batched(of, [AttentionRequest(0, 100)])
    want = native(q, kv, context, of)
    kv[context.group.block_table[0, 50 // 16], :, :, 50 % 16] = broken(of)
    got = native(q, kv, context, of)
    assert torch.equal(got[:50], want[:50]) and got[50:].isnan().all()


def test_the_number_of_threads_changes_no_bit(isa: str, threads: None) -> None:
    for (dtype, cached), requests in itertools.product(TYPES, MIXES.values()):
        of = spec(6, 3, 32, dtype=dtype, kv_dtype=cached, window=77)
        q, kv, context = batched(of, requests)
        results = []
        for count in (1, 2, 5):
            _cpu.set_threads(count)
            results.append(native(q, kv, context, of))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.grid
@pytest.mark.parametrize("settings", [{}, {"window": 1100}, {"chunk": 1500}, {"sinks": True}, {"alibi": True}], ids=str)
def test_long_contexts_split_over_threads_give_the_same_bits(isa: str, threads: None, settings: dict[str, Any]) -> None:
    """Few heads and many threads: stretches of 1024 positions are shared out, and merged in order."""
    for (dtype, cached), (heads, dim) in zip(
        (*TYPES[::3], TYPES[5]), ((2, 16), (5, 24), (1, 32), (9, 16), (3, 8)), strict=True
    ):
        of = spec(heads, 1, dim, dtype=dtype, kv_dtype=cached, **settings)
        cache = RandomKVCache(of, [2300, 1024])
        _cpu.set_threads(1)
        q, context = cache.batch({0: AttentionRequest(0, 2300)})
        whole = native(q, cache.kv, context, of)
        for count, first in itertools.product((1, 4), (2299, 2047, 2048, 1023, 1200)):
            _cpu.set_threads(count)
            q, context = cache.batch({1: AttentionRequest(1020, 4), 0: AttentionRequest(first, 1)})
            got = native(q, cache.kv, context, of)
            assert torch.equal(got[4], whole[first]), (count, first)
            limit = ROUNDINGS[dtype] * torch.finfo(dtype).eps
            torch.testing.assert_close(got.float(), specified(q, cache.kv, context, of), atol=limit, rtol=limit)


@pytest.mark.parametrize("settings", [{}, {"sinks": True, "window": 70}, {"alibi": True}, {"shared": 64}], ids=str)
def test_heads_shared_out_over_threads_give_the_same_bits(isa: str, threads: None, settings: dict[str, Any]) -> None:
    """One token whose heads share one K: threads take some each. A prompt has them together, and reads copies of K."""
    for (dtype, cached), heads in itertools.product(TYPES, (16, 9)):
        of = spec(heads, 1, 96, dtype=dtype, kv_dtype=cached, **settings)
        cache = RandomKVCache(of, [200])
        _cpu.set_threads(1)
        q, context = cache.batch({0: AttentionRequest(0, 200)})
        whole = native(q, cache.kv, context, of)
        for count, first in itertools.product((1, 2, 3, 5), (199, 63)):
            _cpu.set_threads(count)
            q, context = cache.batch({0: AttentionRequest(first, 1)})
            assert torch.equal(native(q, cache.kv, context, of)[0], whole[first]), (dtype, cached, heads, count, first)


def test_tokens_of_a_product_may_stand_apart() -> None:
    of = spec(4, 2, 16)
    q, kv, context = batched(of, [AttentionRequest(3, 9), AttentionRequest(20, 1)])
    apart = torch.zeros(len(q), 3, *q.shape[1:])
    apart[:, 1] = q
    assert torch.equal(native(apart[:, 1], kv, context, of), native(q, kv, context, of))


def test_padding_gets_zeros() -> None:
    of = spec(4, 2, 16)
    q, kv, context = batched(of, [AttentionRequest(3, 9), AttentionRequest(20, 1)])
    none = torch.zeros(6, dtype=torch.int32)
    batch, group = context
    padded = StepContext(
        batch._replace(
            positions=torch.cat([batch.positions, none]),
            query_start_loc=torch.cat([batch.query_start_loc, batch.query_start_loc[-1:]]),
        ),
        group._replace(
            seq_lens=torch.cat([group.seq_lens, none[:1]]),
            block_table=torch.cat([group.block_table, torch.zeros_like(group.block_table[:1])]),
        ),
    )
    out = native(torch.cat([q, q[:6]]), kv, padded, of)
    assert torch.equal(out[:10], native(q, kv, context, of)) and not out[10:].any()


def test_a_batch_that_points_outside_is_refused() -> None:
    of = spec(4, 2, 16)
    q, kv, context = batched(of, [AttentionRequest(3, 9), AttentionRequest(20, 1)])
    outside = ("block_table", 99), ("positions", 50), ("seq_lens", 2000), ("query_start_loc", 77), ("positions", -1)
    for field, value in outside:
        of_group = field in context.group._fields
        part: Any = context.group if of_group else context.batch
        broken = getattr(part, field).clone()
        broken.view(-1)[-1] = value
        spoilt = part._replace(**{field: broken})
        with pytest.raises(ValueError, match=field):
            native(q, kv, context._replace(**{"group" if of_group else "batch": spoilt}), of)
    write = Op.registry["write_kv"].providers["native"]
    k = torch.zeros(10, 2, 16)
    for slot in (-1, kv.shape[0] * 16):
        group = context.group._replace(slot_mapping=torch.full_like(context.group.slot_mapping, slot))
        with pytest.raises(ValueError, match="slot_mapping"):
            write(kv, k, k, context._replace(group=group))


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_written_keys_and_values_are_the_specifications(isa: str, types: Types, threads: None) -> None:
    """Bit for bit; rows of zeros, of tiny numbers and of such that are not finite among them."""
    op, (dtype, cached) = Op.registry["write_kv"], types
    for page_size, count, (kv_heads, dim) in itertools.product((8, 16, 32), (1, 2), ((1, 24), (3, 8), (8, 128))):
        _cpu.set_threads(count)
        of = spec(kv_heads, kv_heads, dim, dtype=dtype, kv_dtype=cached, page_size=page_size)
        _, kv, context = batched(of, [AttentionRequest(37, 80), AttentionRequest(8, 1), AttentionRequest(0, page_size)])
        qkv = (
            torch.randn(len(context.group.slot_mapping), 3, kv_heads, dim) * 10.0 ** torch.randint(-6, 4, (3, 1, dim))
        ).to(dtype)
        qkv[3] = 0.0
        qkv[4] *= torch.finfo(dtype).tiny
        qkv[5] = torch.inf
        k, v = qkv[:, 1], qkv[:, 2]  # slices of one product
        want = op.reference(kv.clone(), k, v, context)
        assert torch.equal(bits(op.providers["native"](kv, k, v, context)), bits(want))


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("cached", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_number_of_half_precision_is_rounded_as_torch_does(isa: str, cached: torch.dtype) -> None:
    """All 65536, in rows of 16 that grow."""
    for dtype in (torch.bfloat16, torch.float16):
        k = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(4096, 1, 16)
        k = torch.where(k.isnan(), 1.0, k)
        context = batched(spec(1, 1, 16), [AttentionRequest(0, 4096)])[2]
        got, want = torch.zeros(2, 257, 2, 1, 16, row_width(16, cached), dtype=torch.int8).view(cached)
        Op.registry["write_kv"].providers["native"](got, k, k, context)
        Op.registry["write_kv"].reference(want, k, k, context)
        assert torch.equal(bits(got), bits(want))


def test_a_cache_of_another_type_is_refused() -> None:
    of = spec(4, 2, 16, dtype=torch.bfloat16)
    q, kv, context = batched(of, [AttentionRequest(3, 9)])
    for cached in (torch.int8, torch.float32):
        with pytest.raises(ValueError, match="and must be"):
            native(q, kv, context, replace(of, kv_dtype=cached))
    k = torch.zeros(9, 2, 16)
    with pytest.raises(ValueError, match="do not fit a cache"):
        Op.registry["write_kv"].providers["native"](kv.view(torch.int8), k, k, context)
