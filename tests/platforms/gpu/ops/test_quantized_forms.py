"""Minima, tables, orders and small groups by Triton: what checkpoints hold is multiplied as it lies."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import quintet.platforms.gpu.ops.quantized  # noqa: F401  registers its providers
from quintet.conformance.cases.linear import away_from_ties
from quintet.conformance.cases.published_formats import FORMS
from quintet.conformance.harness.linear_layers import CanonicalReader
from quintet.interface.weights import Matrix, WeightFormat
from quintet.layers.quantization.formats.bitsandbytes import NF4
from quintet.layers.quantization.fp4_fp8 import E2M1, E2M3
from quintet.ops.linear import linear
from quintet.ops.quantize import attributes
from quintet.ops.registry import of_kind
from quintet.platforms.gpu.weight_layout import matrix_packed_bytes, pack_matrix
from tests.helpers.platforms.triton import DTYPES, needs_triton, randn, triton_op
from tests.platforms.gpu.ops.test_quantized import assert_close

DEVICE = needs_triton()
ANY = tuple(randn(16).tolist())
OTHERS = {
    "int4 of 16 with minima": WeightFormat("int4", 4, 16, 16, mins=True),
    "int4 of 64, zero points and minima": WeightFormat("int4", 4, 16, 64, zeros=True, mins=True),
    "int4 of 128 with minima": WeightFormat("int4", 4, 16, 128, mins=True),
    "int4 with one minimum": WeightFormat("int4", 4, 16, 0, mins=True),
    "int8 with one minimum": WeightFormat("int8", 8, 16, 0, mins=True),
    "int8 of 128 with minima": WeightFormat("int8", 8, 16, 128, mins=True),
    "int4 of 128, in an order with minima": WeightFormat("int4", 4, 16, 128, act_order=True, mins=True),
    "w4a8 in an order": WeightFormat("w4a8", 4, 8, 32, act_order=True),
    "w4a8 of 16 with minima": WeightFormat("w4a8", 4, 8, 16, mins=True),
    "w4a8 of 128 with zero points": WeightFormat("w4a8", 4, 8, 128, zeros=True),
    "w8a8 of 16": WeightFormat("w8a8", 8, 8, 16),
    "w8a8 of 16 with minima": WeightFormat("w8a8", 8, 8, 16, mins=True),
    "w8a8 of 128": WeightFormat("w8a8", 8, 8, 128),
    "table4 of 128": WeightFormat("table4", 4, 16, 128, codebook=ANY),
    "table4 of one": WeightFormat("table4", 4, 16, 0, codebook=NF4),
    "table4 in an order": WeightFormat("table4", 4, 16, 32, codebook=E2M1, act_order=True),
    "table4 of 16 at 8 bits": WeightFormat("table4", 4, 8, 16, codebook=ANY),
    "table8 of 16": WeightFormat("table8", 8, 16, 16, codebook=E2M3),
    "table8 at 8 bits": WeightFormat("table8", 8, 8, 32, codebook=E2M3),
}
SHAPES = ((5, 256), (70, 384))  # outputs, inputs: part of a tile; more than one
TOKENS = (1, 18)


def case(fmt: WeightFormat, outputs: int, inputs: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Matrix]:
    """Activations, of which none decides by a rounding of its own, and any matrix of the form."""
    matrix = CanonicalReader(fmt).random_matrix(outputs, inputs)
    x = randn(tokens, inputs, dtype=dtype)
    if fmt.activations == 8 and fmt.dtype is None:
        order = torch.arange(inputs) if matrix.input_order is None else matrix.input_order.long()
        x[:, order] = away_from_ties(x[:, order], matrix.format.group, 127.0, torch.round)
    return x, matrix


def multiplied(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """By our kernel, with the weight as place() lays it."""
    placed = pack_matrix(attributes(matrix), matrix.format)
    assert sum(each.nbytes for each in placed.values()) == matrix_packed_bytes(
        (len(matrix.values), x.shape[1]), matrix.format
    )
    weight = Matrix(placed["weight"], *map(placed.get, ("scales", "zeros", "order")), matrix.format, placed.get("mins"))
    found: Tensor = triton_op(of_kind("linear", matrix.format.kind), DEVICE)(x, weight, bias, (len(matrix.values),))
    return found


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the reference would step in, this fails."""
    monkeypatch.setattr(linear, "reference", lambda *_: pytest.fail("the reference served"))


