"""bitsandbytes' checkpoints: nf4 and fp4 (QLoRA, Dettmers et al. 2023), int8 (LLM.int8(), Dettmers et al. 2022).

4 bits: "weight" holds the matrix row after row in a column of bytes, or of numbers of another type in their place; of
two inputs the first has the high bits. Each run of `block` numbers has an absmax, whether or not a row ends in it. With
double quantization absmax is uint8: places in nested_quant_map, times nested_absmax of 256 of them, plus an offset,
which stands with the rest in a JSON text, quant_state.bitsandbytes__nf4.

int8: weight [N, K] and SCB [N], the largest magnitudes: a number stands for number * SCB / 127. Activations are taken
as they come, so that none is an outlier (llm_int8_threshold).
"""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quintet.interface.weights import (
    FLOATS,
    PLAIN,
    CheckpointSlice,
    Matrix,
    ShardRange,
    StoredTensor,
    WeightFormat,
    WeightReader,
)
from quintet.layers.quantization.by_tensors import TensorPlan, modules_with_tensor, outputs_of
from quintet.layers.quantization.flat_scales import largest_uniform_group, run_indices, shard_values
from quintet.layers.quantization.group_scales import MIN_GROUP, shard_format
from quintet.ops.quantized import dequantized

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(sign * each / 12 for sign in (1.0, -1.0) for each in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
TABLES = {"nf4": NF4, "fp4": FP4}
ACTIVATIONS_NOTE = (
    "LLM.int8() quantizes activations but for outliers; they stay as they are, so llm_int8_threshold is moot"
)
BLOCKS = tuple(2**i for i in range(5, 13))  # numbers in a run: 32 to 4096
NESTED_BLOCK = 256  # of absmax in a run of its own
MAX_STATE_BYTES = 4096  # bytes of a quant_state
STATE = "quant_state.bitsandbytes__"


@dataclass(frozen=True)
class BitsAndBytes4Bit:
    """Reads nf4 or fp4."""

    table: str
    block: int = 64
    nested: bool = False
    storage: torch.dtype = torch.uint8

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        name, numbers = part.source, outputs_of(part) * part.shape[1]
        if numbers % (2 * self.storage.itemsize):
            raise ValueError(f"{name} of {numbers} numbers of 4 bits does not fill bytes of {self.storage}")
        blocks = -(-numbers // self.block)
        found = {
            name: StoredTensor((numbers // 2 // self.storage.itemsize, 1), (self.storage,)),
            f"{name}.absmax": StoredTensor((blocks,), (torch.uint8,) if self.nested else (torch.float32,)),
            f"{name}.quant_map": StoredTensor((16,), (torch.float32,)),
            f"{name}.{STATE}{self.table}": StoredTensor(None, (torch.uint8,)),
        }
        if self.nested:
            found[f"{name}.nested_absmax"] = StoredTensor((-(-blocks // NESTED_BLOCK),), (torch.float32,))
            found[f"{name}.nested_quant_map"] = StoredTensor((256,), (torch.float32,))
        return found

    def format(self, shard: ShardRange) -> WeightFormat:
        group = largest_uniform_group(self.block, shard)
        return PLAIN if group < MIN_GROUP else WeightFormat("table4", 4, 16, group, codebook=TABLES[self.table])

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        fmt, values = self.format(shard), self._values(part, shard, tensors)
        return Matrix(values[:, ::2] | values[:, 1::2] << 4, self._scales(part, shard, tensors, fmt.group), format=fmt)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        group = largest_uniform_group(self.block, shard._replace(row=part.shape[1]))
        scales = self._scales(part, shard, tensors, group).repeat_interleave(group, 1)
        return torch.tensor(TABLES[self.table])[self._values(part, shard, tensors).int()] * scales

    def _values(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        """uint8 [N, K]."""
        row = part.shape[1]
        first, last = (row * each for each in shard.outputs)
        packed = tensors[part.source].view(torch.uint8).reshape(-1)[first // 2 : -(-last // 2)]
        return shard_values(torch.stack([packed >> 4, packed & 15], -1).reshape(-1), first - first % 2, row, shard)

    def _scales(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor], group: int) -> Tensor:
        """float32 [N, G]."""
        state = self._state(part, tensors)
        at = run_indices(self.block, group, part.shape[1], shard)
        absmax = tensors[f"{part.source}.absmax"][at]
        if not self.nested:
            return absmax
        table, offset = tensors[f"{part.source}.nested_quant_map"], state.get("nested_offset")
        if not isinstance(offset, int | float) or state.get("nested_blocksize") != NESTED_BLOCK:
            raise ValueError(f"{part.source}: its quant_state is of no double quantization in runs of {NESTED_BLOCK}")
        return table[absmax.int()] * tensors[f"{part.source}.nested_absmax"][at // NESTED_BLOCK] + float(offset)

    def _state(self, part: CheckpointSlice, tensors: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """The JSON text, once it is known to say what the rest of the file does."""
        name, text = part.source, tensors[f"{part.source}.{STATE}{self.table}"]
        try:
            state = json.loads(bytes(text.flatten().tolist())) if text.numel() <= MAX_STATE_BYTES else None
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            raise ValueError(
                f"{name}: its quant_state is no JSON object of up to {MAX_STATE_BYTES} bytes; fetch it again"
            )
        stored, wanted = (state.get("quant_type"), state.get("blocksize")), (self.table, self.block)
        if stored != wanted:
            raise ValueError(
                f"{name}: its quant_state says {reprlib.repr(stored)}, and its tensors are of {wanted}: type, and "
                "length of a run; fetch it again"
            )
        if not torch.allclose(tensors[f"{name}.quant_map"], torch.tensor(TABLES[self.table]), atol=1e-6):
            raise ValueError(f"{name}.quant_map is not {self.table}'s; quintet reads bitsandbytes' own tables")
        return state


@dataclass(frozen=True)
class BitsAndBytes8Bit:
    """Reads int8; `marked`: a weight_format is there, which is to be 0 (by rows)."""

    has_weight_format: bool = False

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        name, outputs = part.source.removesuffix("weight"), outputs_of(part)
        found = {
            part.source: StoredTensor((outputs, part.shape[1]), (torch.int8,)),
            f"{name}SCB": StoredTensor((outputs,), FLOATS),
        }
        return found | ({f"{name}weight_format": StoredTensor((), (torch.uint8,))} if self.has_weight_format else {})

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(WeightFormat("int8", 8, 16), shard)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        name = part.source.removesuffix("weight")
        if self.has_weight_format and int(tensors[f"{name}weight_format"]) != 0:
            raise ValueError(f"{name}weight_format is not 0: the weight lies in an order of one GPU's; save it by rows")
        values = tensors[part.source][slice(*shard.outputs), slice(*shard.inputs)]
        scales = tensors[f"{name}SCB"].float()[slice(*shard.outputs), None] / 127
        return Matrix(values, scales.contiguous(), format=self.format(shard))

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized(self.matrix(part, shard, tensors)._replace(format=WeightFormat("int8", 8, 16)))


def plan(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> TensorPlan:
    """Returns the readers of what the files hold: llm_int8_skip_modules is what the user requested, and models add to
    it. ValueError names what in the files is of another kind."""
    reader(config)
    fours = {module: _four_bit_reader(module, tensors) for module in modules_with_tensor(tensors, ".weight.absmax")}
    eights = {
        module: BitsAndBytes8Bit(f"{module}.weight_format" in tensors)
        for module in modules_with_tensor(tensors, ".SCB")
    }
    return TensorPlan({**fours, **eights})


def reader(config: Mapping[str, Any]) -> WeightReader:
    """Returns the reader for a model with random weights. ValueError for a configuration that is not read."""
    kind = str(config.get("bnb_4bit_quant_type", "fp4"))
    if config.get("load_in_8bit"):
        return BitsAndBytes8Bit()
    if not config.get("load_in_4bit") or kind not in TABLES:
        raise ValueError(
            f"the checkpoint is of bitsandbytes with load_in_4bit {config.get('load_in_4bit')} and type {kind}; "
            "quintet reads load_in_8bit, and load_in_4bit with nf4 or fp4"
        )
    return BitsAndBytes4Bit(kind)


def _four_bit_reader(module: str, tensors: Mapping[str, StoredTensor]) -> BitsAndBytes4Bit:
    """The length of its runs follows from how many absmax there are."""
    name = f"{module}.weight"
    kind = next((each for each in TABLES if f"{name}.{STATE}{each}" in tensors), None)
    weight, absmax = tensors.get(name), tensors[f"{name}.absmax"]
    if kind is None or weight is None or not weight.dtypes or not weight.shape or not absmax.shape:
        raise ValueError(f"{name} is of bitsandbytes, and has no {STATE}nf4 or fp4 beside it; fetch the model anew")
    storage = weight.dtypes[0]
    numbers = weight.shape[0] * storage.itemsize * 2
    block = next((each for each in BLOCKS if -(-numbers // each) == absmax.shape[0]), None)
    if block is None:
        raise ValueError(
            f"{name}.absmax has {absmax.shape[0]} numbers, and {numbers} in runs of {BLOCKS[0]} to {BLOCKS[-1]} have "
            "another number of them; fetch the model anew"
        )
    return BitsAndBytes4Bit(kind, block, f"{name}.nested_absmax" in tensors, storage)
