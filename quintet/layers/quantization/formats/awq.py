"""AWQ (Lin et al. 2023) as AutoAWQ's "gemm" layout has it: 4 bits, with zero points.

qweight int32 [K, N / 8] holds eight outputs of an input in each number, qzeros int32 [G, N / 8] their zero points
likewise, scales [G, N] floats. The i-th 4 bits of a number, from the lowest, are of its output ORDER[i].
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.weights import FLOATS, CheckpointSlice, Matrix, ShardRange, StoredTensor, WeightFormat
from quintet.layers.quantization.group_scales import dequantized_shard, regroup, shard_format

PACKED = 8  # outputs in an int32
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LOW_BITS = 0x0F0F0F0F  # the low bits of four bytes


@dataclass(frozen=True)
class Awq:
    """Reads one checkpoint's; `group` inputs share a scale and a zero point, 0: all of an output's."""

    group: int

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        outputs, inputs = part.shape if part.total is None else (part.total, part.shape[1])
        name, groups = part.source.removesuffix("weight"), inputs // (self.group or inputs)
        if part.transposed or outputs % PACKED or inputs % (self.group or inputs):
            raise ValueError(
                f"{name[:-1]} [{outputs}, {inputs}] does not divide into AWQ's {PACKED} outputs and {self.group} inputs"
            )
        return {
            f"{name}qweight": StoredTensor((inputs, outputs // PACKED), (torch.int32,)),
            f"{name}qzeros": StoredTensor((groups, outputs // PACKED), (torch.int32,)),
            f"{name}scales": StoredTensor((groups, outputs), FLOATS),
        }

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(WeightFormat("int4", 4, 16, self.group, zeros=True), shard)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        name, fmt = part.source.removesuffix("weight"), self.format(shard)
        first, last = shard.inputs
        values = _nibbles(tensors[f"{name}qweight"][first:last], shard)
        zeros, scales = (
            _outputs(tensors[f"{name}qzeros"], shard).t(),
            tensors[f"{name}scales"][:, slice(*shard.outputs)].t(),
        )
        scales, zeros = (regroup(each, self.group, fmt.group, shard.inputs) for each in (scales.float(), zeros))
        return Matrix(values, scales, zeros, format=fmt)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized_shard(self, self.group, part, shard, tensors)


def _nibbles(packed: Tensor, shard: ShardRange) -> Tensor:
    """int32 [K, N / 8] -> uint8 [outputs of the cut, K / 2], as Matrix has them: whole words at a time."""
    start, stop = shard.outputs
    words = packed[:, start // PACKED : -(-stop // PACKED)].t().contiguous()
    first, second = words[:, ::2], words[:, 1::2]  # inputs
    known = words.new_empty(len(words), PACKED, first.shape[1], dtype=torch.uint8)
    low = first & LOW_BITS | (second & LOW_BITS) << 4  # of each byte of a number: the output in its low bits
    high = first >> 4 & LOW_BITS | second & ~LOW_BITS
    for byte in range(PACKED // 2):
        known[:, ORDER[2 * byte]] = low.view(torch.uint8)[:, byte::4]
        known[:, ORDER[2 * byte + 1]] = high.view(torch.uint8)[:, byte::4]
    return known.flatten(0, 1)[start % PACKED :][: stop - start]


def _outputs(packed: Tensor, shard: ShardRange) -> Tensor:
    """int32 [M, N / 8] -> uint8 [M, outputs of the cut]; only the numbers that hold them are looked at."""
    start, stop = shard.outputs
    words = packed[:, start // PACKED : -(-stop // PACKED)]
    shifts = 4 * torch.tensor(ORDER).argsort().to(torch.int32)
    apart = (words[:, :, None] >> shifts & 15).to(torch.uint8).reshape(len(words), -1)
    return apart[:, start % PACKED : start % PACKED + stop - start]
