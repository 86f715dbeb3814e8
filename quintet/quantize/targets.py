"""Tensors of a checkpoint that are weights of products, and those of them that are to be quantized."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from quintet.interface.platform import Mixer, SingleRank
from quintet.interface.weights import WeightFormat
from quintet.layers.build import BuildContext, finalize
from quintet.layers.decoder import ModelBase
from quintet.layers.layer_state import LayerMixer
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.quantization.module_patterns import compile_pattern
from quintet.model_loader.loader import DeclaredWeight, declared_weights
from quintet.models import model_class
from quintet.ops import bind

HEAD = "lm_head"


class UnusedMixer(Mixer):
    """Mixer of a model that declares its weights, and never runs."""

    def __call__(self, *args: Any, **settings: Any) -> NoReturn:
        raise AssertionError("a model without weights does not run")


@dataclass(frozen=True)
class LinearTargets:
    """The modules of a checkpoint with weights that multiply, by the modules' names."""

    chosen: frozenset[str]  # to be quantized
    excluded: frozenset[str]  # the others: what was ignored, routers, heads, what does not divide into groups

    def __contains__(self, tensor: str) -> bool:
        """True if this tensor is to be quantized."""
        return tensor.endswith(".weight") and tensor.removesuffix(".weight") in self.chosen


def outline(hf_config: Any, tied_head: bool | None = None) -> ModelBase:
    """The family's model, without weights, on no device."""
    build = BuildContext(
        ops=bind({}),
        make_mixer=lambda spec: LayerMixer(UnusedMixer()),
        comm=SingleRank(),
        dtype=torch.bfloat16,
        page_size=16,
        max_model_len=16,
        tied_head=tied_head,
        quantization=QuantizationPlan(WeightFormat("w8a8", 8, 8)),
    )
    model: ModelBase = model_class(hf_config)(hf_config, build)
    finalize(model)
    return model


def products(model: ModelBase, ignored: Sequence[str], unit: int) -> LinearTargets:
    """Returns the products of an outline(); their inputs must be multiples of `unit`. ValueError if there are none."""
    chosen: set[str] = set()
    left: set[str] = set()
    for each in declared_weights(model):
        if each.weight.use not in ("linear", "experts"):
            continue
        for part in each.weight.slices:
            module, inputs = part.source.removesuffix(".weight"), part.shape[1]
            fits = inputs % unit == 0 and not part.transposed and not _is_excluded(each, module)
            (chosen if fits and not any(matches(name, module) for name in ignored) else left).add(module)
    _refuse_unmatched(ignored, chosen | left)
    if not chosen - left:
        raise ValueError(
            f"no product of this model can be quantized so: its inputs are no multiples of {unit}, its weights are "
            "stored transposed (gpt2), or all are ignored; choose another scheme or group_size"
        )
    return LinearTargets(frozenset(chosen - left), frozenset(left))


def matches(name: str, module: str) -> bool:
    """True if a name that a user leaves out means this module: its name, the end of it, or "re:" and a pattern from its
    beginning on, as compressed-tensors has it."""
    if name.startswith("re:"):
        return compile_pattern(name[3:], "ignore").match(module) is not None
    return module == name or module.endswith(f".{name}")


def _refuse_unmatched(ignored: Sequence[str], modules: set[str]) -> None:
    for name in ignored:
        if name != HEAD and not any(matches(name, module) for module in modules):
            raise ValueError(f"ignore {name!r} means no product of this model; its names look like {min(modules)!r}")


def _is_excluded(each: DeclaredWeight, module: str) -> bool:
    """Routers, and what is an embedding too."""
    router = each.weight.use == "linear" and each.weight.format.plain
    return router or (each.path.startswith(HEAD) and not module.endswith(HEAD))
