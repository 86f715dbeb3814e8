"""Products with weights in every form, for a platform to be tried with."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quintet.conformance.cases.random_arguments import Case, Cases, randn
from quintet.interface.weights import Matrix, WeightFormat

Product = tuple[str, Tensor, Tensor | None, int, int]  # what, x [T, K], bias [N] or None, K, N


def _products(dtype: torch.dtype, *sizes: tuple[int, int, int]) -> Iterator[Product]:
    for rows, inputs, outputs in sizes:
        bias = randn(outputs, dtype=dtype) if rows % 2 else None
        yield f"{rows}x{inputs} by {outputs}", randn(rows, inputs, dtype=dtype), bias, inputs, outputs


def linear_int8(dtype: torch.dtype) -> Iterator[Case]:
    for what, x, bias, inputs, outputs in _products(dtype, (1, 48, 77), (33, 48, 77), (16, 384, 40)):
        for groups in (1, 3, inputs // 16):
            fmt = WeightFormat("int8", 8, 16, inputs // groups)
            weight = Matrix(_int8(outputs, inputs), _scales(outputs, groups) / 16, format=fmt)
            yield f"{what}, {groups} groups", (x, weight, bias, (outputs,))


def linear_int4(dtype: torch.dtype) -> Iterator[Case]:
    for what, x, bias, inputs, outputs in _products(dtype, (1, 48, 77), (33, 48, 77), (16, 384, 40)):
        for groups, zeros in ((1, None), (3, None), (3, torch.uint8), (inputs // 16, torch.float32), (1, torch.uint8)):
            given = None if zeros is None else (_int8(outputs, groups).view(torch.uint8) >> 4).to(zeros)
            if given is not None and zeros is torch.float32:
                given += 0.25
            values, fmt = _int8(outputs, inputs // 2), WeightFormat("int4", 4, 16, inputs // groups, zeros is not None)
            weight = Matrix(values.view(torch.uint8), _scales(outputs, groups), given, format=fmt)
            yield f"{what}, {groups} groups, zeros {zeros}", (x, weight, bias, (outputs,))


def linear_fp8(dtype: torch.dtype, kind: str = "fp8", activations: int = 16) -> Iterator[Case]:
    types = torch.float8_e4m3fn, torch.float8_e5m2
    sizes = (1, 48, 77), (3, 256, 140), (33, 300, 129)
    for what, x, bias, inputs, outputs in _products(dtype, *sizes):
        for of, group in ((types[0], 0), (types[0], 16), (types[1], 128), (types[1], 0)):
            values, fmt = (
                randn(outputs, inputs, dtype=torch.float32).to(of),
                WeightFormat(kind, 8, activations, group, dtype=of),
            )
            weight = Matrix(values, _scales(outputs, fmt.groups(inputs)), format=fmt)
            yield f"{what}, {of}, groups of {group}", (x, weight, bias, (outputs,))


def linear_fp8a8(dtype: torch.dtype) -> Iterator[Case]:
    for what, (x, weight, bias, outputs) in linear_fp8(dtype, "fp8a8", 8):
        yield what, (_away_from_fp8_ties(x, weight.format.group, weight.values.dtype), weight, bias, outputs)


def _away_from_fp8_ties(x: Tensor, block: int, kind: torch.dtype) -> Tensor:
    return away_from_ties(x, block, torch.finfo(kind).max, lambda v: v.to(kind).float())


def linear_table4(dtype: torch.dtype) -> Iterator[Case]:
    """Tables of whole and half numbers (e2m1, signs and all), and of any."""
    e2m1 = tuple(sign * each for sign in (1.0, -1.0) for each in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    for what, x, bias, inputs, outputs in _products(dtype, (1, 48, 77), (33, 48, 77), (16, 384, 40)):
        for groups, table in ((3, e2m1), (inputs // 16, tuple(randn(16, dtype=torch.float32).tolist()))):
            values, fmt = _int8(outputs, inputs // 2), WeightFormat("table4", 4, 16, inputs // groups, codebook=table)
            weight = Matrix(values.view(torch.uint8), _scales(outputs, groups), format=fmt)
            yield f"{what}, {groups} groups", (x, weight, bias, (outputs,))


def linear_table8(dtype: torch.dtype) -> Iterator[Case]:
    table = tuple(randn(64, dtype=torch.float32).tolist())
    for what, x, bias, inputs, outputs in _products(dtype, (1, 48, 77), (16, 384, 40)):
        values, fmt = _int8(outputs, inputs).view(torch.uint8) & 63, WeightFormat("table8", 8, 16, 16, codebook=table)
        yield what, (x, Matrix(values, _scales(outputs, inputs // 16), format=fmt), bias, (outputs,))


def linear_w8a8(dtype: torch.dtype) -> Iterator[Case]:
    fmt = WeightFormat("w8a8", 8, 8)
    for what, x, bias, inputs, outputs in _products(dtype, (1, 1, 1), (1, 48, 77), (33, 48, 77), (16, 1100, 40)):
        x[len(x) // 2] *= 0.0 if len(x) == 33 else 30.0  # a token of zeros; one of large numbers
        x = away_from_ties(x, 0, 127.0, torch.round)
        weight = Matrix(_int8(outputs, inputs), _scales(outputs, 1) / 16, format=fmt)
        yield what, (x, weight, bias, (outputs,))
    x, long = long_sums(dtype)
    yield "sums beyond 2**24", (x, Matrix(long.to(torch.int8), torch.ones(1, 1), format=fmt), None, (1,))


def long_sums(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and weight [1, 4003], whole numbers; their product is 1. On the way the sum passes 2**24, above which a float32
    holds no odd number."""
    x, weight = torch.full((1, 4003), 127.0, dtype=dtype), torch.full((1, 4003), 127.0, dtype=dtype)
    weight[0, 2001:4002] = -127
    x[0, -1] = weight[0, -1] = 1
    return x, weight


