"""Our own matrix product: each instruction set against float64, and the bits of a row in whatever company."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quintet.ops import Op
from quintet.platforms.cpu.ops import linear
from quintet.platforms.cpu.ops import torch_ops as ops

if reason := linear.probe():
    pytest.skip(reason, allow_module_level=True)

from quintet import _cpu
from quintet.interface.weights import Matrix

TYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (*range(1, 10), 15, 16, 17, 31, 64, 65, 200)
# outputs, inputs: less than a block, exactly one, parts of several; a stretch of a block and more; half a pair
SHAPES = ((1, 1), (63, 5), (64, 64), (65, 2), (129, 1111), (200, 2050), (33, 3001))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = _cpu.threads()
    _cpu.set_threads(2)
    yield
    _cpu.set_threads(before)


def native(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    product: Tensor = Op.registry["linear"].providers["native"](x, Matrix(weight), bias, (outputs,))
    return product


def drawn(tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outputs * 10_000 + inputs)
    shapes = ((tokens, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_instruction_set_equals_float64(isa: str, dtype: torch.dtype) -> None:
    """To half a unit of the type at the result's size, and what a float32 sum of so many products may be off."""
    for outputs, inputs in SHAPES:
        x, weight, bias = drawn(max(ROWS), outputs, inputs, dtype)
        packed = linear.pack(weight)
        exact = x.double() @ weight.double().T
        within = x.double().abs() @ weight.double().abs().T * 2**-24 * max(4, inputs**0.5) + 1e-7  # 1e-7: subnormals
        for count, own in itertools.product(ROWS, (None, bias)):
            want = exact[:count] if own is None else exact[:count] + own.double()
            got = native(x[:count], packed, own, outputs)
            assert got.dtype == dtype
            wrong = (got.double() - want).abs() > within[:count] + want.abs() * torch.finfo(dtype).eps / 2 * 1.01
            assert not wrong.any(), f"{isa} {dtype} {outputs}x{inputs} at {count} rows: {int(wrong.sum())} elements"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(isa: str, dtype: torch.dtype) -> None:
    for outputs, inputs in SHAPES:
        x, weight, bias = drawn(301, outputs, inputs, dtype)
        packed = linear.pack(weight)
        whole = native(x, packed, bias, outputs)
        parts = [(first, count) for count in ROWS for first in (0, 1, 301 - count)]
        for first, count in [*parts, *((row, 1) for row in range(0, 301, 7))]:
            part = native(x[first : first + count], packed, bias, outputs)
            assert torch.equal(part, whole[first : first + count]), f"{outputs}x{inputs}, rows {first} + {count}"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_threads_change_no_bit(isa: str, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(270, 1030, 515, dtype)
    results = []
    for count in (1, 2, 3):
        _cpu.set_threads(count)
        packed = linear.pack(weight)
        results.append((packed, *(native(x[:rows], packed, bias, 1030) for rows in (1, 5, 64, 270))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_unpack_gives_back_what_was_packed(dtype: torch.dtype) -> None:
    for outputs, inputs in (*SHAPES, (513, 130)):
        _, weight, _ = drawn(1, outputs, inputs, dtype)
        packed = linear.pack(weight)
        assert packed.shape[0] == -(-outputs // _cpu.LINEAR_COLUMNS)
        assert torch.equal(linear.unpack(packed, outputs, inputs), weight)
        padding = linear.unpack(packed, packed.shape[0] * _cpu.LINEAR_COLUMNS, inputs)[outputs:]
        assert not padding.any()


def test_strided_tensors_are_as_good_as_contiguous_ones() -> None:
    x, weight, bias = drawn(9, 70, 31, torch.bfloat16)
    packed = linear.pack(weight)
    want = native(x, packed, bias, 70)
    wide = torch.cat([x, x], dim=1)
    assert torch.equal(native(wide[:, 31:], packed, bias, 70), want)
    assert torch.equal(native(x.T.contiguous().T, packed, bias, 70), want)
    assert torch.equal(native(x[:1].expand(4, -1), packed, bias, 70), want[:1].expand(4, -1))
    assert torch.equal(linear.pack(weight.T.contiguous().T), packed)
    assert torch.equal(linear.pack(torch.cat([weight, weight], dim=1)[:, 31:]), packed)


def test_what_is_not_finite_stays_in_its_row_and_column(isa: str) -> None:
    for dtype in TYPES:
        x, weight, _ = drawn(8, 70, 31, dtype)
        packed = linear.pack(weight)
        clean = native(x, packed, None, 70)
        x[2, 30], x[5, 0] = float("inf"), float("nan")
        weight[69, 30] = float("nan")
        got = native(x, linear.pack(weight), None, 70)
        assert got[2, :69].isinf().all() and got[5].isnan().all() and got[:, 69].isnan().all()
        rest = [0, 1, 3, 4, 6, 7]
        assert torch.equal(got[rest, :69], clean[rest, :69])


def test_no_rows_give_no_rows() -> None:
    _, weight, bias = drawn(1, 70, 31, torch.float32)
    assert native(torch.empty(0, 31), linear.pack(weight), bias, 70).shape == (0, 70)


def test_a_plain_weight_goes_to_torch() -> None:
    x, weight, bias = drawn(3, 70, 31, torch.float32)
    assert torch.equal(native(x, weight, bias, 70), ops._linear(x, Matrix(weight), bias, (70,)))


def test_a_weight_that_does_not_fit_is_refused() -> None:
    x, weight, bias = drawn(3, 70, 31, torch.bfloat16)
    packed = linear.pack(weight)
    for wrong in ((x[:, :29], bias, 70), (x.float(), bias, 70), (x, bias, 200), (x, None, 64)):
        with pytest.raises(ValueError, match="do not fit"):
            native(wrong[0].contiguous(), packed, wrong[1], wrong[2])
    with pytest.raises(ValueError, match="bias"):
        native(x, packed, bias[:5], 70)
    with pytest.raises(ValueError, match="float64"):
        linear.pack(weight.double())


def test_the_memory_of_widened_rows_is_known_and_bounded(isa: str) -> None:
    """Rows of 16 bits become float32 once where the processor multiplies no such numbers."""
    widens = isa in ("avx2", "avx2_vnni")
    for dtype in TYPES:
        wide = widens and dtype != torch.float32
        assert linear.scratch_bytes(15, (64, 1024), dtype) == 0
        assert (linear.scratch_bytes(16, (128, 1024), dtype) > 16 * 1024 * 4) == wide
        assert linear.scratch_bytes(10**6, (128, 1024), dtype) <= 1.1 * 2**24
