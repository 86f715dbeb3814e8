"""AWQ (Lin et al. 2023) as AutoAWQ's "gemv" and "gemv_fast" layouts have it, and llm-awq: 4 bits, packed by inputs.

Scales and zero points stand in rows that are padded for the kernels. In "gemv" qweight int32 [N, K / 8] and qzeros
int32 [N, W] hold eight numbers a word, from the lowest, and scales are [N, 8 W]. In "gemv_fast" qweight int16
[N / 4, K] holds four outputs of 64 inputs, which are shuffled 32 at a time, and scales and zero points are [8 W, N]: a
value stands for value * scale + zero point, which was scaled already, and rounded to float16.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.weights import FLOATS, CheckpointSlice, Matrix, ShardRange, StoredTensor, WeightFormat
from quintet.layers.quantization.group_scales import dequantized_shard, regroup, shard_format
from quintet.layers.quantization.int32_packing import pack_nibbles, unpack_columns
from quintet.ops.quantized import MIDDLE

PACKED = 8  # numbers in a word
ROWS, RUN, SHUFFLED = 4, 64, 32  # outputs and inputs that gemv_fast interleaves; inputs that it shuffles
GROUPS = (32, 64)  # and those of 128 and more


def width(inputs: int, group: int) -> int:
    """W: words of a row of zero points, groups of 64 and 32 being padded to 2 and 4 of them."""
    least = max(1, 128 // group)
    words = -(-(inputs // group) // PACKED)
    return -(-words // least) * least


@dataclass(frozen=True)
class Gemv:
    """Reads one checkpoint's."""

    group: int

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        outputs, inputs = _sizes(part, self.group, 1, PACKED)
        name, wide = part.source.removesuffix("weight"), width(inputs, self.group)
        return {
            f"{name}qweight": StoredTensor((outputs, inputs // PACKED), (torch.int32,)),
            f"{name}qzeros": StoredTensor((outputs, wide), (torch.int32,)),
            f"{name}scales": StoredTensor((outputs, wide * PACKED), FLOATS),
        }

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(WeightFormat("int4", 4, 16, self.group, zeros=True), shard)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        name, fmt, outputs = part.source.removesuffix("weight"), self.format(shard), slice(*shard.outputs)
        first, last = shard.inputs
        start, groups = first // PACKED, part.shape[1] // self.group
        packed = tensors[f"{name}qweight"][outputs, start : -(-last // PACKED)].contiguous().view(torch.uint8)
        values = packed[:, first // 2 - 4 * start : last // 2 - 4 * start].contiguous()
        zeros = unpack_columns(tensors[f"{name}qzeros"][outputs].t(), 4, (0, groups)).t()
        scales = tensors[f"{name}scales"][outputs, :groups].float()
        scales, zeros = (regroup(each, self.group, fmt.group, shard.inputs) for each in (scales, zeros))
        return Matrix(values, scales, zeros, format=fmt)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized_shard(self, self.group, part, shard, tensors)


@dataclass(frozen=True)
class GemvFast:
    """Reads one checkpoint's."""

    group: int
    zeros: str = "qzeros"  # llm-awq's name for them: scaled_zeros

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        outputs, inputs = _sizes(part, self.group, ROWS, RUN)
        name, wide = part.source.removesuffix("weight"), width(inputs, self.group) * PACKED
        return {
            f"{name}qweight": StoredTensor((outputs // ROWS, inputs), (torch.int16,)),
            f"{name}{self.zeros}": StoredTensor((wide, outputs), FLOATS),
            f"{name}scales": StoredTensor((wide, outputs), FLOATS),
        }

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(WeightFormat("int4", 4, 16, self.group, mins=True), shard)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        name, fmt, groups = part.source.removesuffix("weight"), self.format(shard), part.shape[1] // self.group
        first, last = shard.outputs
        start = first // ROWS
        known = _unpack(tensors[f"{name}qweight"][start : -(-last // ROWS)])[first - start * ROWS : last - start * ROWS]
        scales, zeros = (
            regroup(tensors[f"{name}{end}"][:groups, first:last].t().float(), self.group, fmt.group, shard.inputs)
            for end in ("scales", self.zeros)
        )
        return Matrix(pack_nibbles(known[:, slice(*shard.inputs)]), scales, format=fmt, mins=zeros + MIDDLE * scales)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized_shard(self, self.group, part, shard, tensors)


def _sizes(part: CheckpointSlice, group: int, rows: int, columns: int) -> tuple[int, int]:
    outputs, inputs = part.shape if part.total is None else (part.total, part.shape[1])
    if part.transposed or outputs % rows or inputs % columns or inputs % group:
        raise ValueError(
            f"{part.source.removesuffix('.weight')} [{outputs}, {inputs}] does not divide into AWQ's {rows} outputs, "
            f"{columns} inputs and groups of {group}; correct config.json, or fetch the model anew"
        )
    return outputs, inputs


def _unpack(packed: Tensor) -> Tensor:
    """int16 [N / 4, K] -> uint8 [N, K]."""
    rows, inputs = packed.shape
    four = (packed[:, :, None] >> 4 * torch.arange(4, dtype=torch.int16) & 15).to(torch.uint8)
    shuffled = four.reshape(rows, inputs // RUN, ROWS, RUN).transpose(1, 2).reshape(rows * ROWS, -1, SHUFFLED)
    pairs = shuffled.reshape(len(shuffled), -1, 4, 2, 4).transpose(-1, -2)  # the even and the odd ones of eight
    return pairs.transpose(2, 3).reshape(-1, inputs)
