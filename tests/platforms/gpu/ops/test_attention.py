"""Attention and the writing of K and V by Triton kernels, interpreted or on a GPU, against the specifications."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.conformance.cases import attention as cases
from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.interface.types import AttentionSpec, Batch, HostBatch, HostGroup, ShapeBucket, StepContext
from quintet.ops import Op, bind
from quintet.ops.attention import from_cache_rows, mixer, row_width, to_cache_rows
from quintet.platforms.gpu.attention import GraphAttention, PlannerRegistry, single
from tests.helpers.platforms.triton import needs_triton, triton_op, uploaded

pytest.importorskip("triton")
from quintet.platforms.gpu.kernels import attention_split
from quintet.platforms.gpu.kernels.attention_layer import AttentionLayer, DeviceLimits, fitting
from quintet.platforms.gpu.ops import attention as triton_attention

DEVICE = needs_triton()
if reason := Op.registry["paged_attention"].probes["triton"]():
    pytest.skip(reason, allow_module_level=True)

HERE = triton_attention.limits(DEVICE)  # interpreted, or the device's own
interpreted = pytest.mark.skipif(DEVICE.type != "cpu", reason="looks at tensors of the host; there is a GPU")
SPECS: dict[str, dict[str, Any]] = {
    **cases.SPECS,
    "alibi": {"alibi": True},
    "chunk": {"chunk": 37},
    "chunk over blocks": {"chunk": 150, "sinks": True},
    "alibi, soft-cap, window": {"alibi": True, "softcap": 5.0, "window": 40},
}
TYPES = [
    (dtype, cached)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for cached in (None, torch.int8, torch.float8_e4m3fn)
]
# heads, KV heads, head dim, page size: odd groups, heads that fill no block, a group larger than a tensor core's rows
SHAPES = ((6, 2, 16, 16), (5, 1, 20, 8), (2, 2, 32, 32), (20, 1, 8, 16))
# one token and several tokens in one step; contexts of one split and of three
MIX = [
    AttentionRequest(40, 1),
    AttentionRequest(0, 21),
    AttentionRequest(130, 5),
    AttentionRequest(520, 1),
    AttentionRequest(3, 1),
    AttentionRequest(60, 30),
]
ROUNDINGS = {torch.float32: 20, torch.bfloat16: 3, torch.float16: 3}  # of the type, at the size of the result


def batched(of: AttentionSpec, requests: list[AttentionRequest]) -> tuple[Tensor, Tensor, StepContext]:
    cache = RandomKVCache(of, [r.cached + r.new for r in requests])
    q, context = cache.batch(dict(enumerate(requests)))
    return q, cache.kv, context


def sinks_of(of: AttentionSpec) -> Tensor | None:
    return torch.linspace(-1, 2, of.heads).to(of.dtype) if of.sinks else None


def attend(q: Tensor, kv: Tensor, context: StepContext, of: AttentionSpec) -> Tensor:
    got: Tensor = triton_op("paged_attention", DEVICE)(q, kv, context, of, sinks_of(of))
    return got


def attend_within(limits: DeviceLimits, q: Tensor, kv: Tensor, context: StepContext, of: AttentionSpec) -> Tensor:
    """With kernels as they are made for a device of these limits."""
    q, kv, context = uploaded((q, kv, context), DEVICE)
    return triton_attention.attend(q, kv, context, of, None, limits).cpu()


def assert_specified(got: Tensor, q: Tensor, kv: Tensor, context: StepContext, of: AttentionSpec) -> None:
    kv = kv if of.kv_dtype else kv.float()
    want = Op.registry["paged_attention"].reference(q.float(), kv, context, of, sinks_of(of))
    limit = ROUNDINGS[of.dtype] * torch.finfo(of.dtype).eps * max(1.0, float(want.abs().max()))
    worst = float((got.float() - want).abs().max())
    assert got.dtype == of.dtype and got.shape == want.shape
    assert worst <= limit, f"{of}: off by {worst:.3g}, {limit:.3g} allowed"


@pytest.mark.grid(cases=3)
@pytest.mark.parametrize(("n", "name"), list(enumerate(SPECS)), ids=str)
def test_a_mixed_step_equals_the_specification(n: int, name: str) -> None:
    """Each kind of layer with two shapes and two pairs of types; every pair comes up."""
    for i in (2 * n, 2 * n + 1):
        heads, kv_heads, dim, page_size = SHAPES[(i + n // 2) % len(SHAPES)]
        dtype, cached = TYPES[i % len(TYPES)]
        more = {"dtype": dtype, "kv_dtype": cached, "page_size": page_size, **SPECS[name]}
        of = spec(heads, kv_heads, dim, **more)
        args = batched(of, MIX)
        assert_specified(attend(*args, of), *args, of)


@pytest.mark.grid(cases=3)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_wide_heads_equal_the_specification(types: tuple[torch.dtype, torch.dtype | None]) -> None:
    for dim in (80, 128):
        of = spec(4, 2, dim, dtype=types[0], kv_dtype=types[1])
        args = batched(of, [AttentionRequest(70, 1), AttentionRequest(11, 20)])
        assert_specified(attend(*args, of), *args, of)


def test_a_cache_whose_type_triton_knows_is_read_as_it_is() -> None:
    of = spec(4, 2, 16, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn)
    q, kv, context = batched(of, [AttentionRequest(70, 1), AttentionRequest(11, 20)])
    if DEVICE.type != "cpu" and not HERE.e4m3:
        pytest.skip("Triton does not convert float8_e4m3fn on this GPU")
    got = attend_within(replace(HERE, e4m3=True), q, kv, context, of)
    assert_specified(got, q, kv, context, of)


def test_any_number_of_programs_gives_the_same_bits() -> None:
    of = spec(4, 1, 16)
    q, kv, context = batched(of, [AttentionRequest(n, 1) for n in (0, 600, 3, 300)] + [AttentionRequest(0, 2)])
    got = [attend_within(replace(HERE, processors=count), q, kv, context, of) for count in (1, 3, 11)]
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


def test_more_requests_than_a_program_looks_through_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from quintet.platforms.gpu.kernels import attention

    for module in (attention, attention_split):
        monkeypatch.setattr(module, "CHUNK", 4)
    of = spec(4, 2, 16)
    args = batched(of, [AttentionRequest(n * 37 % 300, 1 + (n % 3 == 0) * n) for n in range(11)])
    assert_specified(attend(*args, of), *args, of)


@pytest.mark.parametrize("settings", [{}, {"window": 300}, {"sinks": True}, {"kv_dtype": torch.int8}], ids=str)
def test_a_decoded_tokens_bits_depend_on_its_request_alone(settings: dict[str, Any]) -> None:
    of = spec(4, 1, 16, dtype=torch.float16, **settings)
    cache = RandomKVCache(of, [600, 90, 40])

    def run(requests: dict[int, AttentionRequest]) -> Tensor:
        q, context = cache.batch(requests)
        return attend(q, cache.kv, context, of)

    for first in (255, 599):
        alone = run({0: AttentionRequest(first, 1)})[0]
        assert torch.equal(
            run({1: AttentionRequest(80, 10), 0: AttentionRequest(first, 1), 2: AttentionRequest(0, 40)})[10], alone
        )
        assert torch.equal(
            run({2: AttentionRequest(39, 1), 1: AttentionRequest(7, 1), 0: AttentionRequest(first, 1)})[2], alone
        )


def test_long_contexts_take_larger_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many of them that the workspace is bounded."""
    layer = AttentionLayer(64, 8, 128, 16, "bf16")
    assert attention_split.workspace(layer, 3) == ((3, 64, 16, 128), (2, 3, 64, 16))
    monkeypatch.setattr(attention_split, "SPLITS_OF_ALL_HEADS", 4)
    of = spec(2, 1, 16, page_size=32)
    args = batched(
        of, [AttentionRequest(1499, 1), AttentionRequest(1023, 1), AttentionRequest(1024, 1)]
    )  # 4 of 384, of 256 and of 320
    assert_specified(attend(*args, of), *args, of)


