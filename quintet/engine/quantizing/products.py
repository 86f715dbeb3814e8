"""Which tensors of a checkpoint are weights of products, and which of these are to be quantized."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from quintet.engine.loader import Declared, declared
from quintet.layers.build import Build, settle
from quintet.layers.decoder import Family
from quintet.layers.forms import Forms
from quintet.layers.forms.patterns import expression
from quintet.layers.mixing import Mixing
from quintet.models import model_class
from quintet.ops import bind
from quintet.platforms.interface import Alone, Mixer
from quintet.weights import Form

HEAD = "lm_head"


class Unmixed(Mixer):
    """Of a model that says what its weights are, and never runs."""

    def __call__(self, *args: Any, **settings: Any) -> NoReturn:
        raise AssertionError("a model without weights does not run")


@dataclass(frozen=True)
class Products:
    """The modules of a checkpoint whose weights multiply, by the modules' names."""

    chosen: frozenset[str]  # to be quantized
    left: frozenset[str]  # the others: what was ignored, routers, heads, what does not divide into groups

    def __contains__(self, tensor: str) -> bool:
        """Whether this tensor is to be quantized."""
        return tensor.endswith(".weight") and tensor.removesuffix(".weight") in self.chosen


def outline(hf_config: Any) -> Family:
    """The family's model, without weights, on no device."""
    build = Build(
        ops=bind({}), mixing=lambda spec: Mixing(Unmixed()), comm=Alone(), dtype=torch.bfloat16, page_size=16,
        max_model_len=16, forms=Forms(Form("w8a8", 8, 8)),
    )  # fmt: skip
    model: Family = model_class(hf_config)(hf_config, build)
    settle(model)
    return model


def products(model: Family, ignored: Sequence[str], unit: int) -> Products:
    """Of an outline(); `unit` is what a product's inputs must be a multiple of. ValueError if there are none."""
    chosen: set[str] = set()
    left: set[str] = set()
    for each in declared(model):
        if each.weight.use not in ("linear", "experts"):
            continue
        for part in each.weight.parts:
            module, inputs = part.source.removesuffix(".weight"), part.shape[1]
            fits = inputs % unit == 0 and not part.transposed and not _stays(each, module)
            (chosen if fits and not any(matches(name, module) for name in ignored) else left).add(module)
    _refuse_unmatched(ignored, chosen | left)
    if not chosen - left:
        raise ValueError(
            f"no product of this model can be quantized so: its inputs are no multiples of {unit}, its weights are "
            "stored transposed (gpt2), or all are ignored; choose another scheme or group_size"
        )
    return Products(frozenset(chosen - left), frozenset(left))


def matches(name: str, module: str) -> bool:
    """Whether what a user leaves out means this module: its name, the end of it, or "re:" and a pattern from its
    beginning on, as compressed-tensors has it."""
    if name.startswith("re:"):
        return expression(name[3:], "ignore").match(module) is not None
    return module == name or module.endswith(f".{name}")


def _refuse_unmatched(ignored: Sequence[str], modules: set[str]) -> None:
    for name in ignored:
        if name != HEAD and not any(matches(name, module) for module in modules):
            raise ValueError(f"ignore {name!r} means no product of this model; its names look like {min(modules)!r}")


def _stays(each: Declared, module: str) -> bool:
    """Routers, and what is an embedding too."""
    router = each.weight.use == "linear" and each.weight.form.plain
    return router or (each.path.startswith(HEAD) and not module.endswith(HEAD))
