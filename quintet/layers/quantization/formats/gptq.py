"""GPTQ (Frantar et al. 2022) as AutoGPTQ, GPTQModel, AutoRound and Neural Compressor write it: 2 to 8 bits.

qweight int32 [K * bits / 32, N] holds an output's inputs one after the other, qzeros int32 [G, N * bits / 32] a group's
zero points likewise, scales [G, N] floats. g_idx int32 [K] says which group an input is of; without it groups are of
neighbours. A value stands for (value - zero point) * scale. Files of the first version hold zero points less one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quintet.interface.weights import FLOATS, PLAIN, CheckpointSlice, Matrix, ShardRange, StoredTensor, WeightFormat
from quintet.layers.quantization.group_scales import MIN_GROUP, regroup, shard_format
from quintet.layers.quantization.int32_packing import ONES, add_one, pack_nibbles, unpack_columns, word_count
from quintet.ops.quantized import MIDDLE


@dataclass(frozen=True)
class Gptq:
    """Reads one module's. Layers that compute x W of a weight [in, out] (GPT-2's) are packed as all others are."""

    bits: int
    group: int  # inputs that share a scale; 0: all of an output's
    symmetric: bool = False  # zero points are all in the middle
    zeros_minus_one: bool = True  # version: zero points are stored less one
    planar: bool = False  # bits are in planes
    has_act_order: bool = False  # g_idx says something
    # inputs, where groups are of `group` inputs each that are not neighbours; 0: it is not so
    act_order_inputs: int = 0

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        outputs, inputs = part.shape if part.total is None else (part.total, part.shape[1])
        name, groups = part.source.removesuffix("weight"), -(-inputs // (self.group or inputs))
        order = {f"{name}g_idx": StoredTensor((inputs,), (torch.int32,))} if self.has_act_order else {}
        return {
            f"{name}qweight": StoredTensor((word_count(inputs, self.bits), outputs), (torch.int32,)),
            f"{name}qzeros": StoredTensor((groups, word_count(outputs, self.bits)), (torch.int32,)),
            f"{name}scales": StoredTensor((groups, outputs), FLOATS),
            **order,
        }

    def format(self, shard: ShardRange) -> WeightFormat:
        if self.group % MIN_GROUP or (self.has_act_order and shard.inputs != (0, self.act_order_inputs)):
            return PLAIN
        if self.bits > 4:
            fmt = WeightFormat("int8", 8, 16, self.group, mins=not self.symmetric)
        else:
            fmt = WeightFormat("int4", 4, 16, self.group, zeros=not self.symmetric)
        fmt = shard_format(fmt, shard)
        return fmt if fmt.plain else replace(fmt, act_order=self.has_act_order)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        name, fmt = part.source.removesuffix("weight"), self.format(shard)
        packed = tensors[f"{name}qweight"][:, slice(*shard.outputs)]
        order = tensors[f"{name}g_idx"].argsort(stable=True).int() if fmt.act_order else None
        values = self._whole(packed, shard.inputs) if order is None else None
        if values is None:
            values = self._values(unpack_columns(packed, self.bits, shard.inputs, self.planar), order)
        scales = tensors[f"{name}scales"][:, slice(*shard.outputs)].t().float()
        zeros = regroup(self._zeros(name, shard, tensors), self.group, fmt.group, shard.inputs)
        scales = regroup(scales, self.group, fmt.group, shard.inputs)
        mins = (self._default_zero - zeros.float()) * scales if fmt.mins else None
        return Matrix(values, scales, zeros if fmt.zeros else None, order, fmt, mins)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        name, (first, last) = part.source.removesuffix("weight"), shard.inputs
        packed = tensors[f"{name}qweight"][:, slice(*shard.outputs)]
        known = unpack_columns(packed, self.bits, shard.inputs, self.planar).t().float()
        inputs = torch.arange(first, last) // (self.group or part.shape[1])
        groups = tensors[f"{name}g_idx"][first:last].long() if self.has_act_order else inputs
        known -= self._zeros(name, shard, tensors)[:, groups].float()
        return known.mul_(tensors[f"{name}scales"][:, slice(*shard.outputs)].t().float()[:, groups])

    @property
    def _default_zero(self) -> int:
        return 1 << self.bits - 1

    def _whole(self, packed: Tensor, inputs: tuple[int, int]) -> Tensor | None:
        """Returns values of 4 and 8 bits, which the words hold in Matrix's order already; None for others."""
        first, last = (each * self.bits for each in inputs)
        if self.bits not in (4, 8) or first % 8 or last % 8:
            return None
        start = first // 32
        there = packed[start : -(-last // 32)].t().contiguous().view(torch.uint8)
        there = there[:, first // 8 - 4 * start : last // 8 - 4 * start]
        return there.contiguous() if self.bits == 4 else (there ^ 128).view(torch.int8)

    def _values(self, known: Tensor, order: Tensor | None) -> Tensor:
        """uint8 [K, N] -> as Matrix has them, in this order of inputs."""
        known = (known if order is None else known[order]).t().contiguous()
        if self.bits > 4:
            return (known.to(torch.int16) - self._default_zero).to(torch.int8)
        return pack_nibbles(known + (MIDDLE - self._default_zero) if self.symmetric else known)

    def _zeros(self, name: str, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        """uint8 [N, G]. ValueError where they are not what the configuration says."""
        packed = tensors[f"{name}qzeros"].t()
        if self.zeros_minus_one and self.bits in ONES:
            packed = add_one(packed, self.bits)
        zeros = unpack_columns(packed, self.bits, shard.outputs, self.planar)
        if self.zeros_minus_one and self.bits not in ONES:
            zeros = zeros + 1 & (1 << self.bits) - 1
        if self.symmetric and bool((zeros != self._default_zero).any()):
            other = int(zeros[zeros != self._default_zero][0])
            raise ValueError(
                f"{name}qzeros holds the zero point {other}, and the quantization_config says that it is symmetric: "
                f"all would be {self._default_zero}; set its sym to false, or its checkpoint_format to what wrote it"
            )
        return zeros
