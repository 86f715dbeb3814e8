"""The Triton products with quantized weights are the specification's, however weights lie; packing; formats by bits."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import quintet.platforms.gpu.ops.quantized  # noqa: F401  registers its providers
from quintet.conformance.cases.model_ops import CASES
from quintet.interface.weights import Matrix, WeightFormat
from quintet.layers.quantization import format_for_inputs
from quintet.ops.linear import KINDS, linear
from quintet.ops.quantize import attributes, quantize
from quintet.ops.registry import Op, of_kind
from quintet.platforms.gpu.weight_layout import in_halves, in_pairs, pack, packed_bytes
from tests.helpers.platforms.triton import DTYPES, needs_triton, randn, triton_op

DEVICE = needs_triton()
OPS = tuple(of_kind("linear", kind) for kind in KINDS)
SCHEMES = {
    "int8": WeightFormat("int8", 8, 16, 128),
    "int8 of 32": WeightFormat("int8", 8, 16, 32),
    "int4": WeightFormat("int4", 4, 16, 32),
    "int4 of 64": WeightFormat("int4", 4, 16, 64),
    "int4 of 128": WeightFormat("int4", 4, 16, 128),
    "w8a8": WeightFormat("w8a8", 8, 8, 0),
    "w4a8": WeightFormat("w4a8", 4, 8, 32),
    "w4a8 of 128": WeightFormat("w4a8", 4, 8, 128),
}
# outputs, inputs: part of a tile; more than one, with a last block that is half there where groups allow it
SHAPES = ((3, 128), (70, 320))
TOKENS = (1, 17, 70)  # of each tile

each_scheme = pytest.mark.parametrize("name", SCHEMES)
each_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def raised(x: Any) -> Any:
    """Activations and weights in float32, so that the specification does not round either."""
    if isinstance(x, Matrix):
        return x._replace(values=raised(x.values))
    return x.float() if isinstance(x, Tensor) and x.dtype in DTYPES else x


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, what: str) -> None:
    """As the contract has it: to 6 roundings of the type at the size of the result; 20 of float32."""
    assert got.dtype == dtype and got.shape == want.shape, what
    limit = (20 if dtype == torch.float32 else 6) * torch.finfo(dtype).eps * max(1.0, float(want.abs().max()))
    worst = float((got.float() - want).abs().max())
    assert worst <= limit, f"{what}: off by {worst:.3g}, {limit:.3g} allowed"


def untied(x: Tensor, group: int) -> Tensor:
    """x with zeros for what lies in the middle of two integers of 8 bits, where one rounding decides."""
    rows = x.double().reshape(len(x), -1, group)
    stretched = rows * 127 / rows.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    middle = (stretched.abs() % 1 - 0.5).abs() < 1e-3
    return torch.where(middle.reshape(x.shape), 0.0, x)


def of(name: str, inputs: int) -> WeightFormat:
    """With a group that divides the inputs, as layers have it."""
    fmt = format_for_inputs(SCHEMES[name], inputs)
    return SCHEMES[name] if fmt.plain else fmt


def packed_case(name: str, outputs: int, inputs: int, tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """x, pack()'s weight and scales, the specification's weight and scales, bias."""
    scheme = of(name, inputs)
    x, weight, bias = randn(tokens, inputs), randn(outputs, inputs, scale=0.1), randn(outputs, dtype=dtype)
    packed = pack(weight.to(DEVICE), scheme)
    plain, scales = packed["weight"].cpu(), packed["scales"].cpu().float()
    if scheme.bits == 4:
        plain = in_pairs(plain, inputs)
    if scheme.activations == 8:
        x = untied(x.to(dtype), inputs // scales.shape[1])
    return x.to(dtype), packed, plain, scales, bias


def multiply(name: str, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, by: Any) -> Tensor:
    fmt = of(name, x.shape[1])
    result: Tensor = by(of_kind("linear", fmt.kind))(x, Matrix(weight, scales, format=fmt), bias, (len(scales),))
    return result


def reference(op: str) -> Any:
    return Op.registry[op].reference


def served(op: str) -> Any:
    return triton_op(op, DEVICE)


@pytest.mark.parametrize("name", OPS)
def test_probes_pass(name: str) -> None:
    assert Op.registry[name].probes["triton"]() is None


@pytest.mark.grid(cases=8)
@each_type
@pytest.mark.parametrize("name", OPS)
def test_weights_as_the_specification_has_them(name: str, dtype: torch.dtype) -> None:
    step = 5 if "fp8a8" in name else 3  # slow where they are interpreted
    for what, args in itertools.islice(CASES[name](dtype), DTYPES.index(dtype) % step, None, step):
        want = Op.registry[name].reference(*map(raised, args))
        assert_close(triton_op(name, DEVICE)(*args), want, dtype, what)


@pytest.mark.grid(cases=8)
@each_type
@each_scheme
def test_weights_as_they_are_packed(name: str, dtype: torch.dtype) -> None:
    """Interpreted, the other types differ in nothing but how they are rounded."""
    cases = [*itertools.product(SHAPES, TOKENS)] if dtype == torch.float16 else [(SHAPES[1], TOKENS[1])]
    for (outputs, inputs), tokens in cases:
        x, packed, plain, scales, bias = packed_case(name, outputs, inputs, tokens, dtype)
        want = multiply(name, x.float(), plain, scales, bias.float(), reference)
        got = multiply(name, x.to(DEVICE), packed["weight"], packed["scales"], bias, served)
        assert_close(got, want, dtype, f"{outputs}x{inputs}, {tokens} tokens")
        assert packed_bytes((outputs, inputs), of(name, inputs)) == sum(each.nbytes for each in packed.values())


@pytest.mark.parametrize("zeros", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("groups", [1, 3])
def test_zero_points_in_halves_and_in_pairs(groups: int, zeros: torch.dtype) -> None:
    x, inputs = randn(5, 384, dtype=torch.float16), 384
    weight = torch.randint(0, 256, (40, inputs // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scales = randn(40, groups).abs() * 0.02 + 0.003
    points = torch.arange(40 * groups).reshape(groups, 40).t().remainder(16).to(zeros)
    fmt = WeightFormat("int4", 4, 16, inputs // groups, zeros=True)
    want = linear.reference(x.float(), Matrix(weight, scales, points, format=fmt), None, (40,))
    for placed in (weight, in_halves(weight, 64)):
        got = served("linear:int4")(x, Matrix(placed, scales, points, format=fmt), None, (40,))
        assert_close(got, want, torch.float16, f"{groups} groups, {placed.shape}")


@pytest.mark.parametrize("name", ["int4", "int8", "w8a8", "w4a8 of 128"])
def test_a_token_alone_is_a_token_in_a_batch(name: str) -> None:
    """Bit for bit, within what one tile is for."""
    x, packed, *_ = packed_case(name, 70, 256, 16, torch.float16)
    every = multiply(name, x, packed["weight"], packed["scales"], None, served)
    for token in (0, 15):
        alone = multiply(name, x[token : token + 1], packed["weight"], packed["scales"], None, served)
        assert torch.equal(alone[0], every[token])


@pytest.mark.parametrize("name", ["int4", "int8", "w8a8", "w4a8"])
def test_splits_add_up(name: str) -> None:
    """Exactly where sums are whole numbers; the last split is shorter."""
    from quintet.platforms.gpu.kernels.quantized import PackedWeight, multiplied
    from quintet.platforms.gpu.kernels.rows import quantized

    scheme = SCHEMES[name]
    x, packed, *_, bias = packed_case(name, 70, 5 * 128, 3, torch.float16)
    x, bias, group = x.to(DEVICE), bias.to(DEVICE), scheme.group
    weight = PackedWeight(packed["weight"], packed["scales"], 70, scheme.bits, group)
    own = None
    if scheme.activations == 8:
        x, own = quantized(x, group or x.shape[1], torch.int8)
    one, other = (multiplied(x, own, weight, bias, torch.float16, splits).cpu() for splits in (1, 3))
    exact = 0.0 if name == "w8a8" else 2e-3
    torch.testing.assert_close(other, one, rtol=exact, atol=exact)


@pytest.mark.parametrize("group", [32, 264, 2112])
def test_activations_to_whole_numbers(group: int) -> None:
    from quintet.platforms.gpu.kernels.rows import quantized

    x = untied(randn(4, 2112), group)
    x[2] = 0
    values, scales = (each.cpu() for each in quantized(x.to(DEVICE), group, torch.int8))
    rows = x.reshape(4, -1, group)
    peak = rows.abs().amax(-1).clamp(min=1e-12)
    assert torch.equal(scales, peak / 127)
    assert torch.equal(values.reshape(rows.shape), (rows * (127 / peak)[..., None]).round().to(torch.int8))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("group", [40, 2100])
def test_a_row_that_a_program_holds_has_the_bits_of_one_that_it_goes_through_twice(
    kind: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of up to 16,384 inputs are read once."""
    from quintet.platforms.gpu.kernels import rows

    seen: list[tuple[bool, int]] = []

    class Noting:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **given: Any) -> Any:
                seen.append((given["ONCE"], given["num_warps"]))
                return quantize_rows[grid](*args, **given)

            return launch

    quantize_rows, x = rows.quantize, randn(3, 2100).half().to(DEVICE)
    monkeypatch.setattr(rows, "quantize", Noting())
    once = rows.quantized(x, group, kind)
    monkeypatch.setattr(rows, "WHOLE", 16)
    monkeypatch.setattr(rows, "WIDEST", 16)
    twice = rows.quantized(x, group, kind)
    assert seen == [(True, 4 if group == 40 else 8), (False, 4)]
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert [rows.warps_for(each) for each in (32, 4096, 8192, 16_384)] == [4, 8, 16, 16]


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
def test_float8_is_rounded_as_torch_does(kind: torch.dtype) -> None:
    """From the largest down to what becomes 0; ties are met: sums of two neighbours."""
    from quintet.platforms.gpu.kernels.rows import quantized

    every = torch.arange(256, dtype=torch.uint8).view(kind).float()
    every = every[every.isfinite()].sort().values
    x = torch.cat([every, (every[1:] + every[:-1]) / 2, every[1:] * 1.01])
    x = x[x.abs() <= torch.finfo(kind).max][None]
    x[0, 0] = torch.finfo(kind).max  # so that the scale is 1
    values, scales = (each.cpu() for each in quantized(x.to(DEVICE), x.shape[1], kind))
    assert scales.tolist() == [[1.0]]
    assert torch.equal(values.view(kind).float(), x.to(kind).float())


