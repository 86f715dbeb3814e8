"""Reads GPTQ's quantization_config, as AutoGPTQ, GPTQModel, optimum and AutoRound write it."""

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quintet.interface.weights import StoredTensor
from quintet.layers.quantization.packed_schemes import PackedPlan, PackingRule, PackingScheme, flattened, scheme_of

HEAD = "lm_head"
VERSIONS = ("gptq", "gptq_v2", "gptq_p", "marlin")
UNSUPPORTED_FORMATS = {
    "bitblas": "its bits are in the order that BitBLAS chose for the GPU that wrote them",
    "qqq": "its scales are made for 8-bit activations, and its kernels' own order",
}
PLANAR = (5, 6, 7)  # bits that GPTQModel packs in planes whatever the format is


def read(
    config: Mapping[str, Any], stored_tensors: Callable[[], Mapping[str, StoredTensor]]
) -> tuple[PackedPlan, bool]:
    """The plan, and whether it knows of heads. ValueError says what in the configuration is of another kind."""
    version, scheme = _version(config), scheme_of(config, "GPTQ")
    if scheme is None:
        raise ValueError(f"the checkpoint is of GPTQ with {config.get('bits')} bits; quintet reads 2 to 8")
    plan = PackedPlan(scheme, (*_dynamic(config, scheme), *_blocks_only(config)), planar_bits=PLANAR)
    if version == "marlin":
        plan = replace(plan, layout=version)
        check_marlin(scheme)
    plan = replace(plan, zeros_minus_one=version == "gptq", planar=version == "gptq_p").with_files(stored_tensors())
    return plan, config.get(HEAD) is True or plan.has_rule_for(HEAD)


def check_marlin(scheme: PackingScheme) -> None:
    """ValueError for numbers that Marlin's kernels do not take."""
    if scheme.bits != 4 or scheme.group not in (0, 128) or scheme.act_order:
        raise ValueError(
            f"the checkpoint is of Marlin's layout with {scheme.bits} bits, group_size {scheme.group or -1} and "
            f"desc_act {scheme.act_order}; that has 4 bits, groups of 128 or one (-1) and no order: correct config.json"
        )


def _version(config: Mapping[str, Any]) -> str:
    name = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    version = "marlin" if config.get("is_marlin_format") is True else name
    if version not in VERSIONS:
        why = UNSUPPORTED_FORMATS.get(version, f"quintet reads {', '.join(VERSIONS)}")
        raise ValueError(
            f"the checkpoint is of GPTQ with checkpoint_format {reprlib.repr(version)}: {why}; use one that was "
            "written as gptq or gptq_v2, or the model's original"
        )
    pack = str(config.get("pack_dtype") or "int32").removeprefix("torch.")
    if pack != "int32":
        raise ValueError(
            f"the checkpoint is of GPTQ with pack_dtype {reprlib.repr(pack)}; quintet reads int32, which writers "
            "choose if they are not asked for another: use one of those, or the model's original"
        )
    return version


def _dynamic(config: Mapping[str, Any], scheme: PackingScheme) -> list[PackingRule]:
    """GPTQModel's: "-:pattern" for what stayed in floats, "+:pattern" or "pattern" for other numbers."""
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise ValueError(f"quantization_config's dynamic is {reprlib.repr(rules)}, not an object of patterns")
    return [_rule(pattern, entry, scheme) for pattern, entry in rules.items()]


def _rule(pattern: str, entry: Any, scheme: PackingScheme) -> PackingRule:
    sign, plain = (pattern[0], pattern[2:]) if pattern[:2] in ("+:", "-:") else ("+", pattern)
    if sign == "-":
        return PackingRule(plain, None)
    if not isinstance(entry, Mapping):
        raise ValueError(f"quantization_config's dynamic has {reprlib.repr(entry)} for {reprlib.repr(pattern)}")
    return PackingRule(plain, scheme_of(entry, "GPTQ", scheme))


def _blocks_only(config: Mapping[str, Any]) -> list[PackingRule]:
    """Leaves all other modules in floats, where modules_in_block_to_quantize names some."""
    names = list(flattened(config.get("modules_in_block_to_quantize")))
    if wrong := [each for each in names if not isinstance(each, str)]:
        raise ValueError(f"modules_in_block_to_quantize names {reprlib.repr(wrong[0])}, which is no module")
    ends = "|".join(re.escape(each) for each in [*names, HEAD])
    return [PackingRule(rf"(?!.*({ends})$)", None)] if names else []
