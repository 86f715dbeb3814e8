"""Experts that the routers of a step chose, where steps return them (Outputs.routed_experts)."""

from torch import Tensor


class RoutedExperts:
    """Collects the ids that each router of a model chose in the step that runs, in the order of the layers."""

    def __init__(self) -> None:
        self.routers: list[tuple[int, int]] = []  # of each layer: its experts, and how many a token has
        self._ids: list[Tensor] = []

    def add_router(self, experts: int, top_k: int) -> None:
        """Called once for each layer that will record ids."""
        self.routers.append((experts, top_k))

    def start(self) -> None:
        """Begins a step: drops what one that failed may have left."""
        self._ids = []

    def record(self, ids: Tensor) -> None:
        """Keeps a layer's ids [T, k] int32."""
        self._ids.append(ids)

    def take(self) -> tuple[Tensor, ...]:
        """Returns the ids of the step, for Outputs."""
        taken, self._ids = tuple(self._ids), []
        return taken
