"""torchao's checkpoints in safetensors: "_weight_qdata", "_weight_scale" and perhaps "_weight_zero_point" of a module.

By the file's types and shapes:
int8 [N, K], scale [N, G]: a number stands for (number - zero point) * scale: Int8Tensor, and IntxUnpackedToInt8Tensor,
which may hold numbers of fewer bits; float8 [N, K], scale [N, G] or one: Float8Tensor; int8 [N, K / 2], scale and zero
point [G, N]: Int4Tensor, the lower bits first, each -8..7, that stand for number * scale + zero point.

quant_type, the configuration as torchao writes it to JSON, says what activations are quantized to.
"""

import functools
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quintet.interface.weights import FLOATS, CheckpointSlice, Matrix, ShardRange, StoredTensor, WeightFormat
from quintet.layers.quantization.by_tensors import TensorPlan, modules_with_tensor, outputs_of
from quintet.layers.quantization.group_scales import dequantized_shard, regroup, shard_format
from quintet.layers.quantization.module_patterns import compile_pattern
from quintet.ops.quantized import MIDDLE

DATA, SCALE, ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DYNAMIC = {"Int8DynamicActivationInt8WeightConfig", "Float8DynamicActivationFloat8WeightConfig"}
WEIGHTS = {"Int8WeightOnlyConfig", "Int4WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"}
BY_MODULE = {"FqnToConfig", "ModuleFqnToConfig"}


