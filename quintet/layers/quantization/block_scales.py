"""Scales beside a matrix: one for each block of it, in the types and shapes that checkpoints have for them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.weights import FLOATS, CheckpointSlice, ShardRange, StoredTensor, WeightFormat
from quintet.layers.quantization.group_scales import regroup

E8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)  # exponents of 2, 127 for 1 (OCP Microscaling Formats, 2023)
E4M3_DTYPES = (torch.float8_e4m3fn,)  # NVFP4's


@dataclass(frozen=True)
class BlockScales:
    """Scales of blocks of `rows` outputs and `columns` inputs; 0: of all of them. Blocks at the ends may be smaller."""

    rows: int = 1
    columns: int = 0
    name: str = "weight_scale"
    dtypes: tuple[torch.dtype, ...] = FLOATS

    def blocks(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the number of blocks of a matrix [N, K], along each axis."""
        return -(-shape[0] // (self.rows or shape[0])), -(-shape[1] // (self.columns or shape[1]))

    def stored_tensor(self, shape: tuple[int, int]) -> StoredTensor:
        """Axes of one block may be left out, or stand apart."""
        down, across = self.blocks(shape)
        also = (
            [(down, 1, across, 1)] + [(down,)] * (across == 1) + [(across,)] * (down == 1) + [()] * (down * across == 1)
        )
        return StoredTensor((down, across), self.dtypes, tuple(also))

    def expand_scales(self, tensor: Tensor, part: CheckpointSlice, shard: ShardRange, fmt: WeightFormat) -> Tensor:
        """Those of a share, written out for each of its outputs: float32 [n, G] in the form's groups."""
        return self.expand(float_scales(tensor), part, shard, fmt)

    def expand(self, tensor: Tensor, part: CheckpointSlice, shard: ShardRange, fmt: WeightFormat) -> Tensor:
        """The same of any numbers that there are as many of."""
        known, (first, last) = tensor.reshape(self.blocks(full_shape(part))), shard.outputs
        rows = torch.arange(first, last) // self.rows if self.rows else torch.zeros(last - first, dtype=torch.int64)
        return regroup(known[rows], self.columns, fmt.group, shard.inputs)


def float_scales(tensor: Tensor) -> Tensor:
    """Scales in float32; exponents become the powers of 2 that they stand for."""
    return (tensor.view(torch.float8_e8m0fnu) if tensor.dtype == torch.uint8 else tensor).float()


def full_shape(part: CheckpointSlice) -> tuple[int, int]:
    """Outputs and inputs of the tensor that the part is in."""
    outputs, inputs = part.shape
    if part.transposed:
        raise ValueError(f"{part.source} is stored by its inputs, which no checkpoint of this format is")
    return (outputs if part.total is None else part.total), inputs


def sibling_name(part: CheckpointSlice, name: str) -> str:
    """A tensor of the same module, or, with "_" before it, of a parameter."""
    return (part.source.removesuffix(".weight") if name.startswith("_") else part.source.removesuffix("weight")) + name


def scalar_scale(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A number for a whole matrix, float32 [1, 1]."""
    return tensors[name].float().reshape(1, 1)
