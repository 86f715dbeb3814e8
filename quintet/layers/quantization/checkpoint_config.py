"""Quantization of a checkpoint (quantization_config in config.json), and the readers of its products."""

import functools
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quintet.interface.weights import StoredTensor, WeightReader
from quintet.layers.quantization import fp4_fp8 as minifloats
from quintet.layers.quantization.formats import (
    auto_round,
    awq_config,
    bitsandbytes,
    fp8,
    gguf,
    gptq_config,
    hqq,
    modelopt,
    quark,
    torchao,
)
from quintet.layers.quantization.formats import compressed_tensors as compressed
from quintet.layers.quantization.formats import compressed_tensors_config as compressed_plan
from quintet.layers.quantization.module_patterns import ListedPlan, PathParts, path_parts, regex_names, wildcard_names
from quintet.layers.quantization.packed_schemes import PackedPlan


class ModulePlan(Protocol):
    """Plan of a checkpoint: how each module is kept. Hashable; knows no device."""

    def reader(self, module: str) -> WeightReader | None:
        """Returns the reader of a module's weight; None if it holds floats. ValueError says why it cannot be read."""


@dataclass(frozen=True)
class CheckpointQuantization:
    """A checkpoint's quantization."""

    method: str
    plan: ModulePlan
    heads: bool = False  # the plan covers heads and embeddings too; False: they stayed in floats
    ignored_suffixes: tuple[str, ...] = ()  # ends of the names of tensors that say nothing to us
    notes: tuple[str, ...] = ()  # what is computed otherwise than the checkpoint means it, for users
    activations: int | None = None  # bits that its products take of them, if not those of its formats


@dataclass(frozen=True)
class UniformPlan:
    """The same for every module but those that were left out."""

    weight_reader: WeightReader
    ignored: tuple[str, ...] = ()  # names of modules, or their beginnings or ends; ".*" for anything between

    def reader(self, module: str) -> WeightReader | None:
        return None if self._left.has(module) else self.weight_reader

    @functools.cached_property
    def _left(self) -> PathParts:
        return path_parts(self.ignored)


@dataclass(frozen=True)
class ExcludingPlan:
    """A plan, but for modules that were left out, as Everywhere has it."""

    plan: ModulePlan
    ignored: tuple[str, ...] = ()

    def reader(self, module: str) -> WeightReader | None:
        return None if self._left.has(module) else self.plan.reader(module)

    @functools.cached_property
    def _left(self) -> PathParts:
        return path_parts(self.ignored)


GetStoredTensors = Callable[
    [], Mapping[str, StoredTensor]
]  # the tensors of a checkpoint's files, by the modules' names; none if random
ConfigReader = Callable[[Mapping[str, Any], GetStoredTensors], CheckpointQuantization]


def _uniform(method: str, read: Callable[[Mapping[str, Any]], WeightReader]) -> ConfigReader:
    return lambda config, there: CheckpointQuantization(method, UniformPlan(read(config), ignored_modules(config)))


def _packed(
    method: str, read: Callable[[Mapping[str, Any], GetStoredTensors], tuple[PackedPlan, bool]]
) -> ConfigReader:
    def quantized(config: Mapping[str, Any], there: GetStoredTensors) -> CheckpointQuantization:
        plan, heads = read(config, there)
        return CheckpointQuantization(method, ExcludingPlan(plan, ignored_modules(config)), heads, (".g_idx",))

    return quantized


def _compressed(config: Mapping[str, Any], there: GetStoredTensors) -> CheckpointQuantization:
    known, notes = compressed_plan.plan(config, there())
    return CheckpointQuantization(compressed.NAME, known, True, compressed.IGNORED_SUFFIXES, notes)


def _fp8(config: Mapping[str, Any], there: GetStoredTensors) -> CheckpointQuantization:
    known = ExcludingPlan(fp8.read(config, there()), ignored_modules(config))
    return CheckpointQuantization("fp8", known, ignored_suffixes=fp8.IGNORED_SUFFIXES, notes=fp8.notes(config))


def _fbgemm(config: Mapping[str, Any], there: GetStoredTensors) -> CheckpointQuantization:
    known = ExcludingPlan(fp8.Fp8Plan(files=there()), ignored_modules(config))
    return CheckpointQuantization(
        "fbgemm_fp8", known, ignored_suffixes=fp8.IGNORED_SUFFIXES, notes=(fp8.ACTIVATIONS_NOTE,)
    )


def _modelopt(config: Mapping[str, Any], there: GetStoredTensors) -> CheckpointQuantization:
    return CheckpointQuantization(
        "modelopt", modelopt.plan(config, there()), True, modelopt.IGNORED_SUFFIXES, (modelopt.NOTE,)
    )


