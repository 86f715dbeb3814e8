"""Constants of layers, which settings decide and no file: rotary tables (rope_theta, max_model_len)."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.platform import Platform
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import named_layers


def place_constants(model: nn.Module, platform: Platform, rank: int) -> None:
    """Computes them and has a rank's platform place them."""
    for _, layer in named_layers(model):
        for name, tensor in layer.constants().items():
            layer.assign(platform.place(_constant(name, tensor, rank), {name: tensor}))


def constant_digests(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yields path, name, dtype, shape and digest of each."""
    for path, layer in named_layers(model):
        for name, tensor in layer.constants().items():
            content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            yield path, name, tensor.dtype, tensor.shape, hashlib.sha256(content).hexdigest()


def _constant(name: str, tensor: Tensor, rank: int) -> Weight:
    """A computed tensor, kept whole by every rank, so that it too goes through place()."""
    part = CheckpointSlice(name, tuple(tensor.shape), ((0, tensor.shape[0]),) * (rank + 1))
    return Weight(name, (part,), 0, rank, tensor.dtype, "vector")
