"""Marlin (Frantar et al. 2024) as AutoGPTQ and AutoAWQ wrote its weights to files: 4 bits, symmetric.

Tiles of 16 inputs and 16 outputs follow one another, and four of them are held in the order in which a GPU's tensor
cores take them: int32 [K / 16, N * 2]. Scales [G, N] are in an order of their own, 64 of them, or 32 where an output
has one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.weights import FLOATS, CheckpointSlice, Matrix, ShardRange, StoredTensor, WeightFormat
from quintet.layers.quantization.group_scales import dequantized_shard, regroup, shard_format
from quintet.layers.quantization.int32_packing import pack_nibbles

TILE, TILES = 16, 4  # inputs and outputs of a tile; tiles that are shuffled together
GROUPS = (-1, 128)
INPUTS, OUTPUTS = 128, 256  # that its kernels take multiples of


@dataclass(frozen=True)
class Marlin:
    """Reads one checkpoint's."""

    group: int  # 128, or 0: all of an output's inputs
    names: tuple[str, str] = ("B", "s")  # AutoGPTQ's of the weights and the scales; AutoAWQ's: qweight, scales

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        outputs, inputs = part.shape if part.total is None else (part.total, part.shape[1])
        name, (weight, scales) = part.source.removesuffix("weight"), self.names
        if inputs % INPUTS or outputs % (TILE * TILES) or part.transposed:
            raise ValueError(
                f"{name[:-1]} [{outputs}, {inputs}] does not divide into Marlin's {TILE * TILES} outputs and {INPUTS} "
                "inputs; correct config.json, or fetch the model anew"
            )
        return {
            f"{name}{weight}": StoredTensor((inputs // TILE, outputs * 2), (torch.int32,)),
            f"{name}{scales}": StoredTensor((inputs // (self.group or inputs), outputs), FLOATS),
        }

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(WeightFormat("int4", 4, 16, self.group), shard)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        name, fmt, (weight, scale) = part.source.removesuffix("weight"), self.format(shard), self.names
        first, last = shard.inputs
        start = first // TILE
        known = _untiled(tensors[f"{name}{weight}"][start : -(-last // TILE)])
        values = known[slice(*shard.outputs), first - start * TILE : last - start * TILE]
        scales = _unshuffled(tensors[f"{name}{scale}"]).t().float()[slice(*shard.outputs)]
        return Matrix(pack_nibbles(values), regroup(scales, self.group, fmt.group, shard.inputs), format=fmt)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized_shard(self, self.group, part, shard, tensors)


def _untiled(packed: Tensor) -> Tensor:
    """int32 [K / 16, N * 2] -> uint8 [N, K]."""
    rows, shifts = len(packed), 4 * torch.arange(8, dtype=torch.int32)
    shuffled = (packed[:, :, None] >> shifts & 15).to(torch.uint8).reshape(-1, TILE * TILE * TILES)
    tiles = shuffled[:, _order().argsort()].reshape(rows, -1, TILE, TILE)  # [K / 16, N / 16, inputs, outputs]
    return tiles.permute(1, 3, 0, 2).reshape(-1, rows * TILE)


def _order() -> Tensor:
    """Places in four tiles, one tile after the other, in the order in which they are held.

    A thread of a warp's 32 holds two pairs of neighbouring inputs, of an output and of the one that is 8 further; the
    four low and the four high halves of a number are separated.
    """
    thread, block, pair = torch.arange(32).view(-1, 1, 1), torch.arange(2).view(-1, 1), torch.tensor([0, 1, 8, 9])
    places = 16 * (2 * (thread % 4) + pair) + thread // 4 + 8 * block  # [32, 2, 4]: inputs of 16 outputs each
    whole = places.reshape(32, 1, 8) + 256 * torch.arange(TILES).view(1, -1, 1)
    return whole[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)


def _unshuffled(scales: Tensor) -> Tensor:
    """[G, N], in the order of outputs."""
    if len(scales) == 1:
        order = (2 * torch.arange(4).view(-1, 1) + torch.tensor([0, 1, 8, 9, 16, 17, 24, 25])).reshape(-1)
    else:
        order = (torch.arange(8).view(-1, 1) + 8 * torch.arange(8)).reshape(-1)
    return scales.reshape(-1, len(order))[:, order.argsort()].reshape(scales.shape)