@pytest.mark.parametrize(
    ("settings", "cached", "merged"),
    [
        ({"window": 128}, 600, False), ({"window": 400}, 600, True), ({"chunk": 150}, 600, False), ({}, 90, False),
        ({}, 600, True),
    ],
)  # fmt: skip
def test_what_never_splits_is_not_merged(
    settings: dict[str, Any], cached: int, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a short window or chunk, or in a table of few pages: one launch, and no workspace."""
    launched, merge = list[tuple[int, ...]](), attention_split.merge_splits

    class Merge:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launched.append(grid)
            return merge[grid]

    monkeypatch.setattr(attention_split, "merge_splits", Merge())
    of = spec(2, 1, 16, **settings)
    args = batched(of, [AttentionRequest(cached, 1), AttentionRequest(3, 1)])
    assert_specified(attend(*args, of), *args, of)
    assert launched == ([(2, 2)] if merged else [])


def padded(q: Tensor, context: StepContext, tokens: int, requests: int) -> tuple[Tensor, StepContext]:
    """With so many more of each; padded queries are not even numbers."""
    (batch, group), none = context, torch.zeros(tokens, dtype=torch.int32)
    last = torch.full_like(none, len(group.seq_lens) + requests - 1)
    more = torch.cat([q, torch.full((tokens, *q.shape[1:]), math.nan, dtype=q.dtype)])
    return more, StepContext(
        batch._replace(
            positions=torch.cat([batch.positions, none]),
            token_to_seq=torch.cat([batch.token_to_seq, last]),
            query_start_loc=torch.cat([batch.query_start_loc, batch.query_start_loc[-1:].expand(requests)]),
        ),
        group._replace(
            slot_mapping=torch.cat([group.slot_mapping, none]),
            seq_lens=torch.cat([group.seq_lens, torch.zeros(requests, dtype=torch.int32)]),
            block_table=torch.cat([group.block_table, torch.zeros_like(group.block_table[:1]).expand(requests, -1)]),
        ),
    )


def test_padding_gets_zeros_and_changes_nothing() -> None:
    of = spec(4, 2, 16, dtype=torch.bfloat16)
    q, kv, context = batched(of, [AttentionRequest(3, 9), AttentionRequest(20, 1), AttentionRequest(400, 1)])
    want = attend(q, kv, context, of)
    for tokens, requests in ((5, 0), (5, 3), (0, 2)):
        more = padded(q, context, tokens, requests)
        out = attend(more[0], kv, more[1], of)
        assert torch.equal(out[:11], want) and not out[11:].any()
    ones = torch.arange(3, 6, dtype=torch.int32)  # of a captured step: a token each, and no context
    q, kv, context = batched(of, [AttentionRequest(20, 1), AttentionRequest(30, 1), AttentionRequest(40, 1)])
    more, (batch, group) = padded(q, context, 3, 3)
    starts, owners = torch.cat([context.batch.query_start_loc, 1 + ones]), torch.cat([context.batch.token_to_seq, ones])
    of_their_own = StepContext(batch._replace(query_start_loc=starts, token_to_seq=owners), group)
    out = attend(more, kv, of_their_own, of)
    assert torch.equal(out[:3], attend(q, kv, context, of)) and not out[3:].any()
    nothing = ShapeBucket(8, 4, 4, (3,)).batch
    there = nothing.on(map(torch.from_numpy, nothing.leaves()))
    empty = StepContext(there, there.groups[0])
    assert not attend(torch.full((8, 4, 16), math.nan).bfloat16(), kv, empty, of).any()


@pytest.mark.parametrize("cached", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_what_a_page_holds_past_the_end_does_not_leak(cached: torch.dtype | None) -> None:
    of = spec(4, 2, 16, kv_dtype=cached)
    requests = [AttentionRequest(36, 1), AttentionRequest(100, 29), AttentionRequest(2, 1), AttentionRequest(599, 1)]
    q, kv, context = batched(of, requests)
    want = attend(q, kv, context, of)
    broken = to_cache_rows(torch.full((16,), math.nan), of.cache_dtype)
    for row, request in enumerate(requests):
        length = request.cached + request.new
        last = int(context.group.block_table[row, (length - 1) // 16])
        kv[last, :, :, (length - 1) % 16 + 1 :] = broken
    kv[0] = broken
    assert torch.equal(attend(q, kv, context, of), want)


@pytest.mark.parametrize("cached", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_broken_token_reaches_those_after_it(cached: torch.dtype | None) -> None:
    of = spec(4, 2, 16, kv_dtype=cached)
    q, kv, context = batched(of, [AttentionRequest(80, 4), AttentionRequest(300, 1), AttentionRequest(10, 1)])
    clean = attend(q, kv, context, of)
    for row in (0, 1):
        kv[context.group.block_table[row, 50 // 16], :, :, 50 % 16] = to_cache_rows(
            torch.full((16,), math.nan), of.cache_dtype
        )
    got = attend(q, kv, context, of)
    assert got[:5].isnan().all() and torch.equal(got[5], clean[5])


def test_extreme_scores_give_finite_results() -> None:
    of = spec(4, 2, 32, dtype=torch.float16, scale=300.0)
    assert attend(*batched(of, [AttentionRequest(0, 90), AttentionRequest(300, 1)]), of).isfinite().all()


@interpreted
def test_a_step_planned_as_single_tokens_leaves_the_prompts_kernel_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from quintet.platforms.gpu.kernels import attention

    of = spec(4, 2, 16)
    layer = GraphAttention(
        mixer(of, bind({"paged_attention": ["triton"], "write_kv": ["triton"]})), of, PlannerRegistry()
    )
    launched: list[Any] = []
    monkeypatch.setattr(attention, "launch", launched.append)
    for requests, count in (
        ([AttentionRequest(20, 1), AttentionRequest(5, 1)], 0),
        ([AttentionRequest(20, 1), AttentionRequest(5, 2)], 1),
    ):
        q, kv, context = batched(of, requests)
        host = on_host(context.batch)
        planned = context.group._replace(plan=tuple(map(torch.from_numpy, layer.plan(host, host.groups[0]))))
        assert single(planned) == (count == 0) and not single(context.group)
        k = torch.randn(len(q), 2, 16)
        launched.clear()
        out, (kv,) = layer(q, k, k, (kv,), StepContext(context.batch, planned))
        assert len(launched) == count
        singles = [t for t, row in enumerate(context.batch.token_to_seq.tolist()) if requests[row].new == 1]
        want = Op.registry["paged_attention"].reference(q, kv, context, of, None)
        torch.testing.assert_close(out[singles], want[singles])


def on_host(batch: Batch) -> HostBatch:
    groups = tuple(HostGroup(*(x.numpy() for x in group[:3])) for group in batch.groups)
    return HostBatch(*(x.numpy() for x in batch[:5]), groups)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


@pytest.mark.grid(cases=3)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_written_keys_and_values_are_the_specifications(types: tuple[torch.dtype, torch.dtype | None]) -> None:
    """Bit for bit; rows of zeros, of tiny numbers and of such that are not finite among them.

    Not of bfloat16's subnormals: Triton's interpreter reads them wrong.
    """
    op, (dtype, cached) = Op.registry["write_kv"], types
    for page_size, kv_heads, dim in ((8, 1, 24), (16, 3, 8), (8, 5, 128)):
        of = spec(kv_heads, kv_heads, dim, dtype=dtype, kv_dtype=cached, page_size=page_size)
        _, kv, context = batched(of, [AttentionRequest(37, 7), AttentionRequest(8, 1)])
        qkv = (
            torch.randn(len(context.group.slot_mapping), 3, kv_heads, dim) * 10.0 ** torch.randint(-6, 4, (3, 1, dim))
        ).to(dtype)
        qkv[3] = 0.0
        qkv[4] *= 1e-30 if dtype == torch.bfloat16 else torch.finfo(dtype).tiny
        qkv[5] = torch.inf
        k, v = qkv[:, 1], qkv[:, 2]  # slices of one product
        want = op.reference(kv.clone(), k, v, context)
        assert torch.equal(bits(triton_op("write_kv", DEVICE)(kv, k, v, context)), bits(want))


@pytest.mark.parametrize("cached", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_number_of_half_precision_is_rounded_as_torch_does(cached: torch.dtype) -> None:
    """All 65536 but bfloat16's subnormals, which Triton's interpreter reads wrong; in rows of 128 that grow."""
    for dtype in (torch.bfloat16, torch.float16):
        k = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(8, 64, 128)
        wrong = k.isnan() | (k.abs() < torch.finfo(torch.bfloat16).tiny)
        k = torch.where(wrong, 1.0, k)
        context = batched(spec(64, 64, 128), [AttentionRequest(0, 8)])[2]
        got, want = torch.zeros(2, 2, 2, 64, 16, row_width(128, cached), dtype=torch.int8).view(cached)
        got = triton_op("write_kv", DEVICE)(got, k, k, context)
        Op.registry["write_kv"].reference(want, k, k, context)
        assert torch.equal(bits(got), bits(want))


def test_a_row_that_is_not_a_number_comes_back_so_and_alone() -> None:
    for cached in (torch.int8, torch.float8_e4m3fn):
        of = spec(2, 2, 16, kv_dtype=cached)
        _, kv, context = batched(of, [AttentionRequest(0, 3)])
        k = torch.randn(3, 2, 16)
        k[1, 0, 5] = math.nan
        want = Op.registry["write_kv"].reference(kv.clone(), k, k, context)
        got = triton_op("write_kv", DEVICE)(kv, k, k, context)
        torch.testing.assert_close(from_cache_rows(got, 16), from_cache_rows(want, 16), rtol=0, atol=0, equal_nan=True)
        assert from_cache_rows(got, 16).isnan().any()


def test_what_is_not_served_is_refused_with_all_reasons() -> None:
    good = spec(4, 2, 16)
    assert triton_attention.reasons(good) == []
    for of, words in (
        (replace(good, dtype=torch.float64), ["computes in"]),
        (replace(good, kv_dtype=torch.float8_e5m2fnuz), ["a cache is of"]),
        (replace(good, head_dim=18, kv_dtype=torch.int8), ["multiple of 4"]),
        (replace(good, head_dim=600, heads=130, kv_heads=1), ["heads of 600", "130 query heads"]),
    ):
        found = "; ".join(triton_attention.reasons(of))
        assert all(word in found for word in words)


def test_a_cache_of_another_type_is_refused() -> None:
    of = spec(4, 2, 16, dtype=torch.bfloat16)
    q, kv, context = batched(of, [AttentionRequest(3, 9)])
    for cached in (torch.int8, torch.float32):
        with pytest.raises(ValueError, match="and must be"):
            attend(q, kv, context, replace(of, kv_dtype=cached))
    k = torch.zeros(9, 2, 16)
    with pytest.raises(ValueError, match="do not fit"):
        triton_op("write_kv", DEVICE)(kv.view(torch.int8), k, k, context)


def test_loads_in_flight_fit_into_shared_memory() -> None:
    layer = AttentionLayer(32, 8, 128, 16, "bf16")
    assert [fitting(layer, kib * 1024, 128, 64) for kib in (64, 100, 163)] == [2, 3, 5]


# ------------------------------------------------------------------------------------------------------ workspace


def test_requests_that_have_no_room_at_once_go_in_turns_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    of = spec(6, 2, 16, sinks=True)
    q, kv, context = batched(of, [AttentionRequest(300 if n % 9 == 0 else n, 1) for n in range(18)])
    padded = q.new_zeros(3, *q.shape[1:])
    q = torch.cat([q, padded])  # tokens that are nobody's get zeros
    want = attend(q, kv, context, of)
    monkeypatch.setattr(attention_split, "ROOM", 1)
    shapes = attention_split.workspace(triton_attention._layer(of, True, HERE), 18)
    assert [shape[of_requests] for shape, of_requests in zip(shapes, (0, 1), strict=True)] == [16, 16]
    got = attend(q, kv, context, of)
    assert torch.equal(got, want) and not got[18:].any()


def test_the_workspace_is_bounded_for_every_kind_of_layer() -> None:
    mla = AttentionLayer(128, 1, 576, 16, "bf16", shared=512)
    for layer in (AttentionLayer(48, 1, 128, 16, "bf16"), mla, AttentionLayer(32, 8, 128, 16, "bf16")):
        (parts, stats) = (math.prod(shape) * 4 for shape in attention_split.workspace(layer, 512))
        assert 0 < parts <= attention_split.ROOM and stats <= parts // 16, layer
