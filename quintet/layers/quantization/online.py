"""Online quantization: the format of each product's weights, for the name that a user gives."""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quintet.config import SCHEMES
from quintet.interface.weights import FLOATS, PLAIN, CheckpointSlice, Matrix, ShardRange, StoredTensor, WeightFormat
from quintet.layers.quantization.checkpoint_config import ignored_modules, matches_module
from quintet.layers.quantization.formats import bitsandbytes, torchao
from quintet.ops.quantize import quantize
from quintet.ops.quantized import dequantized

GROUPS = (128, 64, 32)  # inputs that may share a scale, of floats that are quantized
E4M3 = torch.float8_e4m3fn
ONLINE = {name: WeightFormat(name, *numbers) for name, numbers in SCHEMES.items()} | {
    "fp8": WeightFormat("fp8", 8, 16, dtype=E4M3),
    "fp8a8": WeightFormat("fp8a8", 8, 8, dtype=E4M3),
}
FP8 = {  # vLLM's names; activations are in fp8 too
    "fp8_per_tensor": replace(ONLINE["fp8a8"], outputs_per_scale=0),
    "fp8_per_block": replace(ONLINE["fp8a8"], outputs_per_scale=128, group=128),
}
BLOCK = 64  # of bitsandbytes' 4 bits
# Of torchao's types: ours. Theirs of 8 bits have a scale for each output, ours for every group of one
TORCHAO = {
    "Int8WeightOnlyConfig": "int8", "Int8DynamicActivationInt8WeightConfig": "w8a8", "Int4WeightOnlyConfig": "int4",
    "Float8WeightOnlyConfig": "fp8", "Float8DynamicActivationFloat8WeightConfig": "fp8a8",
    "IntxWeightOnlyConfig": "int4",
}  # fmt: skip


@dataclass(frozen=True)
class OnlineQuantization:
    """A format for every product, or for those that names do not say otherwise of. None: it stays as it is."""

    name: str  # that the user gave
    format: WeightFormat | None
    head: WeightFormat | None = None
    by_module: tuple[tuple[str, WeightFormat | None], ...] = ()  # modules, or "re:" and a pattern of them
    ignored: tuple[str, ...] = ()

    def format_for(self, module: str) -> WeightFormat | None:
        """Returns the format for this module of the checkpoint."""
        if any(matches_module(each, module) for each in self.ignored):
            return None
        formats = [fmt for name, fmt in self.by_module if torchao.matches_entry(name, module)]
        return formats[0] if formats else self.format

    def without_activation_quantization(self) -> "OnlineQuantization":
        """For a device that multiplies no floats of 8 bits."""
        return replace(
            self,
            format=_float_activations(self.format),
            by_module=tuple((name, _float_activations(fmt)) for name, fmt in self.by_module),
        )


@dataclass(frozen=True)
class RoundedWeights:
    """Reads floats as what a format that the platform does not keep makes of them."""

    weight_format: WeightFormat

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        return {part.source: StoredTensor(part.stored_shape, FLOATS)}

    def format(self, shard: ShardRange) -> WeightFormat:
        return PLAIN

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        raise AssertionError("floats alone serve")

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        tensor = tensors[part.source].t() if part.transposed else tensors[part.source]
        held = tensor[slice(*shard.outputs), slice(*shard.inputs)]
        fmt = format_for_inputs(self.weight_format, held.shape[1])
        return held.float() if fmt.plain else dequantized(quantize(held, fmt))


def format_for_inputs(wanted: WeightFormat | None, inputs: int) -> WeightFormat:
    """For a product of so many inputs: with a smaller group where that divides them, plain where none does."""
    if wanted is None:
        return PLAIN
    if wanted.group == 0 or wanted.dtype is not None:  # floats have a short group at the end
        return wanted
    group = next((each for each in GROUPS if each <= wanted.group and inputs % each == 0), None)
    return PLAIN if group is None else replace(wanted, group=group)


