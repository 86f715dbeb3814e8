"""Attention on a GPU: pads decode steps to the sizes that graphs are captured for, and lets one kernel's maker plan."""

from collections.abc import Sequence

from torch import Tensor

from quintet.platforms.gpu.buckets import padded
from quintet.platforms.interface import Attention
from quintet.types import Batch, HostBatch


class Planning:
    """The attentions of one rank's model. The engine asks one of a class to plan: it speaks for all of them here."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)  # empty: nothing is captured, so nothing is padded
        self._planners: dict[str, Attention] = {}  # what they are for -> the latest attention that is for it

    def add(self, kind: str, attention: Attention) -> None:
        """Attentions of one kind plan alike; a model that is built anew brings new ones."""
        self._planners[kind] = attention

    def plan(self, batch: HostBatch) -> HostBatch:
        batch = padded(batch, self.sizes)
        for attention in self._planners.values():
            batch = attention.plan(batch)
        return batch


class GraphAttention(Attention):
    """Another attention, whose steps may be captured."""

    def __init__(self, inner: Attention, planning: Planning) -> None:
        self.layout = inner.layout
        self._inner, self._planning = inner, planning

    def plan(self, batch: HostBatch) -> HostBatch:
        return self._planning.plan(batch)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._inner(q, k, v, kv, batch, sinks)