def test_bits_of_half_precision_are_what_whole_numbers_stand_for() -> None:
    """What the kernels do in bfloat16, which the interpreter does not know, and in float16."""
    from quintet.platforms.gpu.kernels.formats import UNITS

    units = {str(kind): unit for kind, unit in UNITS.items()}
    numbers = torch.arange(256, dtype=torch.int16)
    for kind, powers in ((torch.bfloat16, (127, 123)), (torch.float16, (15, 11))):
        unit = units["bf16" if kind == torch.bfloat16 else "fp16"]
        low, high = ((numbers & mask).view(kind) * 2.0**power for mask, power in zip((15, 240), powers, strict=True))
        assert torch.equal((low - 8 / unit).float() * unit, (numbers & 15).float() - 8)
        assert torch.equal((high - 8 / unit).float() * unit, (numbers >> 4).float() - 8)
        whole = numbers.view(kind) * 2.0 ** powers[0] - 128 / unit
        assert torch.equal(whole.float() * unit, numbers.float() - 128)


def test_bytes_in_halves_are_those_in_pairs() -> None:
    scheme = SCHEMES["int4"]
    for inputs, half in ((64, 32), (192, 64), (96, 64)):
        plain = attributes(quantize(randn(5, inputs), scheme))["weight"]
        placed = in_halves(plain, half)
        assert placed.shape == (5, -(-inputs // (2 * half)), half)
        assert torch.equal(in_pairs(placed, inputs), plain)


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(ValueError, match="48 inputs do not divide into groups of 128"):
        pack(randn(4, 48), SCHEMES["int8"])
    with pytest.raises(ValueError, match="not finite"):
        pack(randn(4, 64) * float("inf"), SCHEMES["int8 of 32"])


def test_what_does_not_fit_is_refused() -> None:
    packed = pack(randn(4, 64).to(DEVICE), SCHEMES["int4"])
    with pytest.raises(ValueError, match="do not fit a weight"):
        multiply("int4", randn(1, 192, dtype=torch.float16), packed["weight"], packed["scales"], None, served)
    with pytest.raises(ValueError, match="a bias of shape"):
        multiply("int4", randn(1, 64, dtype=torch.float16), packed["weight"], packed["scales"], randn(3), served)
    weight = torch.zeros(4, 64, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="do not fit a weight"):
        fmt = WeightFormat("fp8", 8, 16, dtype=torch.float8_e4m3fn)
        served("linear:fp8")(randn(1, 32), Matrix(weight, torch.ones(4, 1), format=fmt), None, (4,))


def test_no_tokens_give_no_rows() -> None:
    for name in ("int8", "w8a8"):
        x, packed, *_ = packed_case(name, 70, 128, 1, torch.float16)
        assert multiply(name, x[:0], packed["weight"], packed["scales"], None, served).shape == (0, 70)
