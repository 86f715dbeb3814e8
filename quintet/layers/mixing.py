"""The state on its way through a step, and the place in it of each layer that mixes positions."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from quintet.platforms.interface import Mixer, State
from quintet.types import Batch, Books, Group, Layout, Turn

_NOTHING: Group = Group(None, None, None)  # type: ignore[arg-type]  # of a mixer that keeps nothing, which reads none


class Cache:
    """Made at the top of a step and taken apart at its end: each mixer reads its own tensors, and replaces them."""

    def __init__(self, state: State, batch: Batch) -> None:
        self.batch = batch
        self._tensors = list(state)
        self.handed_on: tuple[Tensor, ...] = ()  # for the next stage
        self.passed: dict[Mixing, tuple[Tensor, Tensor]] = {}  # a layer's K and V of this step, for those that read it

    @property
    def state(self) -> State:
        """As the mixers left it."""
        return tuple(self._tensors)

    def handed(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """What the stage before has handed on: x [T, H], and the residual if it stands apart."""
        given = self.batch.inputs.handed
        assert given is not None, "nothing was handed on to this stage"
        return given[0].view(dtype), given[1].view(dtype) if given.shape[0] > 1 else None

    def beside(self, dtype: torch.dtype, widths: Sequence[int]) -> list[Tensor]:
        """What it has handed on beside, for layers that read more: [T, width] each, in the order of Family.reads()."""
        given, tokens = self.batch.inputs.beside, len(self.batch.token_ids)
        if given is None:
            return []
        return [each.view(tokens, -1) for each in given.view(dtype).split([tokens * width for width in widths])]

    def hand_on_beside(self, tensors: Iterable[Tensor]) -> None:
        """The same for the next stage, behind what else it is handed; for none nothing happens."""
        if self.handed_on:
            self.handed_on += tuple(tensors)

    def of(self, places: range) -> State:
        return tuple(self._tensors[place] for place in places)

    def replace(self, places: range, tensors: State) -> None:
        for place, tensor in zip(places, tensors, strict=True):
            self._tensors[place] = tensor


class Mixing:
    """What a layer holds of a platform: its mixer, its group, and where its tensors lie in the state.

    Group and places are settled when the whole model is built, by what its layers keep (engine/groups.py).
    """

    def __init__(self, mixer: Mixer) -> None:
        self.mixer = mixer
        self.group: int | None = None  # None: it keeps nothing
        self.kv_heads: int | None = None  # of the layer, on all ranks; None: nobody has said
        self.places = range(0)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return self.mixer.layouts

    def __call__(self, q: Tensor, k: Tensor, v: Tensor | None, cache: Cache, sinks: Tensor | None = None) -> Tensor:
        """q [T, H, D], k and v [T, Hkv, D] -> [T, H, value_dim]."""
        out, state = self.mixer(q, k, v, cache.of(self.places), self._books(cache), sinks)
        cache.replace(self.places, state)
        return out

    def turned(self, q: Tensor, k: Tensor, v: Tensor, turn: Turn, cache: Cache, sinks: Tensor | None) -> Tensor:
        """The same of q and k that the turn is still to come of, where the mixer `turns`."""
        out, state = self.mixer.turned(q, k, v, turn, cache.of(self.places), self._books(cache), sinks)
        cache.replace(self.places, state)
        return out

    def advance(self, cache: Cache, *given: Any, settings: tuple[Any, ...] = ()) -> Tensor:
        """For a StateSpec: what its op makes of what is given."""
        mixer: Any = self.mixer  # what it is called with is the op's
        out, state = mixer(given, settings, cache.of(self.places), self._books(cache))
        cache.replace(self.places, state)
        made: Tensor = out
        return made

    def _books(self, cache: Cache) -> Books:
        return Books(cache.batch, _NOTHING if self.group is None else cache.batch.groups[self.group])
