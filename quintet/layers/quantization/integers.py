"""Matrices of whole numbers in 2 to 8 bits, as int8 or packed densely into int32, with scales and zero points."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quintet.interface.weights import PLAIN, CheckpointSlice, Matrix, ShardRange, StoredTensor, WeightFormat
from quintet.layers.quantization.block_scales import BlockScales, full_shape, sibling_name
from quintet.layers.quantization.group_scales import dequantized_shard, shard_format
from quintet.ops.quantized import MIDDLE, dequantized

WORD = 32  # bits


@dataclass(frozen=True)
class IntWeights:
    """Reads compressed-tensors' "int-quantized" and "pack-quantized", and what is kept alike.

    "weight" int8 [N, K]; or, `packed`, "weight_packed" int32 [N, K bits / 32], in which numbers of `bits` bits follow
    one another from the lowest, each 2^(bits - 1) more than it stands for. Zero points are int8 beside the scales, or
    packed along their outputs; an order tells each input's group ("weight_g_idx" int32 [K]).
    """

    bits: int
    scales: BlockScales
    zeros: bool = False
    activations: int = 16  # bits
    packed: bool = False
    act_order_inputs: int = 0  # inputs of a matrix with groups that are not of inputs in a row; 0: they are

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        outputs, inputs = shape = full_shape(part)
        down, across = self.scales.blocks(shape)
        found = {sibling_name(part, self.scales.name): self.scales.stored_tensor(shape)}
        if self.packed:
            also = (
                outputs,
                -(-inputs // (WORD // self.bits)),
            )  # no number crossed words before compressed-tensors 0.13
            found[sibling_name(part, "weight_packed")] = StoredTensor(
                (outputs, self._words(inputs)), (torch.int32,), (also,)
            )
        else:
            found[part.source] = StoredTensor(shape, (torch.int8,))
        if self.zeros:
            points = StoredTensor((self._words(down), across), (torch.int32,))
            loose = self.scales.stored_tensor(shape)._replace(dtypes=(torch.int8,))
            found[sibling_name(part, "weight_zero_point")] = points if self._zeros_packed else loose
        if self.act_order_inputs:
            found[sibling_name(part, "weight_g_idx")] = StoredTensor((inputs,), (torch.int32,))
        return found

    @property
    def _zeros_packed(self) -> bool:
        return self.packed and self.scales.rows > 0

    def _words(self, count: int) -> int:
        return -(-count * self.bits // WORD)

    def format(self, shard: ShardRange) -> WeightFormat:
        group, nibbles = self.scales.columns, self.bits <= 4
        kind = f"w{4 if nibbles else 8}a8" if self.activations == 8 else f"int{4 if nibbles else 8}"
        fmt = WeightFormat(kind, 4 if nibbles else 8, self.activations, group)
        if self.zeros:  # 5 to 7 bits less their zero point have 8
            fmt = WeightFormat(kind, fmt.bits, self.activations, group, zeros=nibbles, mins=self.bits == 8)
        if not self.act_order_inputs:
            return shard_format(fmt, shard)
        return replace(fmt, act_order=True) if shard.inputs == (0, self.act_order_inputs) else PLAIN

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        fmt, order = self.format(shard), self._order(part, tensors)
        scales = self.scales.expand_scales(tensors[sibling_name(part, self.scales.name)], part, shard, fmt)
        zeros = self._zero_points(part, shard, tensors, fmt)
        if self.packed and self.bits == fmt.bits == 4 and order is None and shard.inputs[0] % 2 == 0:
            known = self._bytes(part, shard, tensors)  # as Matrix has them
            return Matrix(known, scales, None if zeros is None else (zeros + MIDDLE).to(torch.uint8), format=fmt)
        values = self._values(part, shard, tensors)  # signed
        if order is not None:
            values = values[:, order.long()]
        if fmt.bits == 4:
            lifted = (values + MIDDLE).to(torch.uint8)
            known = lifted[:, ::2] | lifted[:, 1::2] << 4
            lifted_zeros = None if zeros is None else (zeros + MIDDLE).to(torch.uint8)
            return Matrix(known, scales, lifted_zeros, order, fmt)
        if zeros is None or fmt.mins:
            mins = None if zeros is None else zeros.float() * -scales
            return Matrix(values.contiguous(), scales, input_order=order, format=fmt, mins=mins)
        wide = zeros if zeros.shape[1] == 1 else zeros.repeat_interleave(fmt.group, 1)[:, : values.shape[1]]
        return Matrix(values - wide, scales, input_order=order, format=fmt)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        if self.act_order_inputs:
            known = dequantized(self.matrix(part, ShardRange(shard.outputs, (0, self.act_order_inputs)), tensors))
            return known[:, slice(*shard.inputs)]
        return dequantized_shard(self, self.scales.columns, part, shard, tensors)

    def _values(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        """int8 [n, k]."""
        if not self.packed:
            return tensors[part.source][slice(*shard.outputs), slice(*shard.inputs)]
        if self.bits == 8:
            return _signed(self._bytes(part, shard, tensors), 8)
        words = tensors[sibling_name(part, "weight_packed")][slice(*shard.outputs)]
        places = torch.arange(*shard.inputs)
        each = WORD // self.bits
        dense = words.shape[1] == self._words(part.shape[1])
        starts = places * self.bits if dense else places // each * WORD + places % each * self.bits
        return _signed(unpack_rows(words, starts, self.bits), self.bits)

    def _bytes(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        """uint8 [n, bytes of k], of numbers that none crosses."""
        words = tensors[sibling_name(part, "weight_packed")][slice(*shard.outputs)].contiguous()
        return words.view(torch.uint8)[:, slice(*(each * self.bits // 8 for each in shard.inputs))].contiguous()

    def _zero_points(
        self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor], fmt: WeightFormat
    ) -> Tensor | None:
        """int8 [n, G]."""
        if not self.zeros:
            return None
        points = tensors[sibling_name(part, "weight_zero_point")]
        if self._zeros_packed:
            starts = torch.arange(full_shape(part)[0]) * self.bits
            points = _signed(unpack_rows(points.t(), starts, self.bits), self.bits).t()
        return self.scales.expand(points, part, shard, fmt)

    def _order(self, part: CheckpointSlice, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """int32 [K]: inputs by their groups. ValueError where these are not of equal size."""
        if not self.act_order_inputs:
            return None
        name = sibling_name(part, "weight_g_idx")
        groups, count = tensors[name].long(), self.scales.blocks(full_shape(part))[1]
        if groups.min() < 0 or groups.max() >= count or (groups.bincount() != self.scales.columns).any():
            raise ValueError(
                f"{name} does not deal {self.act_order_inputs} inputs into {count} groups of {self.scales.columns}"
            )
        return groups.argsort(stable=True).to(torch.int32)


def unpack_rows(words: Tensor, starts: Tensor, bits: int) -> Tensor:
    """int32 or uint8 [M, W] -> uint8 [M, K], the numbers that begin at these bits of a row [K], from its lowest."""
    held = words.contiguous().view(torch.uint8)
    first, shifts = starts // 8, (starts % 8).to(torch.int16)
    low = held[:, first]
    if bits == 8:
        return low
    if bits in (2, 4):  # none crosses a byte
        return low >> shifts.to(torch.uint8) & (1 << bits) - 1
    high = held[:, (first + 1).clamp(max=held.shape[1] - 1)]
    both = low.to(torch.int16) | high.to(torch.int16) << 8
    return (both >> shifts & (1 << bits) - 1).to(torch.uint8)


def _signed(x: Tensor, bits: int) -> Tensor:
    """uint8, 2^(bits - 1) more than it stands for -> int8."""
    return (x - (1 << bits - 1)).view(torch.int8)
