"""The Triton rotary embedding turns heads as the specification does, wherever they lie."""

import pytest
import torch
from torch import Tensor

import quintet.platforms.gpu.ops.rotary  # noqa: F401  registers its providers
from quintet.conformance.harness.batches import spec
from quintet.interface.types import Batch, Group, HeadNorms, RotaryArgs, StepContext
from quintet.ops.attention import page_shape
from quintet.ops.rotary import norm_rotary, pair_rotary, rotary
from tests.helpers.platforms.triton import DTYPES, needs_triton, randn, triton_op

DEVICE = needs_triton()
SHAPES = [(6, 3, 16, 16), (5, 1, 24, 12), (32, 8, 128, 128), (9, 9, 80, 32), (20, 4, 64, 64), (2, 1, 256, 64)]


def heads_and_table(
    heads: int, kv_heads: int, dim: int, turned: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k as slices of one product, as models have them."""
    both = randn(3, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, _ = both.split([heads, kv_heads, kv_heads], 1)
    angles = torch.arange(40)[:, None] * torch.linspace(0.1, 1, turned // 2)
    return q, k, torch.cat([angles.cos(), angles.sin()], -1), torch.tensor([39, 0, 7], dtype=torch.int32)


def assert_turned(got: Tensor, want: Tensor) -> None:
    """Interpreted, float16 has the specification's bits: cosines, sines and products are rounded in both. On a GPU one
    of two products goes into a sum without that."""
    if got.dtype == torch.float16 and DEVICE.type == "cpu":
        assert torch.equal(got, want)
    else:
        limit = {torch.float32: 1e-6, torch.float16: 0.005, torch.bfloat16: 0.05}[got.dtype]
        torch.testing.assert_close(got, want, rtol=0, atol=limit)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_are_turned_as_the_specification_does(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    q, k, table, positions = heads_and_table(*shape, dtype)
    gots = triton_op("rotary", DEVICE)(q, k, table, positions)
    for got, want in zip(gots, rotary(q, k, table, positions), strict=True):
        assert_turned(got, want)


@pytest.mark.grid(cases=8)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_are_normalized_before(dtype: torch.dtype, shape: tuple[int, ...], offset: float) -> None:
    q, k, table, positions = heads_and_table(*shape, dtype)
    norms = HeadNorms(randn(shape[2], dtype=dtype), randn(shape[2] + 1, dtype=dtype)[1:].clone(), 1e-5, offset)
    gots = triton_op("norm_rotary", DEVICE)(q, k, norms, table, positions)
    exact = HeadNorms(norms.q.float(), norms.k.float(), 1e-5, offset)
    wants = norm_rotary(q.float(), k.float(), exact, table, positions)
    for got, want in zip(gots, wants, strict=True):
        size = max(1.0, float(want.abs().max()))
        limit = {torch.float32: 4, torch.float16: 3, torch.bfloat16: 8}[dtype] * torch.finfo(dtype).eps * size
        assert got.dtype == dtype and float((got.float() - want).abs().max()) <= limit


@pytest.mark.parametrize("shape", [(5, 1, 24, 12), (4, 2, 64, 64)], ids=str)
def test_neighbours_are_turned_as_the_specification_does(shape: tuple[int, ...]) -> None:
    q, k, table, positions = heads_and_table(*shape, torch.float16)
    gots = triton_op("pair_rotary", DEVICE)(q, k, table, positions)
    for got, want in zip(gots, pair_rotary(q, k, table, positions), strict=True):
        assert_turned(got, want)


@pytest.mark.grid
@pytest.mark.parametrize("cached", [None, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("shape", [(6, 3, 16, 16), (5, 1, 24, 12), (9, 9, 80, 32)], ids=str)
def test_turning_and_writing_at_once_gives_the_bits_of_both(
    shape: tuple[int, ...], norms: bool, cached: torch.dtype | None
) -> None:
    """What is not finite stays in its row, as it does there."""
    heads, kv_heads, dim, _ = shape
    q, k, table, positions = heads_and_table(*shape, torch.float16)
    v = randn(3, kv_heads + 1, dim, dtype=torch.float16)[:, 1:]
    k[1, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    of = HeadNorms(randn(dim).half(), randn(1, dim)[0].half(), 1e-5, 1.0) if norms else None
    kind = spec(heads, kv_heads, dim, dtype=torch.float16, kv_dtype=cached)
    kv = torch.zeros(4, *page_shape(kind), dtype=kind.cache_dtype)
    slots = torch.tensor([17, 63, 32], dtype=torch.int32)
    context = StepContext(Batch(positions, positions, *(positions,) * 3, ()), Group(slots, slots, slots))
    for neighbours in (False, True)[: 2 - norms]:
        turn = RotaryArgs(table, of, neighbours)
        got_q, got = triton_op("rotary_write_kv", DEVICE)(q, k, v, turn, kv, context)
        name, *more = ("norm_rotary", of) if norms else ("pair_rotary" if neighbours else "rotary",)
        want_q, turned = triton_op(name, DEVICE)(q, k, *more, table, positions)
        want = triton_op("write_kv", DEVICE)(kv, turned, v, context)
        assert torch.equal(got_q, want_q)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)) and got.view(torch.uint8).any()


def test_a_head_has_the_same_bits_in_every_batch() -> None:
    q, k, table, positions = heads_and_table(32, 8, 128, 128, torch.float32)
    norms = HeadNorms(randn(128), randn(128), 1e-5, 0.0)
    whole, _ = triton_op("norm_rotary", DEVICE)(q, k, norms, table, positions)
    alone, _ = triton_op("norm_rotary", DEVICE)(q[1:2], k[1:2], norms, table, positions[1:2])
    assert torch.equal(alone, whole[1:2])


def test_what_was_given_stays_and_no_tokens_give_none() -> None:
    q, k, table, positions = heads_and_table(6, 3, 16, 16, torch.float32)
    before = q.clone()
    got, _ = triton_op("rotary", DEVICE)(q, k, table, positions)
    assert torch.equal(q, before) and got.is_contiguous()
    assert triton_op("rotary", DEVICE)(q[:0], k[:0], table, positions[:0])[1].shape == (0, 3, 16)


def test_what_does_not_fit_is_refused() -> None:
    q, k, table, positions = heads_and_table(6, 3, 16, 16, torch.float32)
    norms = HeadNorms(torch.ones(16), torch.ones(15), 0.0, 0.0)
    with pytest.raises(ValueError, match="do not fit"):
        triton_op("rotary", DEVICE)(q, k, table, positions[1:])
    with pytest.raises(ValueError, match="does not turn"):
        triton_op("rotary", DEVICE)(q, k, table.double(), positions)
    with pytest.raises(ValueError, match="does not fit"):
        triton_op("norm_rotary", DEVICE)(q, k, norms, table, positions)
    context = StepContext(Batch(positions, positions, *(positions,) * 3, ()), Group(positions, positions, positions))
    both = norms._replace(k=norms.q)
    with pytest.raises(ValueError, match="do not fit a contiguous cache"):
        triton_op("rotary_write_kv", DEVICE)(q, k, k, RotaryArgs(table), torch.zeros(2, 2, 3, 16, 8), context)
    with pytest.raises(ValueError, match="without norms of heads"):
        triton_op("rotary_write_kv", DEVICE)(
            q, k, k, RotaryArgs(table, both, True), torch.zeros(2, 2, 3, 16, 16), context
        )