def _quark(config: Mapping[str, Any], there: GetStoredTensors) -> CheckpointQuantization:
    known, notes = quark.plan(config, there())
    return CheckpointQuantization("quark", known, True, quark.IGNORED_SUFFIXES, notes)


def _mxfp4(config: Mapping[str, Any], there: GetStoredTensors) -> CheckpointQuantization:
    """gpt-oss: its experts alone."""
    experts = regex_names([r"re:.*\.experts\..*"], "a list")
    return CheckpointQuantization(
        "mxfp4", ListedPlan(((experts, minifloats.gpt_oss()),), None, wildcard_names(ignored_modules(config), "a list"))
    )


def _bitsandbytes(config: Mapping[str, Any], there: GetStoredTensors) -> CheckpointQuantization:
    skipped = ignored_modules(config, ("llm_int8_skip_modules",))
    tensors = there()
    known = bitsandbytes.plan(config, tensors) if tensors else UniformPlan(bitsandbytes.reader(config), skipped)
    eights = any(name.endswith(".SCB") for name in tensors)
    return CheckpointQuantization("bitsandbytes", known, bool(tensors), notes=(bitsandbytes.ACTIVATIONS_NOTE,) * eights)


def _hqq(config: Mapping[str, Any], there: GetStoredTensors) -> CheckpointQuantization:
    ignored_modules(config, ("skip_modules",))
    return CheckpointQuantization("hqq", hqq.plan(config, there(), matches_module), True, hqq.IGNORED_SUFFIXES)


def _torchao(config: Mapping[str, Any], there: GetStoredTensors) -> CheckpointQuantization:
    ignored_modules(config)
    return CheckpointQuantization("torchao", torchao.plan(config, there()), True)


# quant_method -> what reads it. One that is not here is refused before a file is opened.
METHODS: Mapping[str, ConfigReader] = {
    "auto-round": _packed("auto-round", auto_round.read),
    "awq": _uniform("awq", awq_config.read),
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _packed("gptq", gptq_config.read),
    "gguf": lambda config, there: _gguf(gguf.read(config)),
    "hqq": _hqq,
    "inc": _packed("inc", auto_round.read),
    "intel/auto-round": _packed("auto-round", auto_round.read),
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "quark": _quark,
    "torchao": _torchao,
}
IGNORED = ("modules_to_not_convert", "ignored_layers")  # where a configuration lists what stayed in floats


def read_quantization_config(
    config: Mapping[str, Any] | None, stored_tensors: GetStoredTensors = dict
) -> CheckpointQuantization | None:
    """Reads a quantization_config; None where there is none. ValueError says what in it is not understood."""
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config is {reprlib.repr(config)}, not an object; correct config.json")
    method = _method(config)
    if method not in METHODS:
        raise ValueError(
            f"the checkpoint is quantized by {method}, which quintet does not read; it reads {_known_methods()}, and "
            "floats, "
            "which quantization= makes smaller while they are loaded: use the model's original, or one of these"
        )
    try:
        return METHODS[method](config, stored_tensors)
    except ValueError as error:  # a value of the file's that it quotes may have any letters
        raise ValueError(" ".join(str(error).split())) from None


def _gguf(types: gguf.GgufPlan) -> CheckpointQuantization:
    """Quantization of a GGUF file: llama.cpp multiplies all quantized types with activations in 8 bits."""
    notes = ("activations in 8 bits, as llama.cpp has them, where the platform can; activation_bits=16 keeps them",)
    return CheckpointQuantization(f"gguf ({types.type_counts})", types, heads=True, notes=notes, activations=8)


def ignored_modules(config: Mapping[str, Any], keys: tuple[str, ...] = IGNORED) -> tuple[str, ...]:
    """The names of modules that a configuration leaves out; ValueError for what is none."""
    lists = [config.get(key) or [] for key in keys]
    names = [name for each in lists for name in (each if isinstance(each, list | tuple) else [each])]
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"quantization_config leaves out {reprlib.repr(name)}, which is no module's name")
    path_parts(names)
    return tuple(names)


def matches_module(name: str, module: str) -> bool:
    """True if a configuration's module name or pattern means this module. For many names, use parts()."""
    return _single_name(name).has(module)


@functools.cache
def _single_name(name: str) -> PathParts:
    return path_parts([name])


def _method(config: Mapping[str, Any]) -> str:
    """The first checkpoints of bitsandbytes do not name it."""
    unnamed = "bitsandbytes" if config.get("load_in_8bit") or config.get("load_in_4bit") else "without a name"
    return " ".join(str(config.get("quant_method") or unnamed).lower().split())[:80]


def _known_methods() -> str:
    return ", ".join(sorted(METHODS))


_NAME = re.compile(r"(re:)?[\^]?[\w\-.*\\]+\$?")  # of a module, or one with ".*" in it
