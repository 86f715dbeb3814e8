"""Chooses the weight formats (quantization) of a model: as requested, as its checkpoint has them, as the device can."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quintet.common.json_files import read_object
from quintet.config import ONLINE, WRITTEN, EngineConfig
from quintet.engine.executor.worker import Worker
from quintet.hub.hf_overrides import METHODS_WITH_OPTIONS, QUANTIZATION_ENTRIES, requested_quantization
from quintet.interface.platform import Capabilities
from quintet.interface.weights import Weight
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.quantization.checkpoint_config import (
    CheckpointQuantization,
    GetStoredTensors,
    read_quantization_config,
)
from quintet.layers.quantization.online import (
    OnlineQuantization,
    RoundedWeights,
    format_for_inputs,
    online_options,
    online_quantization,
)
from quintet.model_loader.loader import declared_weights
from quintet.ops.registry import of_kind

ACT_ORDER_NOTE = "experts in orders of their own (act-order) are dequantized while they are loaded"
FALLBACK_FORMATS = {"table4": "int4", "fp8": "int8", "fp8a8": "w8a8", "w4a8": "int4", "w8a8": "int8", "int4": "int8"}


class TargetPlatform(NamedTuple):
    """The platform that the model is for."""

    name: str
    facts: Capabilities


def resolve_quantization(
    config: EngineConfig, hf_config: Any, where: TargetPlatform, there: GetStoredTensors, beside: Any = None
) -> QuantizationPlan:
    """ValueError if what was asked for, or what the checkpoint says, cannot be read or made here. `beside` counts where
    config.json says nothing."""
    name = requested_quantization(config)
    places = [(each, key) for each in (hf_config, hf_config.get_text_config()) for key in QUANTIZATION_ENTRIES]
    entry = next((entry for each, key in places if (entry := getattr(each, key, None))), None)
    entry = entry if any(hasattr(each, key) for each, key in places) else beside
    found = read_quantization_config(entry, there)
    if found is not None:
        _check_name(name, found, entry)
        return QuantizationPlan(None, found, where.facts.weight_formats, config.activation_bits or found.activations)
    if name is None:
        if config.activation_bits is not None:
            raise ValueError(
                f"activation_bits={config.activation_bits} is for quantized weights, and this checkpoint holds floats; "
                "set quantization, or leave it out"
            )
        return QuantizationPlan(None, None, where.facts.weight_formats)
    if name not in ONLINE:
        raise ValueError(
            f"quantization={name!r} is of checkpoints that are quantized, and config.json says nothing of it; leave it "
            f"out, or let floats be quantized while they are loaded by one of {', '.join(ONLINE)}"
        )
    wanted = online_quantization(
        name, config.quantization_group_size, _options(config) if name in METHODS_WITH_OPTIONS else None
    )
    return QuantizationPlan(_supported_format(wanted, where), None, where.facts.weight_formats, config.activation_bits)


def _check_name(name: str | None, found: CheckpointQuantization, entry: Any) -> None:
    """ValueError where a name was given that is not the checkpoint's."""
    held = {found.method, str(entry.get("quant_method") or found.method).lower()}
    if name is None or held & {*WRITTEN.get(name, ()), name}:
        return
    kind = "is for checkpoints in floats, and this one" if name not in WRITTEN else "is not this checkpoint's, which"
    raise ValueError(f"quantization={name!r} {kind} is quantized by {found.method}; leave it out")


def _options(config: EngineConfig) -> Mapping[str, Any] | None:
    given = config.hf_overrides or {}
    if callable(given):
        return online_options({})
    file = given.get("quantization_config_file")
    if file is None:
        return online_options(given)
    if not isinstance(file, str):
        raise ValueError("hf_overrides['quantization_config_file'] is no path")
    return {"quant_type": {"default": read_object(Path(file))}}


