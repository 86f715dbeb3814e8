"""Statistics of the inputs of a layer's products: second moments, magnitudes, a sample of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SAMPLE = 512  # inputs that are kept, over all calls


class InputStatistics:
    """Statistics of the inputs [T, K] of products that share them."""

    def __init__(self, inputs: int, names: list[str]) -> None:
        self.names, self.count = names, 0
        self.peak = 0.0  # the largest magnitude
        self._squares = torch.zeros(inputs, inputs)
        self._magnitudes = torch.zeros(inputs, dtype=torch.float64)
        self._kept: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """x [..., K]."""
        x = x.detach().reshape(-1, x.shape[-1]).float()
        self.count += len(x)
        self.peak = max(self.peak, x.abs().max().item())
        self._squares.addmm_(x.t(), x)
        self._magnitudes += x.abs().sum(0, dtype=torch.float64)
        self._kept.append(x[:: max(1, len(x) // 64)].clone())

    @property
    def hessian(self) -> Tensor:
        """[K, K]: the mean of x x' over all tokens."""
        return self._squares / self.count

    @property
    def magnitudes(self) -> Tensor:
        """[K]: the mean of |x|."""
        return (self._magnitudes / self.count).float()

    @property
    def sample(self) -> Tensor:
        """[T, K]: up to SAMPLE inputs, of all calls."""
        kept = torch.cat(self._kept)
        return kept[:: -(-len(kept) // SAMPLE)]


class InputWatcher:
    """While it is entered, every linear module within `layer` has its inputs remembered, shared ones once."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._handles: list[Any] = []
        self._last: tuple[Tensor, InputStatistics] | None = None
        self.of: dict[str, InputStatistics] = {}  # by the module's name within the layer

    def __enter__(self) -> "InputWatcher":
        for name, module in self._layer.named_modules():
            if isinstance(module, nn.Linear):
                self._handles.append(module.register_forward_pre_hook(self._hook(name)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._last = None

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            if name not in self.of:
                shared = self._last is not None and self._last[0] is x
                self.of[name] = self._last[1] if shared and self._last else InputStatistics(x.shape[-1], [])
                self.of[name].names.append(name)
            moments = self.of[name]
            if moments.names[0] == name:
                moments.add(x)
            self._last = x, moments

        return hook

    @property
    def groups(self) -> list[InputStatistics]:
        """In the order in which they came."""
        return list(dict.fromkeys(self.of.values()))
