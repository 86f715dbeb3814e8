"""V inside of K, layers that see both ways, pages behind a window, and attention that keeps nothing: each provider
against the specifications, Triton's kernels in its interpreter."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quintet.conformance.cases.attention import MIXES, paged_attention_arguments
from quintet.conformance.cases.model_ops import CASES, DTYPES
from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.engine.kv_cache.groups import KVCacheGroup
from quintet.interface.types import AttentionSpec, HostBatch, HostGroup, StepContext
from quintet.ops import Op
from quintet.ops.attention import page_shape, to_cache_rows
from quintet.platforms.cuda import flashinfer
from quintet.platforms.gpu.ops import torch_attention as gathered_attention
from tests.helpers.platforms.triton import needs_triton, triton_op

pytest.importorskip("triton")
from quintet.platforms.gpu.kernels.attention_layer import AttentionLayer, fitting
from quintet.platforms.gpu.kernels.attention_split import workspace
from quintet.platforms.gpu.ops import attention as triton_attention

DEVICE = needs_triton()
if reason := Op.registry["paged_attention"].probes["triton"]():
    pytest.skip(reason, allow_module_level=True)

REGISTERED = gathered_attention  # importing it registers its providers
PROVIDERS = ("triton", "gathered")
ROUNDINGS = {torch.float32: 20, torch.bfloat16: 4, torch.float16: 4}  # of the type, at the size of the result
# heads, KV heads, head dim, numbers of K that are V, page size: groups that fill no block, V alone, odd sizes
SHARED = ((6, 2, 24, 16, 16), (5, 1, 20, 20, 8), (20, 1, 44, 36, 8), (2, 2, 40, 32, 32))
FORMS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 9}, "window over blocks": {"window": 140}, "soft-cap": {"softcap": 3.0},
    "sinks, window": {"sinks": True, "window": 40}, "alibi": {"alibi": True},
}  # fmt: skip
TYPES = (
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
)
# one token and several in one step; contexts of one split and of three
MIX = [
    AttentionRequest(40, 1),
    AttentionRequest(0, 21),
    AttentionRequest(130, 5),
    AttentionRequest(520, 1),
    AttentionRequest(3, 1),
    AttentionRequest(60, 30),
]


def sinks_of(of: AttentionSpec) -> Tensor | None:
    return torch.linspace(-1, 2, of.heads).to(of.dtype) if of.sinks else None


def step(of: AttentionSpec, requests: list[AttentionRequest]) -> tuple[Tensor, Tensor, StepContext]:
    q, kv, context, *_ = paged_attention_arguments(of, requests, None)
    return q, kv, context


def attend(provider: str, q: Tensor, kv: Tensor, context: StepContext, of: AttentionSpec) -> Tensor:
    if provider == "triton":
        of_triton: Tensor = triton_op("paged_attention", DEVICE)(q, kv, context, of, sinks_of(of))
        return of_triton
    out: Tensor = Op.registry["paged_attention"].providers[provider](q, kv, context, of, sinks_of(of))
    return out


def assert_specified(got: Tensor, q: Tensor, kv: Tensor, context: StepContext, of: AttentionSpec) -> None:
    want = attend("reference", q.float(), kv if of.kv_dtype else kv.float(), context, of)
    limit = ROUNDINGS[of.dtype] * torch.finfo(of.dtype).eps * max(1.0, float(want.abs().max()))
    worst = float((got.float() - want).abs().max())
    assert got.dtype == of.dtype and got.shape == want.shape
    assert worst <= limit, f"{of}: off by {worst:.3g}, {limit:.3g} allowed"


# --------------------------------------------------------------------------------------------------- V inside of K


@pytest.mark.grid(cases=3)
@pytest.mark.parametrize(("turn", "fmt"), list(enumerate(FORMS)), ids=str)
def test_v_is_read_out_of_k(turn: int, fmt: str) -> None:
    """Each kind of layer with two shapes and two pairs of types; every pair comes up."""
    for i in (turn, turn + 2):
        heads, kv_heads, dim, shared, page_size = SHARED[i % len(SHARED)]
        dtype, cached = TYPES[(i + turn // 2) % len(TYPES)]
        more = {"dtype": dtype, "kv_dtype": cached, "page_size": page_size, "shared": shared, **FORMS[fmt]}
        of = spec(heads, kv_heads, dim, **more)
        args = step(of, MIX)
        assert args[1].shape[1:] == page_shape(of) and args[1].shape[1] == 1
        for provider in PROVIDERS:
            assert_specified(attend(provider, *args, of), *args, of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latents_as_large_as_deepseeks_are_shared_out_over_programs(dtype: torch.dtype) -> None:
    of = spec(32, 1, 576, dtype=dtype, shared=512, scale=0.05)
    args = step(of, [AttentionRequest(70, 1), AttentionRequest(11, 3)])
    for provider in PROVIDERS:
        assert_specified(attend(provider, *args, of), *args, of)


def test_a_program_takes_as_many_heads_as_it_can_hold() -> None:
    mla = AttentionLayer(128, 1, 576, 16, "bf16", shared=512)
    assert (mla.group, mla.programs, mla.value, mla.block_dim, mla.block_rest) == (16, 8, 512, 512, 64)
    assert workspace(mla, 3) == ((3, 128, 16, 512), (2, 3, 128, 16))
    assert AttentionLayer(20, 1, 576, 16, "bf16", shared=512).group == 10, "an equal part of them"
    assert (AttentionLayer(128, 1, 128, 16, "bf16").group, AttentionLayer(128, 1, 128, 16, "bf16").block_rest) == (
        128,
        0,
    )
    kept_apart = AttentionLayer(16, 1, 512, 16, "bf16")
    shared, apart = ([fitting(of, kib * 1024, 16, 32) for kib in (64, 100, 163)] for of in (mla, kept_apart))
    assert (shared, apart) == ([3, 5, 5], [2, 3, 5]), "a block is read once"


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_k_is_written_alone_where_v_is_in_it(types: tuple[torch.dtype, torch.dtype | None]) -> None:
    op, (dtype, cached) = Op.registry["write_kv"], types
    for heads, dim, shared, page_size in ((1, 24, 16, 8), (3, 576, 512, 16)):
        of = spec(heads, heads, dim, dtype=dtype, kv_dtype=cached, page_size=page_size, shared=shared)
        _, kv, context = step(of, [AttentionRequest(37, 7), AttentionRequest(8, 1)])
        k = torch.randn(len(context.group.slot_mapping), heads, dim).to(dtype)
        want = op.reference(kv.clone(), k, None, context)
        assert torch.equal(
            triton_op("write_kv", DEVICE)(kv, k, None, context).view(torch.uint8), want.view(torch.uint8)
        )
        with pytest.raises(ValueError, match="do not fit"):
            triton_op("write_kv", DEVICE)(kv, k, k, context)


def test_what_is_not_served_is_refused_with_all_reasons() -> None:
    good = spec(4, 2, 576, shared=512)
    assert triton_attention.reasons(good) == []
    assert "K has 192 numbers beyond V" in triton_attention.reasons(replace(good, head_dim=704))[0]
    assert "heads of 576" in triton_attention.reasons(replace(good, shared=576))[0]
    assert "of one sequence" in triton_attention.reasons(spec(4, 2, 16, source="cross", window=3))[0]


# -------------------------------------------------------------------------------------------------------- both ways


@pytest.mark.grid(cases=4)
@pytest.mark.parametrize(("turn", "fmt"), list(enumerate(FORMS)), ids=str)
@pytest.mark.parametrize("shared", [0, 16])
def test_a_layer_that_is_not_causal_sees_all_of_its_request(turn: int, fmt: str, shared: int) -> None:
    dtype, cached = TYPES[turn % len(TYPES)]
    more = {"dtype": dtype, "kv_dtype": cached, "causal": False, "shared": shared, **FORMS[fmt]}
    of = spec(6, 2, 24, page_size=8, **more)
    args = step(
        of, [AttentionRequest(0, 70), AttentionRequest(0, 1), AttentionRequest(0, 21), AttentionRequest(130, 5)]
    )
    for provider in PROVIDERS:
        assert_specified(attend(provider, *args, of), *args, of)


def test_keys_of_another_sequence_are_all_seen() -> None:
    """As of an encoder: their number has nothing to do with where a token stands."""
    of = spec(4, 2, 16, source="cross", causal=False)
    q, kv, context = step(of, [AttentionRequest(90, 3), AttentionRequest(40, 1)])
    lengths = torch.tensor([17, 33], dtype=torch.int32)
    other = StepContext(context.batch, context.group._replace(seq_lens=lengths))
    for provider in PROVIDERS:
        assert_specified(attend(provider, q, kv, other, of), q, kv, other, of)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_that_keeps_nothing_equals_the_specification(dtype: torch.dtype) -> None:
    op = Op.registry["attention"]
    for what, (q, k, v, batch, of, sinks) in CASES["attention"](dtype):
        want = op.reference(q.float(), k.float(), v.float(), batch, of, sinks)
        got = op.providers["gathered"](q, k, v, batch, of, sinks)
        limit = ROUNDINGS[dtype] * torch.finfo(dtype).eps * max(1.0, float(want.abs().max()))
        assert got.dtype == dtype and float((got.float() - want).abs().max()) <= limit, what


def test_padding_of_what_keeps_nothing_gets_zeros() -> None:
    of = spec(4, 2, 16, source="none", causal=False)
    q, _, (batch, _) = step(of, [AttentionRequest(0, 5), AttentionRequest(0, 3)])
    k = torch.randn(8, 2, 16)
    want = Op.registry["attention"].providers["gathered"](q, k, k, batch, of, None)
    none, (more, keys) = torch.zeros(2, dtype=torch.int32), (torch.cat([x, x[:2] * math.nan]) for x in (q, k))
    padded = batch._replace(
        positions=torch.cat([batch.positions, none]), token_to_seq=torch.cat([batch.token_to_seq, none + 1])
    )
    got = Op.registry["attention"].providers["gathered"](more, keys, keys, padded, of, None)
    assert torch.equal(got[:8], want) and not got[8:].any()


# ------------------------------------------------------------------------------------------- pages behind a window


def without_the_first(context: StepContext, of: AttentionSpec) -> StepContext:
    """The pages that no token of the step can see are given back: 0 in the table."""
    table = context.group.block_table.clone()
    counts = context.batch.query_start_loc.diff().tolist()
    for row, (length, count) in enumerate(zip(context.group.seq_lens.tolist(), counts, strict=True)):
        kept = KVCacheGroup(of.window or of.chunk, of.chunk is not None)
        table[row, : kept.first_visible(length - count) // of.page_size] = 0
    return StepContext(context.batch, context.group._replace(block_table=table))


@pytest.mark.slow
@pytest.mark.parametrize("cached", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_page_0_holds_reaches_nothing_behind_a_window(provider: str, cached: torch.dtype | None) -> None:
    """Not by a weight of 0 either: page 0 holds what is not a number."""
    requests = [
        AttentionRequest(40, 1),
        AttentionRequest(230, 21),
        AttentionRequest(530, 1),
        AttentionRequest(3, 1),
        AttentionRequest(64, 2),
    ]
    forms: list[dict[str, Any]] = [
        {"window": 1},
        {"window": 9, "shared": 16},
        {"window": 33, "sinks": True, "softcap": 4.0},
        {"window": 280},
        {"chunk": 50},
    ]
    for fmt in forms:
        of = spec(4, 2, 24, dtype=torch.float16, kv_dtype=cached, **fmt)
        q, kv, context = step(of, requests)
        want = attend(provider, q, kv, context, of)
        kv[0] = to_cache_rows(torch.full((24,), math.nan), of.cache_dtype)
        trimmed = without_the_first(context, of)
        assert (trimmed.group.block_table == 0).sum() > (context.group.block_table == 0).sum()
        assert torch.equal(attend(provider, q, kv, trimmed, of), want), fmt


def test_flashinfer_is_told_no_page_behind_a_window() -> None:
    of = spec(8, 2, 64, dtype=torch.bfloat16, window=20)
    for requests in (
        [AttentionRequest(40, 1), AttentionRequest(100, 30), AttentionRequest(3, 1)],
        MIXES["decoding"],
        MIXES["chunks"],
    ):
        _, _, context = step(of, requests)
        batch, group = (on_host(each) for each in (context, without_the_first(context, of)))
        listed = [flashinfer.page_indices(batch[0], each, of) for each in (batch[1], group[1])]
        assert all(np.array_equal(a, b) for a, b in zip(*listed, strict=True)) and listed[0][1].all()
        indptr, pages, last = listed[0]
        for row, request in enumerate(requests):
            length, first = request.cached + request.new, max(0, request.cached - 19) // 16
            own = batch[1].block_table[row, first : -(-length // 16)]
            assert np.array_equal(pages[indptr[row] : indptr[row + 1]], own)
            assert (first + len(own) - 1) * 16 + last[row] == length
    whole, context = spec(8, 2, 64, dtype=torch.bfloat16), step(of, MIXES["chunks"])[2]
    _, pages, _ = flashinfer.page_indices(*on_host(context), whole)
    assert len(pages) == sum(-(-(r.cached + r.new) // 16) for r in MIXES["chunks"])


def on_host(context: StepContext) -> tuple[HostBatch, HostGroup]:
    group = HostGroup(*(x.numpy() for x in context.group[:3]))
    return HostBatch(*(x.numpy() for x in context.batch[:5]), (group,)), group


def test_a_decoded_tokens_bits_depend_on_its_request_alone() -> None:
    of = spec(32, 1, 40, dtype=torch.float16, shared=32)
    cache = RandomKVCache(of, [600, 90])
    alone, beside = ({0: AttentionRequest(599, 1)}, {1: AttentionRequest(80, 10), 0: AttentionRequest(599, 1)})
    found = [attend("triton", q, cache.kv, context, of) for q, context in map(cache.batch, (alone, beside))]
    assert torch.equal(found[0][0], found[1][10])
