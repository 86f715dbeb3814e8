"""An update of all models of a rank that are of one checkpoint: each tensor goes to those that it is a weight of."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quintet.model_loader.incoming import Incoming


class IncomingParts:
    """One update of a rank's weights: of its model, and of the encoders of media beside it. Not to be used while a step
    runs."""

    def __init__(self, parts: Sequence[Incoming]) -> None:
        """`parts`: the first gets the tensors that none takes, and refuses those that have no place."""
        self._parts = parts

    @property
    def num_written(self) -> int:
        """Weights that were written."""
        return sum(part.num_written for part in self._parts)

    @property
    def pending(self) -> list[str]:
        """Names of tensors without which some that have come make no weight; at most a few."""
        return [name for part in self._parts for name in part.pending]

    def expect(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Checks a tensor that is to come. ValueError if it has no place, or is of another shape or type."""
        for part in self._takers(name):
            part.expect(name, shape, dtype)

    def put(self, name: str, tensor: Tensor, owned: bool = False) -> None:
        """Takes a tensor by its name in the checkpoint's files: see Incoming.put()."""
        for part in self._takers(name):
            part.put(name, tensor, owned)

    def place_waiting(self) -> None:
        """Writes the tensors that wait for the end of the update. ValueError if some make no weight."""
        for part in self._parts:
            part.place_waiting()

    def finish(self, partial: bool = False) -> None:
        """Checks that the update is complete: see Incoming.finish()."""
        for part in self._parts:
            part.finish(partial)

    def _takers(self, name: str) -> list[Incoming]:
        return [part for part in self._parts if part.takes(name)] or [self._parts[0]]
