"""The Triton norms are the specification's, for rows of any shape and in any company."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import quintet.platforms.gpu.ops.norm  # noqa: F401  registers its providers
from quintet.ops.registry import Op
from tests.helpers.platforms.triton import DTYPES, assert_rounded, needs_triton, randn, triton_op

DEVICE = needs_triton()


def rows(dtype: torch.dtype) -> Iterator[Tensor]:
    """Dense rows, heads, heads between others, every second row, columns."""
    for shape in ((1, 1), (5, 77), (3, 4096), (2, 9001), (40, 128), (2, 3, 16)):
        yield randn(*shape, dtype=dtype)
    yield randn(5, 9, 16, dtype=dtype)[:, 2:6]
    yield randn(10, 300, dtype=dtype)[::2, 100:200]
    yield randn(24, 7, dtype=dtype).T


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_equal_the_specification(dtype: torch.dtype) -> None:
    for x, offset in itertools.product(rows(dtype), (0.0, 1.0)):
        weight, residual = randn(x.shape[-1], dtype=dtype), randn(*x.shape, 1, dtype=dtype, scale=3.0)[..., 0]
        args = weight, 1e-5, offset
        assert_rounded(triton_op("rms_norm", DEVICE)(x, *args), Op.registry["rms_norm"](x, *args), dtype)
        got, total = triton_op("add_rms_norm", DEVICE)(x, residual, *args)
        want, sums = Op.registry["add_rms_norm"](x, residual, *args)
        if dtype != torch.bfloat16:
            assert torch.equal(total, sums)
            assert_rounded(got, want, dtype)
        else:  # a sum that was cut down, not rounded, is another row to normalize
            assert_rounded(total, sums, dtype)
            assert_rounded(got, Op.registry["rms_norm"](total, *args), dtype)


@pytest.mark.parametrize("width", [16, 300, 5000, 10_000])
def test_a_row_has_the_same_bits_in_every_batch(width: int) -> None:
    x, weight = randn(70, width), randn(width)
    whole = triton_op("rms_norm", DEVICE)(x, weight, 1e-6, 0.0)
    for part in (slice(0, 1), slice(69, 70), slice(3, 20)):
        assert torch.equal(triton_op("rms_norm", DEVICE)(x[part], weight, 1e-6, 0.0), whole[part])


def test_no_rows_give_no_rows() -> None:
    for shape in ((0, 8), (0, 2, 8)):
        assert triton_op("rms_norm", DEVICE)(torch.empty(shape), torch.ones(8), 0.0, 0.0).shape == shape


def test_what_does_not_fit_is_refused() -> None:
    x, weight = randn(4, 8), randn(8)
    with pytest.raises(ValueError, match="does not fit"):
        triton_op("rms_norm", DEVICE)(x, weight[1:], 0.0, 0.0)
    with pytest.raises(ValueError, match="does not fit"):
        triton_op("rms_norm", DEVICE)(x, weight.half(), 0.0, 0.0)
    with pytest.raises(ValueError, match="do not match"):
        triton_op("add_rms_norm", DEVICE)(x, x[1:], weight, 0.0, 0.0)