def _supported_format(wanted: OnlineQuantization, where: TargetPlatform) -> OnlineQuantization:
    """Returns the format as this device multiplies it; ValueError if a platform has no quantized format at all."""
    facts = where.facts
    if facts.fp8 not in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):  # the latter's platform converts weights to it
        wanted = wanted.without_activation_quantization()
    if not facts.weight_formats & set(FALLBACK_FORMATS | {"int8": ""}):
        raise ValueError(
            f"quantization={wanted.name!r} is not there on platform {where.name}, which packs no scheme; leave it out"
        )
    return wanted


def scheme_of(forms: QuantizationPlan) -> str | None:
    """The kind of most products, where floats are quantized."""
    fmt = forms.online.format if isinstance(forms.online, OnlineQuantization) else forms.online
    return None if fmt is None else fmt.kind


def describe_quantization(forms: QuantizationPlan, worker: Worker) -> list[str]:
    """Describes the weight formats of linear layers, experts and embeddings, and the providers of linear layers."""
    weights = [each.weight for each in declared_weights(worker.model)]
    products = [weight for weight in weights if weight.use == "linear"]
    counts = Counter(weight.format.kind for weight in products if not weight.format.plain)
    by = {kind: worker.ops.choice(of_kind("linear", kind)).provider for kind in counts}
    held = [f"{count} products as {kind} by {by[kind]}" for kind, count in counts.items()]
    stacks = Counter(weight.format.kind for weight in weights if weight.use == "experts" and not weight.format.plain)
    held += [f"{count} stacks of experts as {kind}" for kind, count in stacks.items()]
    tables = Counter(weight.format.kind for weight in weights if weight.use == "embedding" and not weight.format.plain)
    held += [f"{count} table{'s' * (count > 1)} of embeddings as {kind}" for kind, count in tables.items()]
    lines = [
        f"products as {kind} have no provider here: each step dequantizes their weights"
        for kind, provider in by.items()
        if provider == "reference"
    ]
    if isinstance(forms.online, OnlineQuantization):
        lines.insert(
            0, f"quantization {forms.online.name}: {', '.join([*held, *_describe_others(forms.online, weights)])}"
        )
    if forms.checkpoint is not None:
        undone = sum(weight.format.plain and weight.reader is not None for weight in weights)
        held += [f"{undone} weights dequantized while they are loaded"] if undone else []
        lines.insert(0, f"checkpoint quantized by {forms.checkpoint.method}: {', '.join(held) or 'nothing of it here'}")
        lines += [ACT_ORDER_NOTE] if any(map(_is_act_order_experts, weights)) else []
        lines += forms.checkpoint.notes
    return lines


def _is_act_order_experts(weight: Weight) -> bool:
    """True if it is a stack of experts that is dequantized because each orders its groups of inputs (act-order)."""
    if weight.use != "experts" or not weight.format.plain or weight.reader is None:
        return False
    return weight.reader.format(weight.shard(weight.slices[0])).act_order


def _describe_others(wanted: OnlineQuantization, weights: list[Weight]) -> list[str]:
    """Describes weights that do not have the requested format."""
    products, lines = [weight for weight in weights if weight.use == "linear"], []
    rounded = Counter(weight.reader.weight_format for weight in weights if isinstance(weight.reader, RoundedWeights))
    for fmt, count in rounded.items():
        near = FALLBACK_FORMATS.get(fmt.kind, "int8")
        lines.append(
            f"{count} rounded to {fmt.kind} and held in floats, for this platform keeps no {fmt.kind}: {near} is the "
            "nearest that takes less memory"
        )
    plain = sum(
        weight.format.plain and weight.reader is None and format_for_inputs(wanted.format, weight.shape[1]).plain
        for weight in products
    )  # fmt: skip
    lines += [f"{plain} stay as they are: no group of 32 or more divides their inputs"] if plain else []
    stacks = [weight.format for weight in weights if weight.use == "experts"]
    if stacks:
        kept = any(not fmt.plain for fmt in stacks)
        lines.append(f"{'' if kept else 'experts and '}their routers stay as they are")
    return [*lines, "the head in 8 bits" if wanted.head else "the head as it is"]
