"""GGUF files: each matrix is one tensor of blocks, uint8 [N, bytes of a row], of a type of its own (ggml.py)."""

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quintet.gguf.names import without_expert_number
from quintet.gguf.tensor_types import KINDS, TensorType
from quintet.interface.weights import (
    BlockRows,
    CheckpointSlice,
    Matrix,
    ShardRange,
    StoredTensor,
    WeightFormat,
    WeightReader,
)
from quintet.layers.quantization.formats.ggml_blocks import TYPES
from quintet.layers.quantization.group_scales import regroup, shard_format
from quintet.ops.quantized import dequantized

_KINDS = {kind.name: kind for kind in KINDS.values()}
MAX_VALUES = 2**24  # values that are dequantized at a time: what lies between takes several times their memory


@dataclass(frozen=True)
class BlockWeights:
    """Reads matrices of one type: by their outputs, also where the model's own checkpoint has them by their inputs."""

    name: str

    @property
    def tensor_type(self) -> TensorType:
        return _KINDS[self.name]

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        outputs, inputs = part.shape if part.total is None else (part.total, part.shape[1])
        if inputs % self.tensor_type.block_size:
            raise ValueError(
                f"{part.source} has {inputs} inputs, no multiple of {self.name}'s {self.tensor_type.block_size}"
            )
        return {
            part.source: StoredTensor(
                (outputs, inputs // self.tensor_type.block_size * self.tensor_type.type_size), (torch.uint8,)
            )
        }

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(replace(TYPES[self.name].format, block_type=self.name if self._whole(shard) else ""), shard)

    def blocks(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> BlockRows | None:
        if not self._whole(shard):
            return None
        (first, last), count = shard.outputs, (shard.inputs[1] - shard.inputs[0]) // self.tensor_type.block_size
        found = self._blocks(tensors[part.source][first:last], shard.inputs)[0]
        if found.shape[:2] != (last - first, count):  # a platform reads them by their addresses
            raise ValueError(f"{part.source} has {list(found.shape[:2])} rows and blocks, not {[last - first, count]}")
        return BlockRows(self.name, found.flatten(1))

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        return self._matrix(tensors[part.source][slice(*shard.outputs)], shard.inputs, self.format(shard))

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        rows = tensors[part.source][slice(*shard.outputs)]
        known = torch.empty(len(rows), shard.inputs[1] - shard.inputs[0])
        for index in range(0, len(rows), step := max(1, MAX_VALUES // part.shape[1])):
            known[index : index + step] = self._floats(rows[index : index + step], shard.inputs)
        return known

    def _matrix(self, rows: Tensor, inputs: tuple[int, int], fmt: WeightFormat) -> Matrix:
        held, (blocks, first) = TYPES[self.name], self._blocks(rows, inputs)
        found, start = held.unpack(blocks), inputs[0] - first
        stop = inputs[1] - first
        values = found.values.flatten(1)[:, start:stop]
        if fmt.bits == 4:
            values = values[:, ::2] | values[:, 1::2] << 4
        scales, mins = (
            None if each is None else regroup(each.flatten(1), held.format.group, fmt.group, (start, stop))
            for each in (found.scales, found.mins)
        )
        assert scales is not None
        zeros = torch.zeros(scales.shape, dtype=torch.uint8) if fmt.zeros else None
        return Matrix(values.contiguous(), scales, zeros, format=fmt, mins=mins)

    def _floats(self, rows: Tensor, inputs: tuple[int, int]) -> Tensor:
        """The share of some rows, by way of the whole blocks that it lies in."""
        blocks, first = self._blocks(rows, inputs)
        whole = 0, blocks.shape[1] * self.tensor_type.block_size
        known = dequantized(self._matrix(blocks.flatten(1), whole, TYPES[self.name].format))
        return known[:, inputs[0] - first : inputs[1] - first]

    def _whole(self, shard: ShardRange) -> bool:
        return not any(each % self.tensor_type.block_size for each in shard.inputs)

    def _blocks(self, rows: Tensor, inputs: tuple[int, int]) -> tuple[Tensor, int]:
        """[N, B, bytes] of the blocks that hold these inputs, and the first input of them."""
        count, size = self.tensor_type.block_size, self.tensor_type.type_size
        first, last = inputs[0] // count, -(-inputs[1] // count)
        return rows[:, first * size : last * size].unflatten(1, (-1, size)), first * count


def dequantize(name: str, blocks: Tensor) -> Tensor:
    """uint8 [..., bytes] of blocks of a type -> float32 [..., K], by the package gguf."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(blocks.contiguous().numpy(), GGMLQuantizationType[name]))


@dataclass(frozen=True)
class GgufPlan:
    """The types of the modules that are not in floats; a layer's experts are one, by the name without numbers."""

    types: tuple[tuple[str, str], ...]

    def reader(self, module: str) -> WeightReader | None:
        name = self._by_module.get(without_expert_number(module))
        return None if name is None else BlockWeights(name)

    @property
    def type_counts(self) -> str:
        """Number of entries of each type: 12 Q4_K, 3 Q6_K."""
        return ", ".join(f"{count} {name}" for name, count in Counter(name for _, name in self.types).most_common())

    @functools.cached_property
    def _by_module(self) -> Mapping[str, str]:
        return dict(self.types)


def read(config: Mapping[str, Any]) -> GgufPlan:
    """Reads the quantization_config that stands for a file (quintet.gguf.config). ValueError names types not read."""
    types = config.get("types")
    if not isinstance(types, Mapping):
        raise ValueError("quantization_config of gguf has no types of its modules; give the .gguf file as the model")
    unknown = sorted({str(name)[:40] for name in types.values() if name not in tuple(TYPES)})  # it may be a list
    if unknown:
        raise ValueError(f"the file has tensors of type {', '.join(unknown)}; quintet reads {', '.join(TYPES)}")
    return GgufPlan(tuple(types.items()))
