"""Descriptions of published checkpoints, made of the tensors that the nearest class of transformers has."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Settings = Mapping[str, Any]
Tensors = dict[str, Tensor]
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def _same(model: Any, settings: Settings) -> Any:
    return model


@dataclass(frozen=True)
class Published:
    """One family."""

    architecture: str  # as its config.json has it
    like: str  # transformers' nearest type; "" where there is none
    config: Callable[[Settings], dict[str, Any]]  # of that type, for entries of the family's
    tensors: Callable[[Tensors, Settings], Tensors]  # of that type's -> as the family's files have them
    computes: Callable[[Any, Settings], Any] = _same  # the model -> one that computes what the family does
    words: str = ""  # what is put together otherwise
    own: Callable[[Settings], Any] | None = None  # the model, where there is no nearest type


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """By regular expressions."""

    def named(name: str) -> str:
        for pattern, own in names.items():
            name = re.sub(pattern, own, name)
        return name

    return {named(name): tensor for name, tensor in tensors.items()}


def fused(tensors: Tensors, sources: tuple[str, ...], target: str, join: Callable[..., Tensor]) -> Tensors:
    """`sources` of each layer, weights and biases, become one."""
    made, first = dict(tensors), sources[0]
    for name in [each for each in tensors if f".{first}." in each]:
        parts = [made.pop(name.replace(f".{first}.", f".{each}.")) for each in sources]
        made[name.replace(f".{first}.", f".{target}.")] = join(*parts)
    return made


def stacked(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


QKV = ("q_proj", "k_proj", "v_proj")


class Open(nn.Module):
    """In the place of the gate of what every token is served by: it is whole."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full((*x.shape[:-1], 1), 1e4, dtype=x.dtype)


def open_shared(model: Any, settings: Settings) -> Any:
    """The model with what serves every token whole."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "shared_expert_gate"):
            layer.mlp.shared_expert_gate = Open()
    return model