def linear_w4a8(dtype: torch.dtype) -> Iterator[Case]:
    for what, x, bias, inputs, outputs in _products(dtype, (1, 48, 77), (33, 48, 77), (16, 384, 40)):
        for groups in (1, 3, inputs // 16):
            values, fmt = _int8(outputs, inputs // 2).view(torch.uint8), WeightFormat("w4a8", 4, 8, inputs // groups)
            even = away_from_ties(x, inputs // groups, 127.0, torch.round)
            weight = Matrix(values, _scales(outputs, groups), format=fmt)
            yield f"{what}, {groups} groups", (even, weight, bias, (outputs,))


def away_from_ties(x: Tensor, block: int, largest: float, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """x with 0 for what lies so near the middle of two quantized values that one rounding of float32 decides."""
    x = x.clone()
    for piece in x.split(block or x.shape[1], dim=1):
        exact = piece.double()
        exact *= largest / exact.abs().amax(1, keepdim=True).clamp(min=1e-12)
        piece[rounded(exact * (1 - 1e-5)) != rounded(exact * (1 + 1e-5))] = 0
    return x


def _scales(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.float32).abs() * 0.02 + 0.003


def _int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.int8)


def quantized_experts(dtype: torch.dtype) -> Iterator[Case]:
    """gate_up by 8 bits, down by 4, in groups of 16."""
    for tokens, num, hidden, inner, k in ((1, 4, 32, 48, 1), (7, 6, 64, 16, 2), (33, 3, 32, 32, 3)):
        x, seed = randn(tokens, hidden, dtype=dtype), torch.Generator().manual_seed(tokens)
        eight, four = WeightFormat("int8", 8, 16, 16), WeightFormat("int4", 4, 16, 16)
        scales = _scales(num, 2 * inner, hidden // 16) / 16, _scales(num, hidden, inner // 16)
        gate_up = Matrix(_int8(num, 2 * inner, hidden), scales[0], format=eight)
        down = Matrix(_int8(num, hidden, inner // 2).view(torch.uint8), scales[1], format=four)
        ids = torch.rand(tokens, num, generator=seed).argsort(-1)[:, :k].to(torch.int32)
        weights = torch.rand(tokens, k, generator=seed).softmax(-1)
        for what, chosen in (
            ("", ids),
            (", one for all", ids * 0),
            (", some on another rank", ids * 2 - 2),
            (", all on another rank", ids * 0 - 1),
        ):
            yield f"{tokens} tokens, {k} of {num}{what}", (x, gate_up, down, weights, chosen, "silu")


def quantized_embedding(dtype: torch.dtype) -> Iterator[Case]:
    """Rows of whole tables, and of a part that begins further on: what is not in it gives zeros."""
    ids = torch.tensor([0, 76, 63, 3, 64, 3, 39], dtype=torch.int32)
    for op, take in (("int8", 1), ("int4", 0), ("int4", 3), ("fp8", 1), ("w4a8", 1), ("table4", 0)):
        what, (_, weight, *_) = list(PRODUCTS[f"linear:{op}"](dtype))[take]
        yield f"{op}, {what}", (ids, weight, 0, (len(weight.values), width_of(weight)), dtype)
        yield f"{op}, {what}, from 60", (ids, weight, 60, (len(weight.values), width_of(weight)), dtype)


def width_of(weight: Matrix) -> int:
    """Inputs of a canonical matrix."""
    return weight.values.shape[1] * 8 // weight.format.bits


PRODUCTS: dict[str, Cases] = {
    "quantized_embedding": quantized_embedding,
    "quantized_experts": quantized_experts,
    "linear:fp8": linear_fp8,
    "linear:fp8a8": linear_fp8a8,
    "linear:int4": linear_int4,
    "linear:int8": linear_int8,
    "linear:table4": linear_table4,
    "linear:table8": linear_table8,
    "linear:w4a8": linear_w4a8,
    "linear:w8a8": linear_w8a8,
}