def online_quantization(
    name: str, group: int | None = None, options: Mapping[str, Any] | None = None
) -> OnlineQuantization:
    """Returns the wish for a name and the group that a user gives; `options` are the quantization_config for
    bitsandbytes and torchao. ValueError for what cannot be made."""
    if name == "bitsandbytes":
        return _bitsandbytes(options or {})
    if name == "torchao":
        return _torchao(options)
    if name in FP8:
        return OnlineQuantization(name, FP8[name])
    fmt = ONLINE[name] if group is None else replace(ONLINE[name], group=group)
    if fmt.dtype is not None:
        return OnlineQuantization(name, fmt)  # heads stay, as in vLLM: logits show every error, and fp8's are large
    return OnlineQuantization(name, fmt, head=ONLINE["int8" if fmt.activations == 16 else "w8a8"])


def _float_activations(fmt: WeightFormat | None) -> WeightFormat | None:
    """In fp8 with activations as they are."""
    return fmt.float_activations if fmt is not None and fmt.kind == "fp8a8" else fmt


def _bitsandbytes(options: Mapping[str, Any]) -> OnlineQuantization:
    """nf4 in blocks of 64 by default, as in vLLM. Scales stay in float32: there is no double quantization."""
    skipped = ignored_modules(options, ("llm_int8_skip_modules",))
    if options.get("load_in_8bit"):
        return OnlineQuantization("bitsandbytes", WeightFormat("int8", 8, 16, 128), ignored=skipped)
    table = str(options.get("bnb_4bit_quant_type", "nf4"))
    if table not in bitsandbytes.TABLES:
        raise ValueError(f"bnb_4bit_quant_type={table!r} is not one of {', '.join(bitsandbytes.TABLES)}")
    fmt = WeightFormat("table4", 4, 16, BLOCK, codebook=bitsandbytes.TABLES[table])
    return OnlineQuantization("bitsandbytes", fmt, ignored=skipped)


def _torchao(options: Mapping[str, Any] | None) -> OnlineQuantization:
    """Returns the wish for a configuration as torchao's config_to_dict() writes it."""
    if options is None:
        raise ValueError(
            "quantization='torchao' quantizes by a configuration: give torchao's config_to_dict() of it as JSON, "
            "hf_overrides={'quantization_config_dict_json': ...}, or in a file, 'quantization_config_file'"
        )
    named = [(name, None if entry is None else _torchao_format(*entry)) for name, entry in torchao.entries(options)]
    rest = dict(named).get("_default")
    others = tuple(each for each in named if each[0] != "_default")
    return OnlineQuantization("torchao", rest, by_module=others, ignored=ignored_modules(options))


def _torchao_format(kind: str, data: Mapping[str, Any]) -> WeightFormat:
    """Returns the format for one of torchao's types; ValueError for those that are not made here."""
    width = torchao.enum_name(data.get("weight_dtype"))
    if kind not in TORCHAO or (kind == "IntxWeightOnlyConfig" and width not in ("int4", "int8")):
        raise ValueError(
            f"torchao's {kind} {width} is not made while loading; quintet makes {', '.join(TORCHAO)} (Intx: int4, int8)"
        )
    fmt = ONLINE["int8" if width == "int8" else TORCHAO[kind]]
    granularity = data.get("granularity")
    inner = granularity.get("_data") if isinstance(granularity, Mapping) else None
    group = data.get("group_size") or (inner.get("group_size") if isinstance(inner, Mapping) else None)
    if fmt.group == 0 or group is None:
        return fmt
    if group not in GROUPS:
        raise ValueError(f"torchao's {kind} with groups of {reprlib.repr(group)}; quintet makes them of 32, 64 and 128")
    return replace(fmt, group=group)


def online_options(overrides: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns settings for online quantization in hf_overrides, as in vLLM; None without any. ValueError if invalid."""
    text, whole = overrides.get("quantization_config_dict_json"), overrides.get("quantization_config")
    if text is None:
        return whole if isinstance(whole, Mapping) else None
    try:
        options = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"hf_overrides['quantization_config_dict_json'] is no JSON: {error}") from None
    if not isinstance(options, Mapping):
        raise ValueError("hf_overrides['quantization_config_dict_json'] is no object of torchao's config_to_dict()")
    return {"quant_type": {"default": options}}
