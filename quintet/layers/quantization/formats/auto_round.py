"""Reads AutoRound's quantization_config, under its own name and under Neural Compressor's (inc).

Matrices are packed as GPTQ's or AWQ's; `packing_format` says which. Its own has zero points as they are, without g_idx.
"""

import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quintet.interface.weights import StoredTensor
from quintet.layers.quantization.formats.gptq_config import HEAD
from quintet.layers.quantization.packed_schemes import PackedPlan, PackingRule, PackingScheme, flattened, scheme_of

NAME = "AutoRound"
DEFAULT = "auto_round:auto_gptq"
GPTQ, AWQ = ("auto_round:auto_gptq", "auto_round:gptq"), ("auto_round:auto_awq", "auto_round:awq")
RAW = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:tritonv2", "auto_round:marlin")
INTEGERS = ("int", "int_sym", "int_asym")
FLOATS = ("float", "fp", "fp16", "bf16", "fp32")


def read(
    config: Mapping[str, Any], stored_tensors: Callable[[], Mapping[str, StoredTensor]]
) -> tuple[PackedPlan, bool]:
    """The plan, and whether it knows of heads. ValueError says what in the configuration is of another kind."""
    layout, first = _packing(config)
    scheme = _scheme(config, None)
    rules = tuple(_module_rules(config, scheme)) if scheme else ()
    odd = [each.bits for each in (scheme, *(rule.scheme for rule in rules)) if each and each.bits != 4]
    if scheme is None or (layout == "awq" and odd):
        raise ValueError(
            f"the checkpoint is of {NAME} with {odd[0] if odd else config.get('bits')} bits, packed as {layout}; "
            "quintet reads 2 to 8 as gptq, 4 as awq: export it as one of these"
        )
    plan = PackedPlan(scheme, rules, _blocks(config), layout, first).with_files(stored_tensors())
    return plan, plan.has_rule_for(HEAD)


def _packing(config: Mapping[str, Any]) -> tuple[str, bool]:
    """PackedPlan.layout and .first."""
    packing = str(config.get("packing_format") or config.get("backend") or DEFAULT).lower()
    fmt = ":".join(packing.split(":")[:2])  # the first versions named kernels too
    if fmt == "auto":
        fmt = DEFAULT
    if fmt not in (*GPTQ, *AWQ, *RAW):
        raise ValueError(
            f"the checkpoint is of {NAME} with packing_format {reprlib.repr(packing)}; quintet reads auto_round, "
            "auto_round:auto_gptq and auto_round:auto_awq: export it as one of these, or as llm_compressor"
        )
    return "awq" if fmt in AWQ else "gptq", fmt in GPTQ


def _scheme(config: Mapping[str, Any], otherwise: PackingScheme | None) -> PackingScheme | None:
    """ValueError where weights are no whole numbers, or activations are quantized too."""
    kind, activations = str(config.get("data_type") or "int").lower(), config.get("act_bits") or 16
    bits = config.get("bits", otherwise and otherwise.bits)
    if kind in FLOATS and bits in (16, 32):
        return None
    if kind not in INTEGERS or not isinstance(activations, int) or activations < 16:
        raise ValueError(
            f"the checkpoint is of {NAME} with data_type {reprlib.repr(kind)} and act_bits {reprlib.repr(activations)}"
            "; quintet reads int with activations as they are: export it as llm_compressor"
        )
    return scheme_of(config, NAME, otherwise)


def _module_rules(config: Mapping[str, Any], scheme: PackingScheme) -> list[PackingRule]:
    """Other numbers for modules by name, which go first, or by pattern."""
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(each, Mapping) for each in extra.values()):
        raise ValueError(f"quantization_config's extra_config is {reprlib.repr(extra)}, not an object of objects")
    rules = [PackingRule(name, _scheme(each, scheme), exact=True) for name, each in extra.items()]
    return rules + [replace(rule, exact=False, anywhere=True) for rule in rules if _is_pattern(rule.pattern)]


def _is_pattern(name: str) -> bool:
    return any(each in name for each in "*+?^$|()[]\\")


def _blocks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the prefixes of the names of modules that were quantized."""
    blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names")
    if isinstance(blocks, list) and all(isinstance(each, list) for each in blocks):
        blocks = [os.path.commonprefix([str(name) for name in each]).rstrip(".") for each in blocks]
    return tuple(name.strip() for each in flattened(blocks) for name in str(each).split(","))