def wanted(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    reference = linear.kinds[matrix.format.kind].reference
    found: Tensor = reference(x.float(), matrix, None if bias is None else bias.float(), (len(matrix.values),))
    return found


@pytest.mark.grid(cases=10)
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("what", [*FORMS, *OTHERS])
def test_a_form_of_a_checkpoint_is_multiplied_as_it_lies(what: str) -> None:
    """Interpreted, the other types differ in nothing but how they are rounded: one case of them each."""
    fmt = {**FORMS, **OTHERS}[what]
    cases = [(*SHAPES[0], TOKENS[0], torch.float16), (*SHAPES[1], TOKENS[1], torch.float16)]
    cases += [(*SHAPES[0], TOKENS[1], dtype) for dtype in DTYPES if dtype != torch.float16]
    for outputs, inputs, tokens, dtype in cases:
        (x, matrix), bias = case(fmt, outputs, inputs, tokens, dtype), randn(outputs, dtype=dtype)
        assert_close(multiplied(x, matrix, bias), wanted(x, matrix, bias), dtype, f"{outputs}x{inputs}, {tokens}")


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("inputs", [48, 80, 208])
@pytest.mark.parametrize("kind", ["int4", "w4a8", "table4", "int8", "w8a8", "table8"])
def test_rows_that_end_within_a_step(kind: str, inputs: int) -> None:
    table = {"table4": NF4, "table8": E2M3}.get(kind, ())
    fmt = WeightFormat(kind, 4 if "4" in kind else 8, 8 if "a8" in kind else 16, 16, mins=not table, codebook=table)
    x, matrix = case(fmt, 33, inputs, 3, torch.float16)
    assert_close(multiplied(x, matrix), wanted(x, matrix), torch.float16, kind)


def test_groups_that_no_tile_cuts_are_left_to_the_reference() -> None:
    x, matrix = case(WeightFormat("int4", 4, 16, 24, mins=True), 9, 72, 2, torch.float16)
    assert pack_matrix(attributes(matrix), matrix.format)["weight"].shape == (9, 36)
    assert_close(multiplied(x, matrix), wanted(x, matrix), torch.float16, "groups of 24")


def test_minima_beside_scales_of_nothing() -> None:
    """K-quants' blocks of equal numbers: a scale of 0, or the smallest that there is."""
    x, matrix = case(WeightFormat("int4", 4, 16, 32, mins=True), 6, 64, 2, torch.float32)
    assert matrix.scales is not None
    matrix.scales[:2], matrix.scales[2:4] = 0.0, 1e-38
    assert_close(multiplied(x, matrix), wanted(x, matrix), torch.float32, "no scale")


def test_places_past_a_tables_end_are_no_numbers_of_others() -> None:
    """A file may hold any byte."""
    fmt = WeightFormat("table8", 8, 16, 16, codebook=E2M3)
    x, matrix = case(fmt, 4, 32, 1, torch.float32)
    matrix.values[:, ::2] = 255
    full = matrix._replace(format=replace(fmt, codebook=E2M3 + (0.0,) * (256 - len(E2M3))))
    assert_close(multiplied(x, matrix), wanted(x, full), torch.float32, "past the end")


@pytest.mark.parametrize("name", ["int4 of 128, in an order with minima", "w8a8 of 16 with minima", "table4 of 128"])
def test_a_token_alone_is_a_token_in_a_batch(name: str) -> None:
    x, matrix = case(OTHERS[name], 70, 256, 16, torch.float16)
    every = multiplied(x, matrix)
    for token in (0, 15):
        assert torch.equal(multiplied(x[token : token + 1], matrix)[0], every[token])
