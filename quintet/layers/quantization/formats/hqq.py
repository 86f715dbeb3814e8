"""HQQ (Badri and Shaji 2023), as hqq's layers keep their state: 8, 4, 3, 2 or 1 bits with scales and zeros in floats.

The numbers of a matrix, row after row, are rows of `group` of them with axis 1, or so many rows with axis 0; each row,
or each column, has a scale and a zero: a value stands for (value - zero) * scale. The rows are packed: with n values in
a number, its highest bits are of a row in the first n-th of all, the next of one in the second. 3 bits are ten to an
int32, others fill bytes; numbers of another type (`viewed`) may stand in the place of so many bytes.
"""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quintet.interface.weights import FLOATS, PLAIN, CheckpointSlice, Matrix, ShardRange, StoredTensor, WeightFormat
from quintet.layers.quantization.by_tensors import TensorPlan, modules_with_tensor, outputs_of
from quintet.layers.quantization.flat_scales import largest_uniform_group, run_indices, shard_values
from quintet.layers.quantization.group_scales import MIN_GROUP
from quintet.ops.quantized import MIDDLE

VALUES_PER_NUMBER = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}  # bits -> values in a number
MAX_GROUP = 2**20  # numbers that share a scale
# of the layer's state, what the configuration says, or the shapes do
IGNORED_SUFFIXES = tuple(
    f".{name}"
    for name in (
        "shape", "packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "compute_dtype",
        "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Hqq:
    """Reads one module's. `marked`: the state has its numbers beside it."""

    bits: int
    group: int  # 0: all inputs of an output (axis 1), or all outputs of an input (axis 0)
    axis: int = 1
    view_dtype: torch.dtype | None = None
    has_state: bool = False

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        (rows, width), name = self._rows(part), part.source.removesuffix("weight")
        kind, own = (torch.int32, 4) if self.bits == 3 else (torch.uint8, 1)
        share = self.view_dtype.itemsize // own if self.view_dtype else 1
        high = -(-rows // VALUES_PER_NUMBER[self.bits])
        if width % share or (self.bits != 3 and rows % VALUES_PER_NUMBER[self.bits]):
            raise ValueError(f"{name[:-1]} of {rows} by {width} numbers does not divide into HQQ's of {self.bits} bits")
        found = {f"{name}W_q": StoredTensor((high, width // share), (self.view_dtype or kind,))}
        shape = (rows, 1) if self.axis else (1, width)
        found |= {f"{name}{each}": StoredTensor(shape, FLOATS) for each in ("scale", "zero")}
        marks = ("nbits", "group_size", "axis") if self.has_state else ()
        return found | {f"{name}{each}": StoredTensor((), (torch.int32,)) for each in marks}

    def format(self, shard: ShardRange) -> WeightFormat:
        row = shard.row or shard.inputs[1]
        group = largest_uniform_group(self.group or row, shard)
        if self.axis == 0 or group < MIN_GROUP:
            return PLAIN
        held = 8 if self.bits == 8 else 4
        return WeightFormat(f"int{held}", held, 16, group, mins=True)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        fmt, (scales, zeros) = self.format(shard), self._numbers(part, tensors)
        at = run_indices(self.group or part.shape[1], fmt.group, part.shape[1], shard)
        scales, zeros = scales.reshape(-1)[at], zeros.reshape(-1)[at]
        values = self._values(part, shard, tensors)
        if fmt.bits == 8:
            return Matrix((values.short() - 128).to(torch.int8), scales, format=fmt, mins=(128 - zeros) * scales)
        return Matrix(values[:, ::2] | values[:, 1::2] << 4, scales, format=fmt, mins=(MIDDLE - zeros) * scales)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        row, (_, width) = part.shape[1], self._rows(part)
        values, (scales, zeros) = self._values(part, shard, tensors), self._numbers(part, tensors)
        places = torch.arange(*shard.outputs)[:, None] * row + torch.arange(*shard.inputs)
        at = places // width if self.axis else places % width
        return (values - zeros.reshape(-1)[at]) * scales.reshape(-1)[at]

    def _rows(self, part: CheckpointSlice) -> tuple[int, int]:
        """Rows that are packed, and numbers in each."""
        outputs, inputs = outputs_of(part), part.shape[1]
        size = self.group or (inputs if self.axis else outputs)
        if outputs * inputs % size:
            raise ValueError(f"{part.source} [{outputs}, {inputs}] does not divide into runs of {size} numbers")
        other = outputs * inputs // size
        return (other, size) if self.axis else (size, other)

    def _values(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        """uint8 [N, K]; of the packed rows, only those that hold them are looked at."""
        row, (rows, width) = part.shape[1], self._rows(part)
        packed = tensors[part.source.removesuffix("weight") + "W_q"]
        packed = packed.contiguous().view(torch.int32 if self.bits == 3 else torch.uint8)
        first, last = shard.outputs[0] * row // width, -(-shard.outputs[1] * row // width)
        places, many = torch.arange(first, min(last, rows)), VALUES_PER_NUMBER[self.bits]
        shifts = self.bits * (many - 1 - places // len(packed))
        values = packed[places % len(packed)] >> shifts[:, None].to(packed.dtype) & (1 << self.bits) - 1
        return shard_values(values.to(torch.uint8).reshape(-1), first * width, row, shard)

    def _numbers(self, part: CheckpointSlice, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Scales and zeros, once the state is known to be of what the configuration says."""
        name = part.source.removesuffix("weight")
        if self.has_state:
            size = self.group or part.shape[1 if self.axis else 0]
            held = tuple(int(tensors[f"{name}{each}"]) for each in ("nbits", "group_size", "axis"))
            if held != (self.bits, size, self.axis):
                raise ValueError(
                    f"{name[:-1]} is of {held}: bits, group_size and axis, and config.json says "
                    f"{(self.bits, size, self.axis)}; fetch the model anew"
                )
        return tensors[f"{name}scale"].float(), tensors[f"{name}zero"].float()


def plan(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], matches: Callable[[str, str], bool]
) -> TensorPlan:
    """Returns readers of modules with a state in the files, by the configuration. ValueError for what is not read."""
    entry = config.get("quant_config")
    if not isinstance(entry, Mapping):
        raise ValueError(f"the checkpoint is of hqq with quant_config {reprlib.repr(entry)}, which says no bits")
    whole = "weight_quant_params" in entry
    known = {"" if whole else str(tag): _parse_config(each) for tag, each in ({"": entry} if whole else entry).items()}
    readers = {}
    for module in modules_with_tensor(tensors, ".W_q"):
        tag = "" if whole else next((tag for tag in known if matches(tag, module)), None)
        if tag is None:
            raise ValueError(f"{module}.W_q is there, and hqq's quant_config has no entry for it; fetch the model anew")
        kinds, marked = tensors[f"{module}.W_q"].dtypes, f"{module}.nbits" in tensors
        viewed = next((kind for kind in kinds if kind.is_floating_point), None)
        readers[module] = Hqq(*known[tag], viewed, marked)
    return TensorPlan(readers)


def _parse_config(config: Any) -> tuple[int, int, int]:
    """Bits, group and axis."""
    entry = config.get("weight_quant_params") if isinstance(config, Mapping) else None
    entry = entry if isinstance(entry, Mapping) else {}
    bits, group, axis = entry.get("nbits"), entry.get("group_size") or 0, entry.get("axis", 0)
    fits = isinstance(group, int) and 0 <= group <= MAX_GROUP
    if (
        type(bits) is not int
        or bits not in VALUES_PER_NUMBER
        or not fits
        or axis not in (0, 1)
        or entry.get("channel_wise", True) is not True
    ):
        raise ValueError(
            f"the checkpoint is of hqq with {reprlib.repr(dict(entry))}; quintet reads 8, 4, 3, 2 and 1 bits with "
            "scales of groups along axis 0 or 1"
        )
    if config.get("scale_quant_params") or config.get("zero_quant_params"):
        raise ValueError("the checkpoint is of hqq with quantized scales or zeros; quintet reads those in floats")
    return bits, group, axis
