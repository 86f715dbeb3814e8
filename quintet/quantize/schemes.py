"""Schemes that a checkpoint can be quantized to: compressed-tensors' presets by their names."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from quintet.common.suggestions import unknown_name_error

Entries = dict[str, Any]
FLOAT8_MAX = 448.0  # of float8_e4m3fn


@dataclass(frozen=True)
class Scheme:
    """Scheme of quantization: the format of the products' weights, and of their inputs.

    A scale is of `group` inputs of an output (0: of all), of a `block` of the matrix, or of the matrix (`whole`).
    """

    name: str
    bits: int
    group: int = 0
    symmetric: bool = True
    floats: bool = False  # float8_e4m3fn
    block: tuple[int, int] | None = None
    per_tensor: bool = False
    activations: str | None = None  # what has a scale, if they get the weights' sort: "token", "group" or "tensor"

    @property
    def packed(self) -> bool:
        """True if several values stand in an int32."""
        return self.activations is None and not self.floats

    @property
    def format(self) -> str:
        """compressed-tensors' word."""
        return "pack-quantized" if self.packed else "float-quantized" if self.floats else "int-quantized"

    @property
    def low(self) -> float:
        return -FLOAT8_MAX if self.floats else -(2 ** (self.bits - 1))

    @property
    def high(self) -> float:
        return FLOAT8_MAX if self.floats else 2 ** (self.bits - 1) - 1

    @property
    def unit(self) -> int:
        """Number that a product's inputs must be a multiple of."""
        return self.group or (32 // self.bits if self.packed else 1)

    def config(self, ignored: list[str], act_order: bool = False) -> Entries:
        """quantization_config, as compressed-tensors writes it."""
        kind = "float" if self.floats else "int"
        weights = _numbers(self.bits, kind, self._strategy, self.group or None)
        weights |= {"symmetric": self.symmetric, "dynamic": False}
        weights |= {"block_structure": list(self.block) if self.block else None, "observer": "minmax"}
        weights["actorder"] = "static" if act_order else None
        inputs = None
        if self.activations is not None:
            inputs = _numbers(8, kind, self.activations, 128 if self.activations == "group" else None)
            inputs |= {"symmetric": True, "dynamic": self.activations != "tensor", "block_structure": None}
            inputs |= {"actorder": None, "observer": "static_minmax" if self.activations == "tensor" else None}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "config_groups": {"group_0": {**group, "format": self.format}},
            "ignore": ignored,
        }

    @property
    def _strategy(self) -> str:
        if self.block:
            return "block"
        return "tensor" if self.per_tensor else "group" if self.group else "channel"


def _numbers(bits: int, kind: str, strategy: str, group: int | None) -> Entries:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group, "observer_kwargs": {}}


SCHEMES = {
    each.name: each
    for each in (
        Scheme("W4A16", 4, 128),
        Scheme("W4A16_ASYM", 4, 128, symmetric=False),
        Scheme("W8A16", 8, 128),
        Scheme("W8A8", 8, activations="token"),
        Scheme("W4A8", 4, 128, activations="token"),
        Scheme("FP8", 8, floats=True, per_tensor=True, activations="tensor"),
        Scheme("FP8_DYNAMIC", 8, floats=True, activations="token"),
        Scheme("FP8_BLOCK", 8, floats=True, block=(128, 128), activations="group"),
    )
}


def scheme(name: str, group: int | None = None, others: Iterable[str] = ()) -> Scheme:
    """By name, in any case; with this group where the scheme has groups, -1 for one over all inputs. `others` are names
    that might have been meant."""
    found = SCHEMES.get(name.upper().replace("-", "_"))
    if found is None:
        raise ValueError(unknown_name_error("scheme", name, [*SCHEMES, *others]))
    if group is None:
        return found
    if not found.group:
        raise ValueError(f"group_size={group} with scheme {found.name}, which has no groups; leave it out")
    if group != -1 and (group < 16 or group % 16):
        raise ValueError(f"group_size={group} must be a multiple of 16, or -1 for all inputs of an output")
    return replace(found, group=max(group, 0))
