"""An extension of workers, as trainers' packages bring them."""

from collections.abc import Sequence
from typing import Any

import torch


class Extension:
    """Methods that collective_rpc() calls on each rank."""

    device: torch.device
    rank: int
    model_runner: Any

    def where(self, more: int = 0) -> list[int]:
        return [self.rank, more]

    def update_named_param(self, name: str, shape: Sequence[int], value: float) -> None:
        tensor = torch.full(tuple(shape), value, device=self.device)
        self.model_runner.model.load_weights(weights=[(name, tensor)])

    def fails(self) -> None:
        raise RuntimeError("the communicator is not there")


class Clashes:
    def load_weights(self) -> None: ...
