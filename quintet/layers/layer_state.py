"""The state on its way through a step, and the place in it of each layer that mixes positions."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintet.interface.platform import Mixer, State
from quintet.interface.types import Batch, Group, LayerSpec, Layout, RotaryArgs, StepContext
from quintet.layers.lora_step import LoRAStep

if TYPE_CHECKING:
    from quintet.layers.rope import Rotary

_NO_GROUP: Group = Group(None, None, None)  # type: ignore[arg-type]  # of a mixer that keeps nothing, which reads none


class StepState:
    """Made at the top of a step and taken apart at its end: each mixer reads its own tensors, and replaces them."""

    def __init__(self, state: State, batch: Batch, lora: LoRAStep | None = None) -> None:
        self.batch, self.lora = batch, lora
        if lora is not None:
            lora.begin(batch)
        self._tensors = list(state)
        self.intermediate_tensors: tuple[Tensor, ...] = ()  # for the next stage
        self.shared_kv: dict[
            LayerMixer, tuple[Tensor, Tensor]
        ] = {}  # a layer's K and V of this step, for those that read it
        self.rotary_rows: dict[Rotary, tuple[Tensor, Tensor]] = {}  # of multimodal_rows()
        self.chosen: Tensor | None = None  # what the last indexer has chosen, for later layers without one

    def multimodal_rows(self, rotary: "Rotary") -> tuple[Tensor, Tensor] | None:
        """Returns a table of angles with a row for each token, and their numbers, where tokens have three rotary
        positions in this step; else None."""
        positions = self.batch.inputs.rotary_positions
        if positions is None or not rotary.axes:
            return None
        if rotary not in self.rotary_rows:
            table = rotary.multimodal_table(positions)
            self.rotary_rows[rotary] = table, torch.arange(len(table), dtype=torch.int32, device=table.device)
        return self.rotary_rows[rotary]

    @property
    def state(self) -> State:
        """As the mixers left it."""
        return tuple(self._tensors)

    def received_hidden_states(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns what the previous pipeline stage sent: x [T, H], and the residual if it stands apart."""
        given = self.batch.inputs.intermediate_tensors
        assert given is not None, "nothing was handed on to this stage"
        return given[0].view(dtype), given[1].view(dtype) if given.shape[0] > 1 else None

    def shared_tensors(self, dtype: torch.dtype, widths: Sequence[int]) -> list[Tensor]:
        """Returns what it sent besides, for layers that read more: [T, width] each, in the order of Family.reads()."""
        given, tokens = self.batch.inputs.shared_tensors, len(self.batch.token_ids)
        if given is None:
            return []
        return [each.view(tokens, -1) for each in given.view(dtype).split([tokens * width for width in widths])]

    def send_shared(self, tensors: Iterable[Tensor]) -> None:
        """The same for the next stage, behind what else it is handed; for none nothing happens."""
        if self.intermediate_tensors:
            self.intermediate_tensors += tuple(tensors)

    def tensors_at(self, places: range) -> State:
        return tuple(self._tensors[place] for place in places)

    def replace(self, places: range, tensors: State) -> None:
        for place, tensor in zip(places, tensors, strict=True):
            self._tensors[place] = tensor


class LayerMixer:
    """Binding of a layer to a platform: its mixer, its group, and the places of its tensors in the state.

    Group and places are settled when the whole model is built, by what its layers keep (engine/groups.py).
    """

    def __init__(self, mixer: Mixer, spec: LayerSpec | None = None) -> None:
        self.mixer, self.spec = mixer, spec
        self.group: int | None = None  # None: it keeps nothing
        self.kv_heads: int | None = None  # of the layer, on all ranks; None: not known
        self.source: LayerMixer | None = None  # the layer whose pages this one reads: it keeps nothing of its own
        self.tensor_indices = range(0)

    def settle(self) -> None:
        """Takes the group and the places of the layer whose pages it reads, once those are settled."""
        if self.source is not None:
            self.group, self.tensor_indices = self.source.group, self.source.tensor_indices

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return self.mixer.layouts

    @property
    def is_cross(self) -> bool:
        """True if it reads an encoder's rows, and writes none."""
        return any(layout.cross for layout in self.layouts)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor | None, cache: StepState, sinks: Tensor | None = None) -> Tensor:
        """q [T, H, D], k and v [T, Hkv, D] -> [T, H, value_dim]."""
        out, state = self.mixer(q, k, v, cache.tensors_at(self.tensor_indices), self._context(cache), sinks)
        cache.replace(self.tensor_indices, state)
        return out

    def read(self, q: Tensor, cache: StepState) -> Tensor:
        """q [T, H, D] over an encoder's rows, which keep() has written -> [T, H, D]."""
        nothing: Any = None
        return self(q, nothing, None, cache)

    def keep(self, k: Tensor, v: Tensor, cache: StepState) -> None:
        """Writes an encoder's k and v [E, Hkv, D] at the slots of the group."""
        state = self.mixer.keep(k, v, cache.tensors_at(self.tensor_indices), self._context(cache))
        cache.replace(self.tensor_indices, state)

    def with_rotary(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: RotaryArgs, cache: StepState, sinks: Tensor | None
    ) -> Tensor:
        """The same of q and k before rotary, where the mixer `turns`."""
        out, state = self.mixer.with_rotary(
            q, k, v, rotary, cache.tensors_at(self.tensor_indices), self._context(cache), sinks
        )
        cache.replace(self.tensor_indices, state)
        return out

    def attend_distances(self, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, cache: StepState) -> Tensor:
        """q [T, H, D], k and v [T, Hkv, D] and the queries' numbers for distances [T, H, N] -> [T, H, value_dim]."""
        tensors, context = cache.tensors_at(self.tensor_indices), self._context(cache)
        out, state = self.mixer.attend_distances(q, k, v, numbers, tensors, context)
        cache.replace(self.tensor_indices, state)
        return out

    def attend_chosen(
        self, q: Tensor, k: Tensor, chosen: Tensor, cache: StepState, v: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """q [T, H, D], k and v [T, Hkv, D], and the places or blocks that each token sees -> [T, H, value_dim]."""
        more = {name: each for name, each in (("v", v), ("sinks", sinks)) if each is not None}
        tensors, context = cache.tensors_at(self.tensor_indices), self._context(cache)
        out, state = self.mixer.attend_chosen(q, k, chosen, tensors, context, **more)
        cache.replace(self.tensor_indices, state)
        return out

    def run_state_op(self, cache: StepState, *given: Any, settings: tuple[Any, ...] = ()) -> Tensor:
        """Runs the op of a StateSpec or of an indexer on the given tensors."""
        mixer: Any = self.mixer  # what it is called with is the op's
        out, state = mixer(given, settings, cache.tensors_at(self.tensor_indices), self._context(cache))
        cache.replace(self.tensor_indices, state)
        made: Tensor = out
        return made

    def _context(self, cache: StepState) -> StepContext:
        return StepContext(cache.batch, _NO_GROUP if self.group is None else cache.batch.groups[self.group])
