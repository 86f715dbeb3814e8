"""Layers shared out over stages: each rank builds the whole model, empty, and keeps what its stage has of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from quintet.layers.layer_state import LayerMixer

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """Pipeline stage: its index, and the number of layers of each stage; one stage has all."""

    index: int = 0
    counts: tuple[int, ...] = ()  # of layers, by stage; empty: there is one stage

    @property
    def first(self) -> bool:
        """True if it embeds tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """True if it computes the model's outputs from the last hidden states."""
        return self.index >= len(self.counts) - 1

    @property
    def start(self) -> int:
        """Its first layer's place."""
        return sum(self.counts[: self.index])

    @property
    def stop(self) -> int:
        """The place of the next stage's first layer."""
        return sum(self.counts[: self.index + 1])

    @property
    def layers(self) -> range:
        """Its own, of those of the model."""
        return range(self.start, self.stop)

    def select_layers(self, layers: Sequence[T]) -> Iterator[tuple[int, T | None]]:
        """Its own layers and their places; behind the model's last, None in a last place."""
        for place in self.layers if self.counts else range(len(layers)):
            yield place, layers[place]
        if self.last:
            yield len(layers), None


def layers_per_stage(layers: int, stages: int) -> tuple[int, ...]:
    """Returns the number of layers of each stage: equally many; each one left over goes to another stage, from the last
    but one backwards, since the last has the head as well (as in vLLM)."""
    if stages > layers:
        raise ValueError(
            f"pipeline_parallel_size {stages} is more than the model's {layers} layers; lower it to {layers} or less"
        )
    each, left = divmod(layers, stages)
    found = [each] * stages
    for place in range(left):
        found[(stages - 2 - place) % stages] += 1
    return tuple(found)


class MissingLayer(nn.Module):
    """Placeholder for a layer, a table or a norm of another stage (vLLM: PPMissingLayer). What layers here use as well
    stays in its place: a checkpoint has it under that name."""

    def add_at(self, path: str, module: nn.Module) -> None:
        """`path`: the module's, from here."""
        *parents, name = path.split(".")
        at: nn.Module = self
        for each in parents:
            if not hasattr(at, each):
                at.add_module(each, MissingLayer())
            at = at.get_submodule(each)
        at.add_module(name, module)


def drop_other_layers(trunk: nn.Module, stage: Stage, before: Iterable[str], layers: str, after: Iterable[str]) -> None:
    """Leaves in a trunk what the stage has of it; `before` its layers stands what the first has, `after` them what the
    last has, all by name."""
    blocks: Any = getattr(trunk, layers)
    here = {module for place in stage.layers for module in blocks[place].modules()}
    gone = {place: MissingLayer() for place in range(len(blocks)) if place not in stage.layers}
    for path, module in blocks.named_modules():  # each once, where it stands first
        place, _, within = path.partition(".")
        if within and int(place) in gone and module in here:
            gone[int(place)].add_at(within, module)
    for place, empty in gone.items():
        blocks[place] = empty
    for name in (*(() if stage.first else before), *(() if stage.last else after)):
        setattr(trunk, name, MissingLayer())


def layer_mixers_of(module: nn.Module) -> set[LayerMixer]:
    """Those that its layers hold."""
    found = set()
    for each in module.modules():
        for value in vars(each).values():
            found |= {
                one for one in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(one, LayerMixer)
            }
    return found