@dataclass(frozen=True)
class TorchaoReader:
    """Reads one module's numbers of 8 bits. `of` is the format of the whole matrix."""

    weight_format: WeightFormat
    zeros_dtype: torch.dtype | None = None  # type of the zero points on file
    asymmetric: bool = False  # they may be another number than 0
    per_tensor: bool = False  # one scale for all

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        module, outputs, inputs = part.source.removesuffix(".weight"), outputs_of(part), part.shape[1]
        group = self.weight_format.group or inputs
        if inputs % group:
            raise ValueError(f"{part.source} has {inputs} inputs, which do not divide into groups of {group}")
        shape = (1, 1) if self.per_tensor else (outputs, inputs // group)
        found = {
            f"{module}{DATA}": StoredTensor((outputs, inputs), (self.weight_format.dtype or torch.int8,)),
            f"{module}{SCALE}": StoredTensor(shape, FLOATS),
        }
        return found | ({f"{module}{ZERO}": StoredTensor(shape, (self.zeros_dtype,))} if self.zeros_dtype else {})

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(replace(self.weight_format, mins=self.asymmetric), shard)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        fmt, module, rows = self.format(shard), part.source.removesuffix(".weight"), slice(*shard.outputs)
        values = tensors[f"{module}{DATA}"][rows, slice(*shard.inputs)]
        if fmt.bits == 4:
            values = (values + MIDDLE).view(torch.uint8)
            if bool((values > 15).any()):
                raise ValueError(f"{module}{DATA} holds numbers beyond -8 to 7, which 4 bits are; fetch the model anew")
            values = values[:, ::2] | values[:, 1::2] << 4
        scales = self._wide(tensors[f"{module}{SCALE}"], part, shard, fmt)
        zeros = self._wide(tensors[f"{module}{ZERO}"], part, shard, fmt) if self.zeros_dtype else None
        if zeros is not None and not self.asymmetric and bool(zeros.any()):
            raise ValueError(f"{module}{ZERO} is not all 0, and the configuration says so; fetch the model anew")
        return Matrix(
            values, scales, format=fmt, mins=-zeros * scales if zeros is not None and self.asymmetric else None
        )

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized_shard(self, self.weight_format.group, part, shard, tensors)

    def _wide(self, x: Tensor, part: CheckpointSlice, shard: ShardRange, fmt: WeightFormat) -> Tensor:
        """float32 [N, G] of the cut."""
        x = x.float().expand(shard.outputs[1], 1) if self.per_tensor else x.float()
        return regroup(x[slice(*shard.outputs)], self.weight_format.group, fmt.group, shard.inputs)


@dataclass(frozen=True)
class TorchaoInt4Reader:
    """Reads an Int4Tensor."""

    group: int

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        module, outputs, inputs = part.source.removesuffix(".weight"), outputs_of(part), part.shape[1]
        if inputs % self.group or self.group % 2:
            raise ValueError(f"{part.source} has {inputs} inputs, which do not divide into pairs, {self.group} a group")
        found = {f"{module}{DATA}": StoredTensor((outputs, inputs // 2), (torch.int8, torch.uint8))}
        return found | {
            f"{module}{each}": StoredTensor((inputs // self.group, outputs), FLOATS) for each in (SCALE, ZERO)
        }

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(WeightFormat("int4", 4, 16, self.group, mins=True), shard)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        fmt, module, (first, last) = self.format(shard), part.source.removesuffix(".weight"), shard.inputs
        packed = tensors[f"{module}{DATA}"].view(torch.uint8)[slice(*shard.outputs), first // 2 : last // 2]
        scales, mins = (
            regroup(
                tensors[f"{module}{each}"].float()[:, slice(*shard.outputs)].t(), self.group, fmt.group, shard.inputs
            )
            for each in (SCALE, ZERO)
        )
        return Matrix(packed ^ 0x88, scales, format=fmt, mins=mins)  # -8..7 to 0..15

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized_shard(self, self.group, part, shard, tensors)


@dataclass(frozen=True)
class TorchaoConfig:
    """Settings that a configuration has for a module's products."""

    dynamic: bool = False
    bits: int = 8
    asymmetric: bool = False


def plan(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> TensorPlan:
    """The modules that the files hold so. ValueError for what is not read."""
    named = [(name, None if each is None else _parse_type(*each)) for name, each in entries(config)]
    return TensorPlan(
        {module: _reader(module, tensors, _config_for(module, named)) for module in modules_with_tensor(tensors, DATA)}
    )


def entries(config: Mapping[str, Any]) -> list[tuple[str, tuple[str, Mapping[str, Any]] | None]]:
    """Returns the entries of quant_type, in order: a module's name, or "re:" and a pattern, or "_default" for all
    others; and a type and its fields, or None for those that stay in floats."""
    quant_type = config.get("quant_type")
    kind, data = _type_and_fields(quant_type.get("default") if isinstance(quant_type, Mapping) else quant_type)
    if kind not in BY_MODULE:
        return [("_default", (kind, data))]
    each = data.get("fqn_to_config") or data.get("module_fqn_to_config") or {}
    if not isinstance(each, Mapping):
        raise ValueError(f"torchao's {kind} is of {reprlib.repr(each)}, which names no modules")
    for name in each:
        matches_entry(name, "")
    return [(name, None if entry is None else _type_and_fields(entry)) for name, entry in each.items()]


def matches_entry(name: str, module: str) -> bool:
    """True if an entry's name means a module: its own, its weight's, or a pattern of either. ValueError for a pattern
    of other things than names and ".*"."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"quant_type names {reprlib.repr(name)}, no module or pattern of .* alone")
    return any(bool(_pattern(name).fullmatch(each)) for each in (module, f"{module}.weight"))


_NAME = re.compile(r"(re:)?\^?[\w\-.*\\]{1,500}\$?")  # "*" behind a dot alone means something


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    plain = name.removeprefix("re:").strip("^$")
    if not name.startswith("re:"):
        return re.compile(re.escape(plain))
    pieces = [re.escape(piece.replace("\\.", ".")) for piece in plain.split(".*")]
    return compile_pattern(".*".join(pieces), "quant_type")


def _type_and_fields(entry: Any) -> tuple[str, Mapping[str, Any]]:
    """A configuration's type and fields."""
    data = entry.get("_data") if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or not isinstance(data, Mapping):
        raise ValueError(
            f"torchao's quant_type is {reprlib.repr(entry)}; quintet reads configurations as torchao 0.15 and later "
            "write them, with _type and _data"
        )
    return str(entry.get("_type")), data


def _parse_type(kind: str, data: Mapping[str, Any]) -> TorchaoConfig:
    """Reads a type and its fields. ValueError for a type with products that are not known."""
    if kind not in DYNAMIC | WEIGHTS:
        known = ", ".join(sorted(DYNAMIC | WEIGHTS))
        raise ValueError(f"the checkpoint is of torchao's {reprlib.repr(kind)}; quintet reads {known}")
    mapping, width = enum_name(data.get("mapping_type")), enum_name(data.get("weight_dtype"))
    bits = int(width.removeprefix("int")) if width.removeprefix("int") in "12345678" and width else 8
    by_token = enum_name(data.get("act_mapping_type")) in ("", "SYMMETRIC") and not data.get("weight_only_decode")
    return TorchaoConfig(kind in DYNAMIC and by_token, bits, mapping not in ("", "SYMMETRIC"))


def enum_name(value: Any) -> str:
    """The name of a type or of an enumeration's value, as torchao writes it; "" if it is none."""
    return str(value.get("_data")) if isinstance(value, Mapping) else ""


def _config_for(module: str, named: list[tuple[str, TorchaoConfig | None]]) -> TorchaoConfig:
    """Its own entry, or the first pattern that it fits, or the default."""
    own = [entry for name, entry in named if not name.startswith("re:") and matches_entry(name, module)]
    by_pattern = [entry for name, entry in named if name.startswith("re:") and matches_entry(name, module)]
    return next(iter([*own, *by_pattern]), dict(named).get("_default")) or TorchaoConfig()


def _reader(
    module: str, tensors: Mapping[str, StoredTensor], settings: TorchaoConfig
) -> TorchaoReader | TorchaoInt4Reader:
    """By what the files hold."""
    data, scale, zero = (tensors.get(f"{module}{each}") for each in (DATA, SCALE, ZERO))
    shapes = [each.shape for each in (data, scale) if each is not None and each.shape is not None]
    other = ValueError(
        f"{module}{DATA} is of torchao in a layout that quintet does not read (it reads Int8Tensor, Float8Tensor, "
        "IntxUnpackedToInt8Tensor and Int4Tensor); quantize the original anew, in one of these"
    )
    if data is None or not data.dtypes or [len(shape) for shape in shapes] != [2, 2]:
        raise other
    (outputs, inputs), (rows, groups), kind = *shapes, data.dtypes[0]
    whole = (rows, groups) == (1, 1) and outputs > 1
    if zero is not None and zero.dtypes and zero.dtypes[0].is_floating_point:
        if kind not in (torch.int8, torch.uint8) or groups != outputs or not rows or 2 * inputs % rows:
            raise other
        return TorchaoInt4Reader(2 * inputs // rows)
    if kind in FLOAT8 and (rows == outputs or whole) and groups and inputs % groups == 0:
        fmt = WeightFormat(
            "fp8a8" if settings.dynamic else "fp8", 8, 8 if settings.dynamic else 16, _group(inputs, groups), dtype=kind
        )
        return TorchaoReader(fmt, per_tensor=whole)
    if kind == torch.int8 and (rows == outputs or whole) and groups and inputs % groups == 0:
        if zero is not None and (not zero.dtypes or zero.shape != (rows, groups)):
            raise other
        held = 4 if settings.bits <= 4 and inputs % 2 == 0 else 8
        dynamic = settings.dynamic and held == 8 and groups == 1
        fmt = WeightFormat("w8a8" if dynamic else f"int{held}", held, 8 if dynamic else 16, _group(inputs, groups))
        return TorchaoReader(fmt, zero.dtypes[0] if zero else None, settings.asymmetric, whole)
    raise other


def _group(inputs: int, groups: int) -> int:
    return 0 if groups == 1 else inputs // groups
