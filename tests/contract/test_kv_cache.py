"""Caches of other types than the layer's, and ALiBi: the specifications, and providers that are seldom bound.

What a platform binds, the conformance kit proves: quintet/conformance/sections/attention.py and cache.py.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quintet.conformance.cases.attention import MIXES, paged_attention_arguments
from quintet.conformance.cases.model_ops import DTYPES
from quintet.conformance.cases.random_arguments import randn
from quintet.conformance.close import require_close
from quintet.conformance.formats import away_from_rounding_ties, through_cache
from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.interface.types import INT4, AttentionSpec
from quintet.ops import Op
from quintet.ops.attention import from_cache_rows, row_width, to_cache_rows
from quintet.platforms import cpu

CACHED = (torch.int8, torch.float8_e4m3fn, INT4)
KINDS: dict[str, dict[str, Any]] = {
    "int8": {"kv_dtype": torch.int8},
    "fp8": {"kv_dtype": torch.float8_e4m3fn},
    "int4": {"kv_dtype": INT4},
    "int4, sinks, window": {"kv_dtype": INT4, "sinks": True, "window": 40},
    "alibi": {"alibi": True},
    "alibi, soft-cap, window": {"alibi": True, "softcap": 5.0, "window": 40},
    "int8, sinks": {"kv_dtype": torch.int8, "sinks": True},
    "fp8, alibi": {"kv_dtype": torch.float8_e4m3fn, "alibi": True},
}
REGISTERED = cpu  # importing it registers providers


def test_int8_rows_are_the_nearest_multiples_of_their_scale() -> None:
    x = randn(5, 3, 24, dtype=torch.float32, scale=7.0)
    x[2] *= 1e-5
    x[3] = 0
    rows = to_cache_rows(x, torch.int8)
    assert rows.shape == (5, 3, row_width(24, torch.int8)) == (5, 3, 28)
    for row, numbers in zip(rows.flatten(0, 1), x.flatten(0, 1).tolist(), strict=True):
        scale = float(row[24:].clone().view(torch.float32))
        assert scale == pytest.approx(max(map(abs, numbers)) / 127)
        for steps, number in zip(row[:24].tolist(), numbers, strict=True):
            assert abs(steps) <= 127
            assert abs(number - steps * scale) <= scale * 0.50001
    back = from_cache_rows(rows, 24)
    assert float((back - x).abs().max()) <= float(x.abs().max()) / 254 * 1.0001


def test_a_row_that_is_not_finite_comes_back_so_and_alone() -> None:
    for value in (math.nan, math.inf, -math.inf):
        x = randn(3, 1, 16, dtype=torch.float32)
        x[1, 0, 5] = value
        back = from_cache_rows(to_cache_rows(x, torch.int8), 16)
        assert back[[0, 2]].isfinite().all() and not back[1].isfinite().any()


@pytest.mark.parametrize("dim", [8, 24, 32, 64, 80, 128])
def test_int4_rows_are_what_an_exact_model_makes_of_them(dim: int) -> None:
    """Large channels, zeros, and numbers beyond float16 among them."""
    x = randn(50, 3, dim, dtype=torch.float32, scale=7.0)
    x[:, :, 1] *= 40
    x[2] *= 1e-3
    x[3] = 0
    x = away_from_rounding_ties(x, INT4)
    rows = to_cache_rows(x, INT4)
    assert rows.shape == (50, 3, row_width(dim, INT4)) and row_width(128, INT4) == 80
    back, want = from_cache_rows(rows, dim), through_cache(x, INT4)
    torch.testing.assert_close(back.double(), want, rtol=1e-5, atol=1e-3)
    assert from_cache_rows(to_cache_rows(x * 1e7, INT4), dim).isfinite().all()


def test_int4_groups_that_are_not_finite_come_back_so_and_alone() -> None:
    for value in (math.nan, math.inf, -math.inf):
        x = randn(3, 1, 64, dtype=torch.float32)
        x[1, 0, 5] = value
        back = from_cache_rows(to_cache_rows(x, INT4), 64)
        assert back[[0, 2]].isfinite().all() and back[1, 0, 32:].isfinite().all()
        assert back[1, 0, :32].isnan().all()


def test_an_int4_cache_of_odd_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 7 is odd"):
        row_width(7, INT4)


def test_fp8_is_the_nearest_number_and_ends_at_448() -> None:
    there = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    there = there[there.isfinite()]
    x = torch.cat([randn(400, dtype=torch.float32), randn(401, dtype=torch.float32, scale=200), there])
    x = torch.cat([x, torch.tensor([1e9, -1e9, math.inf, -math.inf])])
    got = from_cache_rows(to_cache_rows(x, torch.float8_e4m3fn), len(x))
    want = (x.clamp(-448, 448)[:, None] - there).abs().amin(-1)
    assert torch.equal((x.clamp(-448, 448) - got).abs(), want)
    assert float(got.abs().max()) == 448 and to_cache_rows(torch.tensor([math.nan]), torch.float8_e4m3fn).isnan().all()


def test_specification_of_alibi_is_the_textbooks() -> None:
    """Press et al. 2022: a score loses its head's slope for every token between query and key."""
    of = spec(4, 2, 8, alibi=True)
    assert of.alibi == (1 / 4, 1 / 16, 1 / 64, 1 / 256)
    q, kv, context, *_ = paged_attention_arguments(of, [AttentionRequest(5, 3), AttentionRequest(0, 12)], None)
    out = Op.registry["paged_attention"].reference(q, kv, context, of, None)
    for token, (row, position) in enumerate(
        zip(context.batch.token_to_seq.tolist(), context.batch.positions.tolist(), strict=True)
    ):
        cache = kv[context.group.block_table[row].long()].permute(0, 3, 1, 2, 4).flatten(0, 1)[: position + 1]
        for head, slope in enumerate(of.alibi):
            scores = cache[:, 0, head // 2] @ q[token, head] * of.scale
            scores -= slope * torch.arange(position, -1, -1)
            torch.testing.assert_close(out[token, head], scores.softmax(0) @ cache[:, 1, head // 2])


def cases(dtype: torch.dtype, settings: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for heads, kv_heads, dim, page_size in ((6, 3, 16, 16), (5, 1, 20, 8), (3, 3, 32, 32)):
        of = spec(heads, kv_heads, dim, dtype=dtype, page_size=page_size, **settings)
        for mix, requests in MIXES.items():
            sinks = randn(heads, dtype=torch.float32) if of.sinks else None
            yield f"{heads}/{kv_heads}, pages of {page_size}, {mix}", paged_attention_arguments(of, requests, sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_attention_in_torch_equals_the_specification(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """It serves on a CPU where nothing is compiled."""
    op = Op.registry["paged_attention"]
    for what, (q, kv, context, of, sinks) in cases(dtype, settings):
        want = op.reference(q.float(), kv if of.kv_dtype else kv.float(), context, of, sinks)
        got = op.providers["torch"](q, kv, context, of, sinks)
        assert got.dtype == dtype
        require_close(what, got, want)


@pytest.mark.parametrize("cached", CACHED, ids=str)
@pytest.mark.parametrize("provider", ["reference", "native"])
def test_what_is_written_is_stored_in_its_slots_and_nothing_else_changes(provider: str, cached: torch.dtype) -> None:
    op = Op.registry["write_kv"]
    if provider in op.probes and (reason := op.probes[provider]()):
        pytest.skip(reason)
    for dtype, page_size in itertools.product(DTYPES, (8, 16)):
        of = spec(6, 3, 24, dtype=dtype, kv_dtype=cached, page_size=page_size)
        cache = RandomKVCache(of, [45, 9])
        q, context = cache.batch({0: AttentionRequest(37, 8), 1: AttentionRequest(8, 1)})
        k, v = randn(len(q), 3, 24, dtype=dtype), randn(len(q), 3, 24, dtype=dtype, scale=2.0)
        want = cache.kv.clone()
        for i, slot in enumerate(context.group.slot_mapping.tolist()):
            want[slot // page_size, 0, :, slot % page_size] = to_cache_rows(k[i], cached)
            want[slot // page_size, 1, :, slot % page_size] = to_cache_rows(v[i], cached)
        got = op.providers[provider](cache.kv, k, v, context)
        assert got.dtype == cached and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize(("cached", "most"), [(torch.int8, 0.01), (torch.float8_e4m3fn, 0.04), (INT4, 0.12)], ids=str)
def test_the_error_of_a_small_cache_is_small(cached: torch.dtype, most: float) -> None:
    """Of attention over normal numbers, relative to the size of its results."""
    exact = spec(8, 2, 64)
    q, kv, context, *_ = paged_attention_arguments(exact, [AttentionRequest(200, 30)], None)
    want = Op.registry["paged_attention"].reference(q, kv, context, exact, None)
    small = AttentionSpec(**{**vars(exact), "kv_dtype": cached})
    got = Op.registry["paged_attention"].reference(q, to_cache_rows(kv, cached), context, small, None)
    error = float((got - want).norm() / want.norm())
    assert 0 < error <= most
