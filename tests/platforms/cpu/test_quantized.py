"""Products with quantized weights: the bits of their definition in numpy, on each instruction set; packing."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quintet.conformance.harness.linear_layers import CanonicalReader
from quintet.interface.weights import CheckpointSlice, Matrix, Weight, WeightFormat
from quintet.layers.quantization import format_for_inputs
from quintet.layers.quantization.fp4_fp8 import E2M1, E2M3
from quintet.ops.linear import linear as product
from quintet.ops.quantize import quantize
from quintet.ops.quantized import dequantized
from quintet.platforms.cpu import weight_layout as tiles
from quintet.platforms.cpu.ops import quantized
from quintet.platforms.cpu.platform import CPU

if reason := quantized.probe():
    pytest.skip(reason, allow_module_level=True)

from quintet import _cpu

Floats = np.ndarray
TYPES = (torch.float32, torch.bfloat16, torch.float16)
SCHEMES = {
    "int8": WeightFormat("int8", 8, 16, 128),
    "int4": WeightFormat("int4", 4, 16, 32),
    "int4 of 128": WeightFormat("int4", 4, 16, 128),
    "w8a8": WeightFormat("w8a8", 8, 8, 0),
    "w4a8": WeightFormat("w4a8", 4, 8, 64),
    "w8a8 of 128": WeightFormat("w8a8", 8, 8, 128),
}
ROWS = (*range(1, 15), 19, 65)  # each number of rows in registers, few and many; the last: two panels
# outputs, inputs: less than a block, parts of several; more than one stretch of a block, and groups that do not fill it
SHAPES = ((1, 32), (63, 64), (77, 384), (129, 1120))
ODD = ((1, 1), (65, 2), (33, 1801))  # of W8A8, which has no groups

each_scheme = pytest.mark.parametrize("name", SCHEMES)
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = _cpu.threads()
    _cpu.set_threads(2)
    yield
    _cpu.set_threads(before)


def drawn(tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias; tokens of different sizes, the fifth of zeros."""
    generator = torch.Generator().manual_seed(outputs * 10_000 + inputs)
    shapes = ((tokens, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    sizes = torch.rand(tokens, 1, generator=generator) * 20
    sizes[4:5] = 0
    return (x * sizes).to(dtype), weight.to(dtype), bias.to(dtype)


def of(name: str, inputs: int) -> WeightFormat:
    """With a group that divides the inputs, as layers have it."""
    fmt = format_for_inputs(SCHEMES[name], inputs)
    return SCHEMES[name] if fmt.plain else fmt


def native(x: Tensor, packed: dict[str, Tensor], bias: Tensor | None, outputs: int, name: str) -> Tensor:
    fmt = of(name, x.shape[1])
    got: Tensor = served(fmt.kind)(x, Matrix(packed["weight"], packed["scales"], format=fmt), bias, (outputs,))
    return got


def served(kind: str) -> Any:
    return product.kinds[kind].providers["native"]


def defined(x: Tensor, packed: dict[str, Tensor], bias: Tensor | None, outputs: int, name: str) -> Tensor:
    """The sums of groups in 64-bit integers; each other step in float32, rounded once."""
    tokens, inputs = x.shape
    whole = tiles.integers(packed["weight"], outputs, inputs).numpy().astype(np.int64)
    scales = tiles.columns(packed["scales"], outputs).numpy()
    groups = scales.shape[1]
    rows = x.float().numpy().reshape(tokens, groups, -1)
    largest = np.float32(32639 if SCHEMES[name].activations == 16 else 127)
    peak = np.maximum(np.abs(rows).max(-1), np.float32(1e-12))
    stretched = np.rint(rows * (largest / peak)[:, :, None]).astype(np.int64)
    sums = np.zeros((tokens, outputs), np.float32)
    for g in range(groups):
        part = slice(g * rows.shape[2], (g + 1) * rows.shape[2])
        exact = (stretched[:, g] @ whole[:, part].T).astype(np.float32)
        sums = fused(exact, scales[:, g] * (peak / largest)[:, g, None], sums)
    y = torch.from_numpy(sums)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def untied(x: Tensor, groups: int) -> Tensor:
    """x with zeros for what lies in the middle of two integers of 8 bits, where torch and we may part."""
    rows = x.double().reshape(len(x), groups, -1)
    stretched = rows * 127 / rows.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    middle = (stretched.abs() % 1 - 0.5).abs() < 1e-3
    return torch.where(middle.reshape(x.shape), 0.0, x)


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c of float32, rounded once: float64 holds the product; a sum that it does not hold is rounded to odd."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    step = np.where((lost != 0) & (bits & 1 == 0), np.where((lost > 0) == (total > 0), 1, -1), 0)
    return np.asarray((bits + step).view(np.float64).astype(np.float32))


@pytest.mark.grid(cases=24)
@each_type
@each_scheme
def test_every_instruction_set_equals_the_definition(isa: str, name: str, dtype: torch.dtype) -> None:
    """Bit for bit, and a row alone as in every batch."""
    for outputs, inputs in (*SHAPES, *(ODD if name == "w8a8" else ())):
        x, weight, bias = drawn(max(ROWS), outputs, inputs, dtype)
        packed = quantized.pack(weight, of(name, weight.shape[1]))
        for own in (None, bias):
            want = defined(x, packed, own, outputs, name)
            for count in ROWS:
                got = native(x[:count], packed, own, outputs, name)
                assert got.dtype == dtype
                assert torch.equal(got, want[:count]), f"{outputs}x{inputs} at {count} rows, bias {own is not None}"
            for row in range(0, max(ROWS), 13):
                assert torch.equal(native(x[row : row + 1], packed, own, outputs, name), want[row : row + 1])


@each_type
@each_scheme
def test_products_are_those_of_the_specification(name: str, dtype: torch.dtype) -> None:
    """On the same quantized weights. The contract allows 6 roundings of the type at the result's size: half types take
    less than one. In float32 activations of 16 bits show: half a step of the largest each, as such errors add up."""
    for outputs, inputs in SHAPES:
        scheme = of(name, inputs)
        x, weight, bias = drawn(40, outputs, inputs, dtype)
        packed = quantized.pack(weight, scheme)
        if scheme.activations == 8:
            x = untied(x, packed["scales"].shape[1])
        plain = tiles.integers(packed["weight"], outputs, inputs)
        if scheme.bits == 4:
            bits = (plain + 8).to(torch.uint8)
            plain = bits[:, ::2] | bits[:, 1::2] << 4
        matrix = Matrix(plain, tiles.columns(packed["scales"], outputs), format=scheme)
        want = product.reference(x.float(), matrix, bias.float(), (outputs,))
        off = (native(x, packed, bias, outputs, name).float() - want).abs()
        length = tiles.unpack(packed, outputs, inputs, scheme).norm(dim=1)
        step = x.float().abs().amax(1, keepdim=True) * (1 / 32639 if scheme.activations == 16 else 2**-22)
        assert (off <= torch.finfo(dtype).eps * want.abs() * 0.51 + 6 * step / 12**0.5 * length + 1e-5).all()
        if dtype != torch.float32:
            assert off.max() <= torch.finfo(dtype).eps * want.abs().max()


@each_scheme
def test_threads_change_no_bit(name: str) -> None:
    x, weight, bias = drawn(270, 1030, 512, torch.bfloat16)
    results = []
    for count in (1, 2, 3):
        _cpu.set_threads(count)
        packed = quantized.pack(weight, of(name, weight.shape[1]))
        results.append((*packed.values(), *(native(x[:rows], packed, bias, 1030, name) for rows in (1, 5, 64, 270))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@each_type
@each_scheme
def test_packing_keeps_what_bits_can_hold(isa: str, name: str, dtype: torch.dtype) -> None:
    """8 bits: half a step of the group's largest. 4 bits: less squared error than the plain way, with -8 for the
    largest: by 6 to 13%, in groups of 32 to 128 numbers that are normal or have heavy tails."""
    scheme = SCHEMES[name]
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(130, 768, generator=generator)
    heavy = normal / torch.randn(130, 768, 4, generator=generator).norm(dim=-1)  # Student's, of 4 degrees
    for drawn_weight in (normal, heavy, torch.zeros(3, 128)):
        weight = drawn_weight.to(dtype)
        packed = quantized.pack(weight, scheme)
        back = tiles.unpack(packed, *weight.shape, scheme)
        groups = packed["scales"].shape[1]
        assert tiles.packed_bytes(weight.shape, scheme, powers=False) == sum(t.nbytes for t in packed.values())
        if scheme.bits == 8:
            largest = weight.float().reshape(len(weight), groups, -1).abs().amax(-1, keepdim=True)
            off = (back - weight.float()).reshape(len(weight), groups, -1).abs()
            assert (off <= largest / 127 * 0.51).all()
        elif weight.any():
            plain = dequantized(quantize(weight, scheme))
            assert (back - weight.float()).square().sum() < 0.95 * (plain - weight.float()).square().sum()
        else:
            assert not back.any()


@each_scheme
def test_packing_takes_rows_as_they_lie(name: str) -> None:
    _, weight, _ = drawn(1, 70, 128, torch.bfloat16)
    want = quantized.pack(weight, of(name, weight.shape[1]))
    for other in (torch.cat([weight, weight], dim=1)[:, 128:], weight.T.contiguous().T):
        got = quantized.pack(other, of(name, 128))
        assert torch.equal(got["weight"], want["weight"]) and torch.equal(got["scales"], want["scales"])


@each_scheme
def test_strided_rows_are_as_good_as_contiguous_ones(name: str) -> None:
    x, weight, bias = drawn(9, 70, 128, torch.bfloat16)
    packed = quantized.pack(weight, of(name, weight.shape[1]))
    want = native(x, packed, bias, 70, name)
    assert torch.equal(native(torch.cat([x, x], dim=1)[:, 128:], packed, bias, 70, name), want)
    assert torch.equal(native(x.T.contiguous().T, packed, bias, 70, name), want)
    assert native(x[:0], packed, bias, 70, name).shape == (0, 70)


@each_scheme
def test_what_is_not_finite_stays_in_its_row(isa: str, name: str) -> None:
    for dtype in TYPES:
        x, weight, _ = drawn(8, 70, 128, dtype)
        packed = quantized.pack(weight, of(name, weight.shape[1]))
        clean = native(x, packed, None, 70, name)
        x[2, 30], x[5, 0] = float("inf"), float("nan")
        got = native(x, packed, None, 70, name)
        assert not got[[2, 5]].isfinite().any()
        rest = [0, 1, 3, 4, 6, 7]
        assert torch.equal(got[rest], clean[rest])


def test_a_group_divides_the_inputs() -> None:
    for inputs in (192, 48):
        with pytest.raises(ValueError, match="do not divide into groups"):
            quantized.pack(torch.ones(5, inputs), SCHEMES["int8"])


MIXED = (-1.0, -0.7, -0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)  # no whole multiples
HELD = {
    "int8": WeightFormat("int8", 8, 16, 64),
    "int8 of all": WeightFormat("int8", 8, 16),
    "w8a8": WeightFormat("w8a8", 8, 8),
    "int8 and minima": WeightFormat("int8", 8, 16, 16, mins=True),
    "int8 in order": WeightFormat("int8", 8, 16, 32, act_order=True),
    "w8a8 of 32": WeightFormat("w8a8", 8, 8, 32),
    "w8a8 and minima": WeightFormat("w8a8", 8, 8, mins=True),
    "int4": WeightFormat("int4", 4, 16, 128),
    "w4a8": WeightFormat("w4a8", 4, 8, 32),
    "zeros": WeightFormat("int4", 4, 16, 128, zeros=True),
    "zeros of 32": WeightFormat("int4", 4, 16, 32, zeros=True),
    "zeros of all": WeightFormat("int4", 4, 16, zeros=True),
    "minima": WeightFormat("int4", 4, 16, 32, mins=True),
    "minima of all": WeightFormat("int4", 4, 16, mins=True),
    "w4a8 of all": WeightFormat("w4a8", 4, 8),
    "w4a8 and zeros": WeightFormat("w4a8", 4, 8, 64, zeros=True),
    "w4a8 and minima": WeightFormat("w4a8", 4, 8, 32, mins=True),
    "both": WeightFormat("int4", 4, 16, 32, zeros=True, mins=True),
    "in order": WeightFormat("int4", 4, 16, 32, zeros=True, act_order=True),
    "4 in order": WeightFormat("w4a8", 4, 8, 64, act_order=True),
    "e2m1": WeightFormat("table4", 4, 16, 32, codebook=E2M1),
    "e2m1 by bytes": WeightFormat("table4", 4, 8, 128, codebook=E2M1),
    "e2m3": WeightFormat("table8", 8, 16, 32, codebook=E2M3),
}
each_held = pytest.mark.parametrize("name", HELD)


def as_held(matrix: Matrix, packed: dict[str, Tensor]) -> Matrix:
    rest = packed.get("zeros"), packed.get("order"), matrix.format, packed.get("mins")
    return Matrix(packed["weight"], packed["scales"], *rest)


def by_row(matrix: Matrix, x: Tensor) -> Tensor:
    """x with nothing between two whole numbers, in the order in which they share scales."""
    if matrix.format.activations == 16:
        return x
    order = torch.arange(x.shape[1]) if matrix.input_order is None else matrix.input_order.long()
    return untied(x[:, order], matrix.format.groups(x.shape[1]))[:, order.argsort()]


@each_held
def test_a_canonical_matrix_is_packed_without_rounding(isa: str, name: str) -> None:
    """In the shapes that were promised; products are the specification's; a row alone has the batch's bits."""
    fmt = HELD[name]
    for outputs, inputs in ((70, 384), (64, 128), (129, 1152)):
        matrix = CanonicalReader(fmt).random_matrix(outputs, inputs)
        packed = tiles.pack(matrix)
        assert tiles.packed_bytes((outputs, inputs), fmt) == sum(each.nbytes for each in packed.values())
        known = tiles.unpack(packed, outputs, inputs, fmt)
        torch.testing.assert_close(known, dequantized(matrix._replace(input_order=None)), rtol=2e-7, atol=1e-7)
        x = by_row(matrix, drawn(67, outputs, inputs, torch.bfloat16)[0]).bfloat16()
        got = served(fmt.kind)(x, as_held(matrix, packed), None, (outputs,))
        want = linear_of(x.float(), matrix, outputs)
        assert (got.float() - want).abs().max() <= torch.finfo(torch.bfloat16).eps * want.abs().max()
        for count in (1, 2, 5, 11):
            assert torch.equal(served(fmt.kind)(x[:count], as_held(matrix, packed), None, (outputs,)), got[:count])


@each_held
def test_canonical_matrices_give_every_instruction_set_the_same_bits(isas: Iterator[str], name: str) -> None:
    results = []
    for _ in isas:
        matrix = CanonicalReader(HELD[name]).random_matrix(129, 1152)
        x, _, bias = drawn(19, 129, 1152, torch.float32)
        results.append(served(HELD[name].kind)(x, as_held(matrix, tiles.pack(matrix)), bias, (129,)))
    assert all(torch.equal(each, results[0]) for each in results)


def test_a_table_of_any_numbers_is_held_to_a_127th_of_its_largest() -> None:
    matrix = CanonicalReader(WeightFormat("table4", 4, 16, 32, codebook=MIXED)).random_matrix(70, 128)
    assert matrix.scales is not None
    known = tiles.unpack(tiles.pack(matrix), 70, 128, matrix.format)
    off = (known - dequantized(matrix)).abs().reshape(70, 4, 32)
    assert (off <= matrix.scales[:, :, None] / 127).all()


def test_scales_beyond_float16_are_held_with_powers_of_two() -> None:
    """To the same part of a column's largest: nothing that is finite is refused."""
    for name in ("zeros", "minima", "e2m1", "int8 and minima"):
        matrix = CanonicalReader(HELD[name]).random_matrix(70, 256)
        assert matrix.scales is not None
        powers = 2.0 ** torch.arange(-35, 35).reshape(70, 1)
        mins = None if matrix.mins is None else matrix.mins * powers
        wide = matrix._replace(scales=matrix.scales * powers, mins=mins)
        packed = tiles.pack(wide)
        torch.testing.assert_close(tiles.unpack(packed, 70, 256, wide.format), dequantized(wide), rtol=1e-6, atol=0)
        x = drawn(9, 70, 256, torch.float32)[0]
        got, want = served(wide.format.kind)(x, as_held(wide, packed), None, (70,)), linear_of(x, wide, 70)
        assert ((got - want).abs() / powers.t()).max() <= 2**-13 * (want / powers.t()).abs().max()


def test_other_numbers_of_a_form_are_laid_where_these_are() -> None:
    """Weights are reloaded into the same tensors, whatever float16 holds of their scales."""
    for name in ("int8", "w8a8", "zeros", "minima", "e2m1"):
        matrix = CanonicalReader(HELD[name]).random_matrix(70, 256)
        assert matrix.scales is not None
        there, other = tiles.pack(matrix), tiles.pack(matrix._replace(scales=matrix.scales * 1e-9))
        assert {key: each.shape for key, each in there.items()} == {key: each.shape for key, each in other.items()}


@pytest.mark.parametrize("scale", [65504.0, 65530.0, 65599.0, 1e38, 1e-38])
def test_scales_at_the_ends_of_float16_stay_finite(scale: float) -> None:
    matrix = CanonicalReader(HELD["int8"]).random_matrix(3, 64)
    assert matrix.scales is not None
    ends = matrix._replace(scales=torch.full_like(matrix.scales, scale))
    torch.testing.assert_close(tiles.unpack(tiles.pack(ends), 3, 64, ends.format), dequantized(ends), rtol=1e-3, atol=0)


def test_what_cannot_be_packed_exactly_is_refused_or_held_otherwise() -> None:
    matrix = CanonicalReader(HELD["zeros"]).random_matrix(70, 128)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not finite"):
            tiles.pack(matrix._replace(scales=torch.full((70, 1), bad)))
    odd = matrix._replace(zeros=torch.full((70, 1), 7.5))
    known = tiles.unpack(tiles.pack(odd), 70, 128, odd.format)
    torch.testing.assert_close(known, dequantized(odd), rtol=1e-3, atol=1e-5)


def test_a_matrix_that_is_not_packed_goes_to_the_reference() -> None:
    x = torch.randn(3, 64)
    for fmt in HELD.values():
        matrix = CanonicalReader(fmt).random_matrix(5, 64)
        torch.testing.assert_close(served(fmt.kind)(x, matrix, None, (5,)), linear_of(x, matrix, 5))


def test_a_row_has_its_bits_in_every_batch_where_its_matrix_is_not_packed() -> None:
    x = torch.randn(19, 100)
    for fmt in (each for each in HELD.values() if not each.group):
        matrix = CanonicalReader(fmt).random_matrix(129, 100)
        whole = served(fmt.kind)(x, matrix, None, (129,))
        for row in range(19):
            assert torch.equal(served(fmt.kind)(x[row : row + 1], matrix, None, (129,)), whole[row : row + 1]), fmt


def linear_of(x: Tensor, matrix: Matrix, outputs: int) -> Tensor:
    want: Tensor = product.reference(x, matrix, None, (outputs,))
    return want


def test_what_does_not_fit_is_refused() -> None:
    x, weight, bias = drawn(3, 70, 128, torch.bfloat16)
    packed = quantized.pack(weight, SCHEMES["int8"])
    for wrong in ((x[:, :64], bias, 70, "int8"), (x, bias, 200, "int8"), (x, bias, 70, "w8a8"), (x, bias, 70, "int4")):
        with pytest.raises(ValueError, match="do not fit"):
            native(wrong[0], packed, *wrong[1:])
    with pytest.raises(ValueError, match="bias"):
        native(x, packed, bias[:5], 70, "int8")
    with pytest.raises(ValueError, match="float64"):
        quantized.pack(weight.double(), SCHEMES["int8"])
    for bad in (float("nan"), float("inf")):
        weight[69, 5] = bad
        for scheme in SCHEMES.values():
            with pytest.raises(ValueError, match="not finite"):
                quantized.pack(weight, scheme)


@pytest.mark.parametrize(
    ("group", "inputs", "there"), [(256, 512, True), (256, 384, False), (32, 80, False), (16, 80, True)]
)
def test_a_short_group_at_the_end_is_not_held(group: int, inputs: int, there: bool) -> None:
    """Larger groups are cut into pieces of one size, which would not fit it: such a matrix goes to torch."""
    assert tiles.can_pack(WeightFormat("int8", 8, 16, group), inputs) is there


@pytest.mark.parametrize("name", ["int8", "w4a8"])
def test_nothing_is_packed_for_products_that_are_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the extension is older than the package: what is left takes canonical matrices."""
    part = CheckpointSlice("x.weight", (70, 256), ((0, 70),))
    weight = Weight("weight", (part,), 0, 0, torch.float32, "linear", SCHEMES[name])
    tensors, platform = {"x.weight": torch.ones(70, 256)}, CPU()
    assert platform.place(weight, tensors)["weight"].dim() == 3
    monkeypatch.setattr(quantized, "probe", lambda: "the compiled extension is older than this provider")
    found = platform.place(weight, tensors)
    assert found["weight"].shape == (70, 256 * SCHEMES[name].bits // 8)
    assert found["scales"].shape == (70, 256 // (SCHEMES[name].group or 256))


@pytest.mark.parametrize("scheme", [-1, 13])
def test_a_scheme_that_is_not_there_is_refused(scheme: int) -> None:
    with pytest.raises(ValueError, match=f"scheme must be 0 to 12, not {scheme}"):
        _cpu.pack_quantized(scheme, 0, 0, 0, 0, 0, 0, 0, 0)
