"""Four bits in int32 as Quark writes them, in its order and in plain order, signed and with zero points."""

import pytest
import torch
from torch import Tensor

from quintet.interface.weights import CheckpointSlice, ShardRange
from quintet.layers.quantization.formats.quark_int4 import QuarkInt4

OUTPUTS, INPUTS, GROUP = 16, 24, 8
QUARK = (0, 2, 4, 6, 1, 3, 5, 7)  # the number in the lowest 4 bits, in the next ..
PART = CheckpointSlice("a.weight", (OUTPUTS, INPUTS), ((0, OUTPUTS),))


def packed(numbers: Tensor, order: tuple[int, ...]) -> Tensor:
    """[M, 8 W] of 0 to 15 -> int32 [M, W]."""
    eights = numbers.long().view(len(numbers), -1, 8)
    words = sum(eights[:, :, number] << 4 * place for place, number in enumerate(order))
    return torch.as_tensor(words).to(torch.int32)


def unpacked(values: Tensor) -> Tensor:
    """Canonical uint8 [N, K / 2], the lower 4 bits first -> [N, K]."""
    return torch.stack([values & 15, values >> 4], -1).flatten(1)


@pytest.mark.parametrize("cut", [ShardRange((0, OUTPUTS), (0, INPUTS)), ShardRange((3, 9), (8, 24))])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("group", "order"), [(GROUP, QUARK), (GROUP, tuple(range(8))), (0, QUARK)])
def test_numbers_scales_and_zero_points_are_read(cut: ShardRange, signed: bool, group: int, order: tuple) -> None:
    if not group and cut.inputs != (0, INPUTS):
        pytest.skip("without groups this is another cut of the same scales")
    reader = QuarkInt4(group, signed, order == QUARK)
    count = INPUTS // group if group else 1
    numbers, zeros = torch.randint(16, (OUTPUTS, INPUTS)), torch.randint(16, (count, OUTPUTS))
    scales = torch.rand(count, OUTPUTS)
    tensors = {"a.weight": packed(numbers.T if group else numbers, order), "a.weight_scale": scales}
    if not signed:
        tensors["a.weight_zero_point"] = packed(zeros, order)
    if not group:
        tensors = {name: tensor if name == "a.weight" else tensor[0] for name, tensor in tensors.items()}
    stored = reader.stored(PART)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {n: s.shape for n, s in stored.items()}
    matrix = reader.matrix(PART, cut, tensors)
    rows, columns = slice(*cut.outputs), slice(*cut.inputs)
    groups = slice(cut.inputs[0] // GROUP, cut.inputs[1] // GROUP) if group else slice(None)
    assert torch.equal(unpacked(matrix.values), (numbers ^ 8 if signed else numbers)[rows, columns].to(torch.uint8))
    assert matrix.scales is not None and torch.equal(matrix.scales, scales.T[rows, groups])
    if not signed:
        assert matrix.zeros is not None and torch.equal(matrix.zeros, zeros.T[rows, groups].to(matrix.zeros.dtype))


@pytest.mark.parametrize("shape", [(12, 24), (16, 20)])
def test_numbers_that_fill_no_whole_words_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="does not divide into eights, and groups of"):
        QuarkInt4(0, False).stored(CheckpointSlice("a.weight", shape, ((0, shape[0]),)))
