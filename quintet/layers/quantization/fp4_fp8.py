"""Matrices of floats in 4, 6 and 8 bits, with scales for blocks of them: FP8, NVFP4, MXFP4, MXFP6, MXFP8.

Numbers without a type in torch are places in a table (OCP Microscaling Formats, 2023): a sign, exponent and mantissa.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.weights import CheckpointSlice, Matrix, ShardRange, StoredTensor, WeightFormat
from quintet.layers.quantization.block_scales import (
    E4M3_DTYPES,
    E8M0_DTYPES,
    BlockScales,
    full_shape,
    scalar_scale,
    sibling_name,
)
from quintet.layers.quantization.group_scales import dequantized_shard, shard_format
from quintet.layers.quantization.integers import unpack_rows

BLOCK, SMALL_BLOCK = 32, 16  # inputs that share a scale: of the MX formats, and of NVFP4


def table(exponent: int, mantissa: int) -> tuple[float, ...]:
    """Returns the numbers of a float type with a sign and so many bits, by their codes, without infinities."""
    bias, steps = 2 ** (exponent - 1) - 1, 2**mantissa
    known = [
        (step / steps + (power > 0)) * 2.0 ** (max(power, 1) - bias)
        for power in range(2**exponent)
        for step in range(steps)
    ]
    return (*known, *(-each for each in known))


E2M1, E2M3, E3M2 = table(2, 1), table(2, 3), table(3, 2)


@dataclass(frozen=True)
class Float8Weights:
    """A "weight" of float8 [N, K]. The scales are written out for every output, so that any share of the outputs, and
    products side by side, are one matrix."""

    scales: BlockScales
    dtype: torch.dtype = torch.float8_e4m3fn

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        shape = full_shape(part)
        return {
            part.source: StoredTensor(shape, (self.dtype,)),
            sibling_name(part, self.scales.name): self.scales.stored_tensor(shape),
        }

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(WeightFormat("fp8", 8, 16, self.scales.columns, dtype=self.dtype), shard)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        fmt = self.format(shard)
        values = tensors[part.source][slice(*shard.outputs), slice(*shard.inputs)]
        scales = self.scales.expand_scales(tensors[sibling_name(part, self.scales.name)], part, shard, fmt)
        return Matrix(values, scales, format=fmt)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized_shard(self, self.scales.columns, part, shard, tensors)


@dataclass(frozen=True)
class Float4Reader:
    """e2m1 in halves of bytes, the first input in the low one: uint8 [N, K / 2], or [N, K / 32, 16] by blocks.

    Scales of blocks of inputs, and where `tensor` names it one more for the whole, which multiplies or `divides`.
    """

    scales: BlockScales
    values_name: str = "weight_packed"
    global_scale_name: str | None = None
    divides_by_global_scale: bool = False
    dtype: torch.dtype = torch.uint8  # of the pairs in files

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        (outputs, inputs), block = full_shape(part), self.scales.columns
        if inputs % block:
            raise ValueError(f"{part.source} has {inputs} inputs, which blocks of {block} do not divide")
        blocks = (outputs, inputs // block, block // 2)
        found = {
            sibling_name(part, self.values_name): StoredTensor((outputs, inputs // 2), (self.dtype,), (blocks,)),
            sibling_name(part, self.scales.name): self.scales.stored_tensor((outputs, inputs)),
        }
        if self.global_scale_name is not None:
            found[sibling_name(part, self.global_scale_name)] = BlockScales(0, 0).stored_tensor((outputs, inputs))
        return found

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(WeightFormat("table4", 4, 16, self.scales.columns, codebook=E2M1), shard)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        fmt, (first, last) = self.format(shard), shard.inputs
        rows = tensors[sibling_name(part, self.values_name)][slice(*shard.outputs)].flatten(1).view(torch.uint8)
        scales = self.scales.expand_scales(tensors[sibling_name(part, self.scales.name)], part, shard, fmt)
        if self.global_scale_name is not None:
            known = scalar_scale(tensors, sibling_name(part, self.global_scale_name))
            scales = scales / known if self.divides_by_global_scale else scales * known
        return Matrix(rows[:, first // 2 : last // 2].contiguous(), scales, format=fmt)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized_shard(self, self.scales.columns, part, shard, tensors)


@dataclass(frozen=True)
class Float6Reader:
    """Six bits a number, one after the other from the lowest: "weight" uint8 [N, 3 K / 4], a power of 2 for 32."""

    table: tuple[float, ...]  # E2M3 or E3M2
    scales: BlockScales = BlockScales(1, BLOCK, dtypes=E8M0_DTYPES)

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        outputs, inputs = full_shape(part)
        if inputs % BLOCK:
            raise ValueError(f"{part.source} has {inputs} inputs, which blocks of {BLOCK} do not divide")
        return {
            part.source: StoredTensor((outputs, inputs * 3 // 4), (torch.uint8,)),
            sibling_name(part, self.scales.name): self.scales.stored_tensor((outputs, inputs)),
        }

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(WeightFormat("table8", 8, 16, BLOCK, codebook=self.table), shard)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        fmt = self.format(shard)
        values = unpack_rows(tensors[part.source][slice(*shard.outputs)], 6 * torch.arange(*shard.inputs), 6)
        return Matrix(
            values,
            self.scales.expand_scales(tensors[sibling_name(part, self.scales.name)], part, shard, fmt),
            format=fmt,
        )

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized_shard(self, BLOCK, part, shard, tensors)


def mxfp8() -> Float8Weights:
    """float8 with a power of 2 for every 32 inputs."""
    return Float8Weights(BlockScales(1, BLOCK, dtypes=E8M0_DTYPES))


def mxfp4(values: str = "weight_packed", scales: str = "weight_scale") -> Float4Reader:
    """e2m1 with a power of 2 for every 32 inputs."""
    return Float4Reader(BlockScales(1, BLOCK, scales, E8M0_DTYPES), values)


def nvfp4(values: str, tensor: str, divides: bool, block: int = SMALL_BLOCK) -> Float4Reader:
    """e2m1 with a float8 for every 16 inputs, and one float32 for all."""
    return Float4Reader(BlockScales(1, block, dtypes=E4M3_DTYPES), values, tensor, divides)


def gpt_oss() -> Float4Reader:
    """MXFP4 as gpt-oss (OpenAI, 2025) has its experts: "_blocks" uint8 [N, K / 32, 16] and "_scales" [N, K / 32]."""
    return Float4Reader(BlockScales(1, BLOCK, "_scales", E8M0_DTYPES), "_blocks")
