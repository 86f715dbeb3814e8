"""Rows that are looked up in packed weights: what products read there, rounded once; a tied head has no copy."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from quintet.conformance.cases.published_formats import FORMS
from quintet.conformance.harness.linear_layers import CanonicalReader
from quintet.interface.weights import CheckpointSlice, Matrix, Weight, WeightFormat
from quintet.ops.embedding import embedding, quantized_embedding
from quintet.ops.quantize import attributes
from quintet.ops.quantized import dequantized
from quintet.platforms.cpu import PLATFORM
from quintet.platforms.cpu import weight_layout as tiles
from quintet.platforms.cpu.ops import linear, quantized
from quintet.platforms.cpu.ops import quantized_embedding as quantized_rows
from quintet.platforms.cpu.ops.quantized_moe import packer_of

if reason := quantized_rows.probe():
    pytest.skip(reason, allow_module_level=True)

TYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = torch.tensor([0, 199, 64, 63, 7, 64, 40, 16, 111], dtype=torch.int32)
SHAPE = 200, 384
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def look_up(matrix: Matrix, dtype: torch.dtype, ids: Tensor = IDS, first: int = 0) -> Tensor:
    got: Tensor = quantized_embedding.providers["native"](ids, matrix, first, SHAPE, dtype)
    return got


def held(packed: Mapping[str, Tensor], fmt: WeightFormat) -> Matrix:
    beside = packed.get("zeros"), packed.get("order"), fmt, packed.get("mins")
    return Matrix(packed["weight"], packed["scales"], *beside)


@each_type
@pytest.mark.parametrize("what", [what for what, fmt in FORMS.items() if fmt.kind != "fp8a8"])
def test_rows_are_the_dequantized_ones_bit_for_bit(what: str, dtype: torch.dtype) -> None:
    """Where float16 holds the scales. Tables that are no whole multiples of a step are held to a 127th."""
    matrix = CanonicalReader(FORMS[what]).random_matrix(*SHAPE)
    got, want = (
        look_up(held(packer_of(matrix.format).pack(matrix), matrix.format), dtype),
        dequantized(matrix)[IDS.long()],
    )
    if any(8 * each % 1 for each in matrix.format.codebook):
        assert matrix.scales is not None
        off = (got.float() - want).abs().reshape(len(IDS), -1, matrix.format.group)
        assert (off <= matrix.scales[IDS.long(), :, None] / 64).all()
    else:
        assert torch.equal(got, want.to(dtype))
    assert torch.equal(look_up(matrix, dtype), want.to(dtype)), "as it was not packed"


@each_type
@pytest.mark.parametrize(
    "what", ["Q8_0, Q6_K", "Q4_1, Q4_K", "W8A8, Quark INT8, torchao int8 with dynamic activations"]
)
def test_rows_are_what_products_read_whatever_float16_makes_of_the_scales(what: str, dtype: torch.dtype) -> None:
    matrix = CanonicalReader(FORMS[what]).random_matrix(*SHAPE)
    assert matrix.scales is not None
    powers = 2.0 ** torch.arange(-100, 100).clamp(-35, 10).reshape(-1, 1) * 1.0009
    mins = None if matrix.mins is None else matrix.mins * powers
    wide = matrix._replace(scales=matrix.scales * powers, mins=mins)
    packed = tiles.pack(wide)
    got, read = look_up(held(packed, wide.format), dtype), tiles.unpack(packed, *SHAPE, wide.format)[IDS.long()]
    assert torch.equal(got, read.to(dtype))
    most = 2**-9 * dequantized(wide)[IDS.long()].abs().amax(1, keepdim=True)
    assert ((look_up(held(packed, wide.format), torch.float32) - dequantized(wide)[IDS.long()]).abs() <= most).all()


def test_ids_that_are_no_rows_give_zeros() -> None:
    ids = torch.tensor([-1, 200, 255, 5, 204, 2**31 - 1, -(2**31)], dtype=torch.int32)
    for fmt in (FORMS["W4A8; Q4_0"], FORMS["FP8 in blocks"]):
        matrix = CanonicalReader(fmt).random_matrix(*SHAPE)
        known = dequantized(matrix)
        for table in (held(packer_of(fmt).pack(matrix), fmt), matrix):
            got = look_up(table, torch.float32, ids)
            assert torch.equal(got[3], known[5]) and not got[[0, 1, 2, 4, 5, 6]].any()
            got = look_up(table, torch.float32, ids, first=5)
            assert torch.equal(got[[3, 4]], known[[0, 199]]) and not got[[0, 2, 5, 6]].any()
            assert torch.equal(got[1], known[195])
        assert look_up(table, torch.bfloat16, ids[:0]).shape == (0, SHAPE[1])


@each_type
def test_rows_of_floats_that_were_quantized_while_they_were_loaded(dtype: torch.dtype) -> None:
    weight, fmt = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)), WeightFormat("w8a8", 8, 8)
    packed = quantized.pack(weight, fmt)
    assert torch.equal(look_up(held(packed, fmt), dtype), tiles.unpack(packed, *SHAPE, fmt).to(dtype)[IDS.long()])


@each_type
def test_rows_of_a_plain_packed_weight_are_the_weights(dtype: torch.dtype) -> None:
    for inputs in (384, 33):
        weight = torch.randn(200, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
        packed = linear.pack(weight)
        assert torch.equal(quantized_rows.plain_rows(packed, IDS, (200, inputs)), weight[IDS.long()])
    got = embedding.providers["native"](IDS, linear.pack(weight[:, :32].contiguous()), 0, False)
    assert torch.equal(got, weight[IDS.long(), :32])


def test_what_does_not_fit_is_refused() -> None:
    fmt = FORMS["W4A8; Q4_0"]
    table = held(tiles.pack(CanonicalReader(fmt).random_matrix(*SHAPE)), fmt)
    for matrix, ids, dtype, message in (
        (table._replace(values=table.values[:2]), IDS, torch.float32, "is not"),
        (table._replace(scales=None if table.scales is None else table.scales.float()), IDS, torch.float32, "is not"),
        (table._replace(format=FORMS["Q8_0, Q6_K"]), IDS, torch.float32, "is not"),
        (table, IDS.long(), torch.float32, "int32"),
        (table, IDS, torch.float64, "float64"),
    ):
        with pytest.raises(ValueError, match=message):
            look_up(matrix, dtype, ids)
    with pytest.raises(ValueError, match="no 300 rows"):
        quantized_rows.plain_rows(linear.pack(torch.ones(200, 4)), IDS, (300, 4))


@pytest.mark.parametrize("what", ["Q8_0, Q6_K", "Q4_1, Q4_K", "FP8 in blocks", "NVFP4"])
def test_a_tied_head_and_its_table_are_placed_once(what: str) -> None:
    reader = CanonicalReader(FORMS[what])
    matrix, platform = reader.random_matrix(*SHAPE), PLATFORM()
    parts = {"w" if name == "weight" else f"w.{name}": x for name, x in attributes(matrix).items()}
    of = (CheckpointSlice("w", SHAPE, ((0, SHAPE[0]),)),), 0, 0, torch.bfloat16
    both = [Weight("weight", *of, use, matrix.format, reader, shared=True) for use in ("embedding", "linear")]
    first, second = (platform.place(weight, parts) for weight in both)
    assert {name: each.data_ptr() for name, each in first.items()} == {n: each.data_ptr() for n, each in second.items()}
    alone = platform.place(Weight("weight", *of, "linear", matrix.format, reader), parts)
    assert all(torch.equal(each.view(torch.uint8), alone[name].view(torch.uint8)) for name, each in first.items())
    other = platform.place(both[0], {name: x.clone() for name, x in parts.items()})
    assert other["weight"].data_ptr() != first["weight"].data_ptr(), "another checkpoint's"
