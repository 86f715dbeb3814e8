"""GGUF's blocks, unpacked and laid by the extension: the reader's numbers bit for bit, and products with them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quintet.interface.weights import CheckpointSlice, Matrix, ShardRange, Weight, WeightFormat
from quintet.layers.quantization.formats.gguf import BlockWeights
from quintet.ops.embedding import quantized_embedding
from quintet.ops.linear import linear
from quintet.ops.moe import quantized_experts
from quintet.ops.quantize import canonical
from quintet.ops.quantized import dequantized, fake_quantized_activations
from quintet.platforms.cpu import gguf_weights as blocks
from quintet.platforms.cpu import weight_layout as tiles
from quintet.platforms.cpu.ops import quantized, quantized_moe

if reason := blocks.missing("lay_blocks"):
    pytest.skip(reason, allow_module_level=True)

from quintet import _cpu

FILE = load_file(Path(__file__).parents[2] / "data" / "quantized" / "gguf" / "types.safetensors")
OUTPUTS, INPUTS = 150, FILE["Q8_0.floats"].shape[1]  # two blocks of tiles and a part of one
BOTH = (8, 16)  # bits of activations
EXPERTS = 3

each_type = pytest.mark.parametrize("name", _cpu.BLOCKS)
each_laid = pytest.mark.parametrize("name", tiles.LAID)


def rows_of(name: str, outputs: int = OUTPUTS) -> Tensor:
    """Those of the file in turn, each begun with a stretch of the next."""
    rows = FILE[name]
    mixed = torch.cat([rows[:, : rows.shape[1] // 2], rows.roll(1, 0)[:, rows.shape[1] // 2 :]], 1)
    return torch.cat([rows, mixed]).repeat(-(-outputs // (2 * len(rows))), 1)[:outputs].contiguous()


def weight_of(name: str, activations: int = 16, parts: int = 1, stack: int = 0) -> Weight:
    reader, each = BlockWeights(name), OUTPUTS // parts
    made = tuple(CheckpointSlice(f"{i}", (each, INPUTS), ((0, each),)) for i in range(parts * (stack or 1)))
    fmt = reader.format(ShardRange((0, each), (0, INPUTS))).with_activations(activations)
    return Weight("weight", made, 0, 0, torch.bfloat16, "linear", fmt, reader, stack=stack)


def tensors_of(weight: Weight, name: str) -> dict[str, Tensor]:
    each = weight.slices[0].shape[0]
    whole = rows_of(name, each * len(weight.slices))
    return {part.source: whole[i * each : (i + 1) * each] for i, part in enumerate(weight.slices)}


def as_held(weight: Weight, found: dict[str, Tensor]) -> Matrix:
    return Matrix(found["weight"], found["scales"], found.get("zeros"), None, weight.format, found.get("mins"))


@each_type
def test_unpacked_is_what_the_reader_makes_of_them(name: str) -> None:
    weight = weight_of(name, parts=2)
    got = blocks.canonical(weight, tensors_of(weight, name))
    want = canonical(weight, tensors_of(weight, name))
    assert got.format == want.format and got.input_order is None
    for mine, readers in ((got.values, want.values), (got.scales, want.scales), (got.mins, want.mins)):
        assert (mine is None) == (readers is None)
        assert mine is None or readers is None or (mine.dtype == readers.dtype and torch.equal(mine, readers))
    assert (got.zeros is None) == (want.zeros is None)


@pytest.mark.parametrize("activations", BOTH)
@each_type
def test_packing_by_stretches_gives_the_same_bytes(
    name: str, activations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "STRETCH", tiles.COLUMNS * INPUTS)  # one block at a time
    weight = weight_of(name, activations, parts=3)  # which begin within a block
    got = blocks.pack_by_stretches(weight, tensors_of(weight, name))
    assert (got is None) == (weight.format.mins or name in tiles.LAID)
    if got is not None:
        want = tiles.pack(blocks.canonical(weight, tensors_of(weight, name)))
        assert got.keys() == want.keys() and all(torch.equal(got[part], want[part]) for part in want)


@each_laid
def test_laid_stands_for_what_the_file_says(name: str) -> None:
    weight = weight_of(name, parts=3)
    found = blocks.pack(weight, tensors_of(weight, name))
    want = dequantized(canonical(weight, tensors_of(weight, name)))
    got = tiles.unpack(found, OUTPUTS, INPUTS, weight.format)
    assert torch.allclose(got, want, rtol=0, atol=float(want.abs().max()) * 2**-22)  # minima are added in one rounding
    assert sum(each.nbytes for each in found.values()) == tiles.packed_bytes((OUTPUTS, INPUTS), weight.format)


@each_laid
def test_rows_are_looked_up_where_products_read(name: str) -> None:
    """Bit for bit what stands there, whatever bits activations have."""
    ids, shape = torch.tensor([0, 149, 63, 64, 17, 150], dtype=torch.int32), (OUTPUTS, INPUTS)
    for activations in BOTH:
        weight = weight_of(name, activations)
        found = blocks.pack(weight, tensors_of(weight, name))
        known = tiles.unpack(found, *shape, weight.format)[ids[:5].long()]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            got = quantized_embedding.providers["native"](ids, as_held(weight, found), 0, shape, dtype)
            assert torch.equal(got[:5], known.to(dtype)) and not got[5].any()


def test_bits_of_laid_blocks_are_their_own_and_few_more() -> None:
    bits = {name: tiles.packed_bytes((192, 2048), weight_of(name).format) * 8 / (192 * 2048) for name in tiles.LAID}
    assert bits == {"Q2_K": 5.125, "Q3_K": 4.5625, "Q4_K": 4.625, "Q5_K": 6.625, "Q6_K": 6.5625, "Q5_0": 5.5}


@pytest.mark.parametrize("activations", BOTH)
@each_laid
def test_products_are_the_specifications_and_a_row_has_its_bits_anywhere(isa: str, name: str, activations: int) -> None:
    weight = weight_of(name, activations)
    tensors = tensors_of(weight, name)
    held, matrix = as_held(weight, blocks.pack(weight, tensors)), canonical(weight, tensors)
    x = torch.randn(70, INPUTS, generator=torch.Generator().manual_seed(7))
    known = fake_quantized_activations(x, matrix) if activations == 8 else x
    native = linear.kinds[weight.format.kind].providers["native"]
    got, want = native(x, held, None, (OUTPUTS,)), known @ dequantized(matrix).T
    assert torch.allclose(got, want, rtol=0, atol=float(want.abs().max()) * (1e-5 if activations == 8 else 2e-4))
    for count in (*range(1, 9), 19):
        assert torch.equal(native(x[:count], held, None, (OUTPUTS,)), got[:count])


@each_laid
def test_instruction_sets_give_the_same_bits(isas: Iterator[str], name: str) -> None:
    weight = weight_of(name, 8)
    held = as_held(weight, blocks.pack(weight, tensors_of(weight, name)))
    x = torch.randn(9, INPUTS, generator=torch.Generator().manual_seed(4)).bfloat16()
    native = linear.kinds[weight.format.kind].providers["native"]
    first, *others = (native(x, held, None, (OUTPUTS,)) for _ in isas)
    assert all(torch.equal(each, first) for each in others) and bool(first.any())


@pytest.mark.parametrize("activations", BOTH)
def test_five_bits_give_the_bits_of_eight(isa: str, activations: int) -> None:
    """Those of the same numbers, held in 8 bits."""
    weight = weight_of("Q5_0", activations)
    tensors = tensors_of(weight, "Q5_0")
    held, matrix = as_held(weight, blocks.pack(weight, tensors)), canonical(weight, tensors)
    wide = replace(weight.format, block_type="")
    other = tiles.pack(matrix._replace(format=wide))
    x = torch.randn(31, INPUTS, generator=torch.Generator().manual_seed(6))
    native = linear.kinds[weight.format.kind].providers["native"]
    want = native(x, Matrix(other["weight"], other["scales"], format=wide), None, (OUTPUTS,))
    for count in (1, 2, 3, 4, 5, 16, 31):
        assert torch.equal(native(x[:count], held, None, (OUTPUTS,)), want[:count])


def largest_weight(name: str) -> tuple[WeightFormat, dict[str, Tensor]]:
    if name == "w4a8 of 128":
        fmt = WeightFormat("w4a8", 4, 8, 128)
        return fmt, quantized.pack(torch.ones(OUTPUTS, INPUTS), fmt)
    weight = weight_of(name, 8)
    pack = blocks.pack if name in tiles.LAID else blocks.pack_by_stretches
    found = pack(weight, tensors_of(weight, name))
    assert found is not None
    return weight.format, found


@pytest.mark.parametrize("name", [*tiles.LAID, "Q4_0", "Q8_0", "w4a8 of 128"])
def test_sums_of_the_largest_numbers_are_exact(isa: str, name: str) -> None:
    """Some instruction sets add products of bytes in 16 bits first: these are the largest that there are."""
    fmt, found = largest_weight(name)
    signs = torch.tensor([[1, 1, 1, 1], [-1, -1, -1, -1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    x = signs.repeat(1, INPUTS // 4).float()  # 127 of 127, all of them
    for byte in (0x00, 0xFF, 0x0F, 0xF0):
        found["weight"].fill_(byte)
        known = tiles.unpack(found, OUTPUTS, INPUTS, fmt)
        held = Matrix(found["weight"], found["scales"], None, None, fmt, found.get("mins"))
        got = linear.kinds[fmt.kind].providers["native"](x, held, None, (OUTPUTS,))
        assert ((got - x @ known.T).abs() <= 1e-5 * (x.abs() @ known.abs().T)).all()


@each_laid
def test_scales_that_are_not_finite_are_refused(name: str) -> None:
    weight = weight_of(name)
    tensors = tensors_of(weight, name)
    at = {"Q2_K": 80, "Q3_K": 108, "Q4_K": 0, "Q5_K": 0, "Q6_K": 208, "Q5_0": 0}[name]
    tensors["0"][-1, at : at + 2] = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(ValueError, match="not finite"):
        blocks.pack(weight, tensors)


@each_laid
def test_tensors_of_fewer_rows_or_blocks_than_the_weight_has_are_refused(name: str) -> None:
    """What lies behind them is another's memory."""
    weight = weight_of(name)
    whole = tensors_of(weight, name)["0"]
    for short in (whole[:-1], whole[:1], whole[:, : whole.shape[1] // 2], whole[:, : whole.shape[1] // 2].contiguous()):
        with pytest.raises(ValueError, match="rows"):
            blocks.pack(weight, {"0": short})


def stack_of(name: str, outputs: int, inputs: int, parts: int) -> tuple[Matrix, Matrix]:
    """Of EXPERTS, as placed, and canonical."""
    each, reader = outputs // parts, BlockWeights(name)
    made = tuple(CheckpointSlice(f"{i}", (each, inputs), ((0, each),)) for i in range(parts * EXPERTS))
    fmt = reader.format(ShardRange((0, each), (0, inputs))).with_activations(8)
    weight = Weight("it", made, 0, 0, torch.bfloat16, "experts", fmt, reader, stack=EXPERTS)
    rows = rows_of(name, outputs * EXPERTS)[:, : FILE[name].shape[1] * inputs // INPUTS]
    tensors = {part.source: rows[i * each : (i + 1) * each] for i, part in enumerate(made)}
    found, whole = quantized_moe.pack(weight, tensors), canonical(weight, tensors)
    held = Matrix(found["it"], found["it_scales"], found.get("it_zeros"), None, fmt, found.get("it_mins"))
    values, scales, zeros, mins = (
        None if x is None else x.view(EXPERTS, outputs, -1)
        for x in (whole.values, whole.scales, whole.zeros, whole.mins)
    )
    assert values is not None
    return held, Matrix(values, scales, zeros, None, fmt, mins)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q4_0", "Q5_0"])
def test_experts_are_the_specifications(isa: str, name: str) -> None:
    (gate_up, first), (down, second) = stack_of(name, 512, 256, 2), stack_of(name, 256, 256, 1)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(11, 256, generator=generator)
    ids = torch.rand(11, EXPERTS, generator=generator).argsort(-1)[:, :2].to(torch.int32)
    weights = torch.rand(11, 2, generator=generator)
    got = quantized_experts.providers["native"](x, gate_up, down, weights, ids, "silu")
    want = quantized_experts.reference(x, first, second, weights, ids, "silu")
    assert (got - want).norm() <= 2e-2 * want.norm()
