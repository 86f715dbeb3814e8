"""AMD Quark's checkpoints: a scheme for all products, others for those that a pattern names."""

from collections.abc import Mapping
from typing import Any

import torch

from quintet.interface.weights import StoredTensor, WeightReader
from quintet.layers.quantization import fp4_fp8 as minifloats
from quintet.layers.quantization.block_scales import BlockScales
from quintet.layers.quantization.formats.quark_int4 import QuarkInt4
from quintet.layers.quantization.fp4_fp8 import BLOCK, E2M3, E3M2, SMALL_BLOCK, Float6Reader, Float8Weights
from quintet.layers.quantization.integers import IntWeights
from quintet.layers.quantization.module_patterns import (
    CheckpointModules,
    ListedPlan,
    ModuleNames,
    regex_names,
    wildcard_names,
)

FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
MAX_GROUP = 2**20  # inputs of a group
SUPPORTED = (
    "fp8_e4m3, fp8_e5m2, int8 (per_tensor, per_channel), int4, uint4, fp4 (MX, NVFP4), fp6_e2m3 and fp6_e3m2 (MX)"
)
IGNORED_SUFFIXES = (
    ".input_scale", ".input_scale_2", ".input_zero_point", ".output_scale", ".output_zero_point", ".weight_zero_point",
    ".k_scale", ".v_scale", ".q_scale", ".prob_output_scale",
)  # fmt: skip


def plan(config: Mapping[str, Any], files: Mapping[str, StoredTensor]) -> tuple[ListedPlan, tuple[str, ...]]:
    """Returns the plan of a quantization_config, and notes for the user. ValueError says what in it is not read."""
    export = config.get("export") or {}
    if not isinstance(export, Mapping) or export.get("weight_format", "real_quantized") != "real_quantized":
        raise ValueError("the checkpoint is of Quark's fake_quantized weights; export them with real_quantized")
    _refuse_rotations(config)
    reordered = export.get("pack_method", "reorder") == "reorder"
    layers, chosen = config.get("layer_quant_config") or {}, []
    notes: set[str] = set()
    if not isinstance(layers, Mapping):
        raise ValueError(f"Quark's layer_quant_config is {layers!r:.60}, not an object; correct config.json")
    for name, entry in layers.items():
        names = wildcard_names([name], "Quark's layer_quant_config")
        chosen.append((names, _reader(entry, f"{str(name)[:80]}", reordered, notes)))
    rest = _reader(config.get("global_quant_config"), "the checkpoint", reordered, notes)
    left_out = config.get("exclude") or []
    if not isinstance(left_out, list):
        raise ValueError(f"Quark's exclude is {left_out!r:.60}, not a list of names")
    patterns = regex_names([each for each in left_out if str(each).startswith("re:")], "Quark's exclude")
    named = wildcard_names([each for each in left_out if not str(each).startswith("re:")], "Quark's exclude")
    ignored = ModuleNames(named.exact, named.patterns + patterns.patterns)
    return ListedPlan(tuple(chosen), rest, ignored, CheckpointModules(files)), tuple(sorted(notes))


def _refuse_rotations(config: Mapping[str, Any]) -> None:
    """ValueError where activations are to be rotated while the model runs."""
    algorithms = config.get("algo_config") or []
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        known = each if isinstance(each, Mapping) else {"name": str(each)}
        online = [key for key, value in known.items() if value is True and ("online" in key or key in ("r3", "r4"))]
        if online:
            raise ValueError(
                f"the checkpoint is of Quark's {str(known.get('name'))[:40]} with {online[0][:40]}: it rotates "
                "activations while it runs, which quintet does not; use one whose rotations are all in its weights"
            )


def _reader(entry: object, where: str, reordered: bool, notes: set[str]) -> WeightReader | None:
    """Returns the reader of a layer's configuration; None where its weights are in floats."""
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} has Quark's configuration {entry!r:.60}, which is no object")
    weight, inputs = entry.get("weight"), entry.get("input_tensors")
    if weight is None:
        return None
    known = inputs[0] if isinstance(inputs, list) and inputs else inputs
    rounds = str(known.get("dtype")) if isinstance(known, Mapping) else ""
    found = (
        _two_stage_reader(weight, where)
        if isinstance(weight, list)
        else _one_stage_reader(weight, where, rounds, reordered)
    )
    if rounds == "int8" and isinstance(found, IntWeights):
        notes.add("activations are quantized as they come, each token by itself")
    elif rounds:
        notes.add(f"activations stay in the model's type, where the checkpoint means {rounds[:20]}")
    return found


def _two_stage_reader(stages: list[Any], where: str) -> WeightReader:
    """Scales that are quantized too: NVFP4."""
    dtypes = [each.get("dtype") if isinstance(each, Mapping) else None for each in stages]
    if dtypes != ["fp4", "fp8_e4m3"] or stages[0].get("group_size") != SMALL_BLOCK:
        raise ValueError(f"{where} has Quark's weights in stages of {dtypes!r:.60}; quintet reads {SUPPORTED}")
    return minifloats.nvfp4("weight", "weight_scale_2", divides=False)


def _one_stage_reader(entry: object, where: str, rounds: str, reordered: bool) -> WeightReader:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} has Quark's weights {entry!r:.60}, which is no object")
    dtype, scheme, group = str(entry.get("dtype")), str(entry.get("qscheme")), entry.get("group_size")
    lie = {"per_tensor": BlockScales(0, 0), "per_channel": BlockScales(1, 0)}.get(scheme)
    if lie is not None and scheme == "per_channel" and entry.get("ch_axis") not in (0, None):
        raise ValueError(f"{where} has Quark's scales along the axis {entry.get('ch_axis')!r:.20}; quintet reads 0")
    if isinstance(dtype, str) and dtype in FLOAT8 and lie is not None:
        return Float8Weights(lie, FLOAT8[dtype])
    if dtype == "int8" and lie is not None:
        return IntWeights(8, lie, entry.get("symmetric") is False, 8 if rounds == "int8" else 16)
    if dtype in ("int4", "uint4") and scheme in ("per_group", "per_channel"):
        size = group if scheme == "per_group" else 0
        if not isinstance(size, int) or size % 16 or not (scheme == "per_channel" or 0 < size <= MAX_GROUP):
            raise ValueError(f"{where} has Quark's group_size {group!r:.40}, which is no multiple of 16")
        if dtype == "int4" and entry.get("symmetric") is False:
            raise ValueError(f"{where} has Quark's int4 with zero points; quintet reads uint4 with them")
        return QuarkInt4(size, dtype == "int4", reordered)
    if scheme == "per_group" and group == BLOCK and entry.get("scale_format") == "e8m0":
        floats: dict[str, WeightReader] = {
            "fp6_e2m3": Float6Reader(E2M3),
            "fp6_e3m2": Float6Reader(E3M2),
            "fp4": minifloats.mxfp4("weight"),
        }
        if isinstance(dtype, str) and dtype in floats:
            return floats[dtype]
    raise ValueError(f"{where} has Quark's weights as {dtype!r:.40} {scheme!r:.40}; quintet reads {SUPPORTED}")
