"""Products with weights in 8-bit floats: every number exactly, the definition's sums, on each instruction set."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops.linear import linear as product
from quintet.platforms.cpu.ops import float8

if reason := float8.probe():
    pytest.skip(reason, allow_module_level=True)

from quintet import _cpu

TYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (*range(1, 15), 19, 65)  # each number of rows in registers, few and many; the last: two panels
# outputs, inputs, group: less than a block, parts of several; stretches side by side, and what is left; short ends
SHAPES = (
    *((1, 1, 0), (5, 2, 0), (63, 64, 32), (129, 1120, 128)),
    *((64, 1024, 256), (33, 1801, 0), (65, 300, 128), (7, 33, 16), (5, 32, 33)),
)

each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)
each_format = pytest.mark.parametrize("kind", float8.FORMATS, ids=str)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = _cpu.threads()
    _cpu.set_threads(2)
    yield
    _cpu.set_threads(before)


def finite(kind: torch.dtype) -> Tensor:
    """All of them, zeros and those below the smallest normal one too."""
    each = torch.arange(256).to(torch.uint8).view(kind)
    return each.view(torch.uint8)[each.float().isfinite()].view(kind)


def made(kind: torch.dtype, outputs: int, inputs: int, group: int) -> Matrix:
    generator = torch.Generator().manual_seed(outputs * 10_000 + inputs)
    fmt = WeightFormat("fp8", 8, 16, group, dtype=kind)
    values = torch.randn(outputs, inputs, generator=generator) * torch.tensor([0.01, 1.0])[torch.arange(inputs) % 2]
    return Matrix(values.to(kind), torch.rand(outputs, fmt.groups(inputs), generator=generator) + 0.1, format=fmt)


def native(x: Tensor, matrix: Matrix, packed: dict[str, Tensor], bias: Tensor | None) -> Tensor:
    weight = Matrix(packed["weight"], packed["scales"], format=matrix.format)
    got: Tensor = served()(x, weight, bias, (len(matrix.values),))
    return got


def served() -> Any:
    return product.kinds["fp8"].providers["native"]


@each_format
@each_type
def test_every_number_is_widened_exactly(isa: str, dtype: torch.dtype, kind: torch.dtype) -> None:
    """In each place of a block's columns; what float16 cannot hold is rounded as torch does it."""
    known = finite(kind).view(torch.uint8)
    values = known.repeat(40)[: 130 * 66].reshape(130, 66).view(kind)
    matrix = Matrix(values, torch.ones(130, 1), format=WeightFormat("fp8", 8, 16, dtype=kind))
    packed = float8.pack(matrix)
    for rows in (torch.eye(66, dtype=dtype), torch.eye(66, dtype=dtype)[:1], torch.eye(66, dtype=dtype)[63:66]):
        got = native(rows, matrix, packed, None)
        assert torch.equal(got, (rows.float() @ values.float().t()).to(dtype))


@each_format
@each_type
def test_products_are_those_of_the_specification(isa: str, dtype: torch.dtype, kind: torch.dtype) -> None:
    """Within roundings of the type at the result's size; a row alone has the bits that it has in every batch."""
    for outputs, inputs, group in SHAPES:
        matrix = made(kind, outputs, inputs, group)
        packed = float8.pack(matrix)
        generator = torch.Generator().manual_seed(inputs)
        x, bias = torch.randn(max(ROWS), inputs, generator=generator).to(dtype), torch.randn(outputs).to(dtype)
        want = product.reference(x.float(), matrix, bias.float(), (outputs,))
        whole = native(x, matrix, packed, bias)
        size = (x.float().norm(dim=1)[:, None] * (matrix.values.float().norm(dim=1)[None] + 1)).clamp(min=1)
        assert ((whole.float() - want).abs() <= torch.finfo(dtype).eps * want.abs() + 2**-20 * size).all()
        for count in ROWS:
            assert torch.equal(native(x[:count], matrix, packed, bias), whole[:count]), (outputs, inputs, count)
        for row in range(0, max(ROWS), 13):
            assert torch.equal(native(x[row : row + 1], matrix, packed, bias), whole[row : row + 1])


@each_format
def test_threads_change_no_bit(kind: torch.dtype) -> None:
    matrix, x = made(kind, 1030, 512, 128), torch.randn(270, 512).bfloat16()
    results = []
    for count in (1, 2, 3):
        _cpu.set_threads(count)
        packed = float8.pack(matrix)
        results.append((*packed.values(), *(native(x[:rows], matrix, packed, None) for rows in (1, 5, 64, 270))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@each_format
def test_packing_keeps_every_bit_in_as_many_bytes_as_were_promised(kind: torch.dtype) -> None:
    for outputs, inputs, group in SHAPES:
        matrix = made(kind, outputs, inputs, group)
        wide = torch.cat([matrix.values.view(torch.uint8)] * 2, 1).view(kind)
        for values in (matrix.values, wide[:, inputs:]):
            packed = float8.pack(matrix._replace(values=values))
            back = float8.unpack(packed["weight"], outputs, inputs, kind)
            assert torch.equal(back.view(torch.uint8), matrix.values.view(torch.uint8))
        assert float8.packed_bytes((outputs, inputs), matrix.format) == sum(each.nbytes for each in packed.values())


def test_strided_rows_are_as_good_as_contiguous_ones() -> None:
    matrix, x = made(torch.float8_e4m3fn, 70, 128, 32), torch.randn(9, 128).bfloat16()
    packed = float8.pack(matrix)
    want = native(x, matrix, packed, None)
    assert torch.equal(native(torch.cat([x, x], dim=1)[:, 128:], matrix, packed, None), want)
    assert torch.equal(native(x.T.contiguous().T, matrix, packed, None), want)
    assert native(x[:0], matrix, packed, None).shape == (0, 70)


def test_a_matrix_that_is_not_packed_goes_to_the_reference() -> None:
    matrix, x = made(torch.float8_e4m3fn, 5, 64, 32), torch.randn(3, 64)
    torch.testing.assert_close(served()(x, matrix, None, (5,)), product.reference(x, matrix, None, (5,)))


def test_what_does_not_fit_is_refused() -> None:
    matrix, x = made(torch.float8_e4m3fn, 70, 128, 32), torch.randn(3, 128)
    packed = float8.pack(matrix)
    weight = Matrix(packed["weight"], packed["scales"], format=matrix.format)
    for rows, outputs in ((x[:, :64], 70), (x, 200), (x, 64)):
        with pytest.raises(ValueError, match="do not fit"):
            served()(rows, weight, None, (outputs,))
    with pytest.raises(ValueError, match="cuts the pairs"):
        float8.pack(made(torch.float8_e4m3fn, 3, 34, 17))
    with pytest.raises(ValueError, match="not torch.float32"):
        float8.pack(matrix._replace(values=matrix.values.float()))


@each_format
def test_what_is_not_finite_is_refused(kind: torch.dtype) -> None:
    matrix = made(kind, 70, 129, 0)
    for bad in (float("nan"), -float("inf")) if kind == torch.float8_e5m2 else (float("nan"),):
        values = matrix.values.float()
        values[69, 128] = bad
        with pytest.raises(ValueError, match="not finite"):
            float8.pack(matrix._replace(values=values.to(kind)))
        with pytest.raises(ValueError, match="not finite"):
            float8.pack(matrix._replace(scales=torch.full((70, 1), bad)))
