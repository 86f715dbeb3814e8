"""Plan of a compressed-tensors checkpoint: how each module is held."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quintet.interface.weights import StoredTensor, WeightReader
from quintet.layers.quantization.formats.compressed_tensors import (
    FLOAT_FORMATS,
    NAME,
    ConfigGroup,
    notes,
    parse_arguments,
    reader,
    refuse_unsupported,
    targeted_modules,
)
from quintet.layers.quantization.integers import IntWeights
from quintet.layers.quantization.module_patterns import CheckpointModules, ModuleNames, regex_names


@dataclass(frozen=True, eq=False)
class ConfigGroupsPlan:
    """The most precise name of a module wins: its own, a pattern, then all products. Heads and others outside the
    blocks are among these only if their files say so."""

    groups: tuple[ConfigGroup, ...]
    ignored: ModuleNames
    modules: CheckpointModules = CheckpointModules()

    def reader(self, module: str) -> WeightReader | None:
        names = self.modules.names(module)
        if self.ignored.has(names):
            return None
        exact = [each for each in self.groups if any(name in each.targets.exact for name in names)]
        by_name = exact or [each for each in self.groups if each.targets.has(names)]
        of_all = [each for each in self.groups if each.all_linear and self.modules.is_inside(module)]
        found = next(iter(by_name or of_all), None)
        return None if found is None else self._settled(found.reader, module)

    def _settled(self, known: WeightReader | None, module: str) -> WeightReader | None:
        """With what the files alone say: whether groups have an order of their own."""
        order = self.modules.files.get(f"{module}.weight_g_idx")
        if not isinstance(known, IntWeights) or order is None or not order.shape:
            return known
        return replace(known, act_order_inputs=order.shape[0])


def plan(config: Mapping[str, Any], files: Mapping[str, StoredTensor]) -> tuple[ConfigGroupsPlan, tuple[str, ...]]:
    """Returns the plan of a quantization_config, and notes for the user. ValueError says what in it is not read."""
    refuse_unsupported(config)
    entries, groups, remarks = config.get("config_groups") or {}, [], []
    if not isinstance(entries, Mapping):
        raise ValueError(f"config_groups is {entries!r:.60}, not an object; correct config.json")
    for name, scheme in entries.items():
        where = f"config_groups' {reprlib.repr(name)}"
        if not isinstance(scheme, Mapping):
            raise ValueError(f"{where} names a preset, not a scheme; write out its weights and input_activations")
        weights = parse_arguments(scheme.get("weights"), f"{where}: weights")
        inputs = parse_arguments(scheme.get("input_activations"), f"{where}: input_activations")
        targets, everything = targeted_modules(scheme.get("targets"), where)
        if weights is None:
            groups.append(ConfigGroup(targets, everything, None))
            continue
        fmt = str(scheme.get("format") or config.get("format") or "").lower()
        if fmt in FLOAT_FORMATS:
            raise ValueError(
                f"{where} has the format {fmt or 'None'}: its weights are floats that were never packed; save the "
                "model with save_compressed=True, or set quantization_config to null with hf_overrides"
            )
        groups.append(ConfigGroup(targets, everything, reader(weights, inputs, fmt, where)))
        remarks += notes(weights, inputs)
    ignored = config.get("ignore") or []
    if not isinstance(ignored, list | tuple):
        raise ValueError(f"{NAME}'s ignore is {ignored!r:.60}, not a list of names")
    return ConfigGroupsPlan(tuple(groups), regex_names(ignored, f"{NAME}'s ignore"), CheckpointModules(files)), tuple(
        dict.fromkeys(remarks)
    )
