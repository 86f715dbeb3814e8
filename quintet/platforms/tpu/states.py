"""The mixer of layers that keep a state per request, on TPU."""

from dataclasses import replace

from quintet.interface.types import HostBatch, HostGroup, IntArray, StateSpec
from quintet.ops.registry import Ops
from quintet.ops.states import StateMixer
from quintet.platforms.tpu.attention import cache_dtype


class JaxStates(StateMixer):
    """The spec's op, which counts a step's tokens on the device: nothing is planned, since shapes are fixed."""

    def __init__(self, spec: StateSpec, ops: Ops, device: str) -> None:
        super().__init__(spec, ops)
        self.layouts = tuple(replace(layout, dtype=cache_dtype(layout.dtype, device)) for layout in self.layouts)

    def plan(self, batch: HostBatch, group: HostGroup) -> tuple[IntArray, ...]:
        return ()
