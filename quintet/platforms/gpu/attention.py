"""Attention on a GPU: one class for all layers of a group, which has every kind of layer in it plan its steps."""

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np
from torch import Tensor

from quintet.interface.platform import Mixer, State
from quintet.interface.types import (
    AttentionSpec,
    Group,
    HostBatch,
    HostGroup,
    IntArray,
    RotaryArgs,
    StateSpec,
    StepContext,
)
from quintet.ops.registry import Ops
from quintet.ops.states import StateMixer

logger = logging.getLogger(__name__)

WindowAndChunk = tuple[int | None, int | None]  # a layer's window, and its chunk
# Of a plan: single tokens; others; others, and no planner was asked; all of one request, nothing of which is cached.
SINGLE, MIXED, UNPLANNED, WHOLE_PROMPT = 1, 2, 3, 4


class StepPlanner(Protocol):
    """Planner that equal layers share: it plans for each group that has some of them.

    Steps in which a request has more than one token cannot be captured with it: captured ones run without it.
    """

    def plan(self, number: int, batch: HostBatch, group: HostGroup) -> None:
        """Plans every step, outside any graph; `number` finds the plan again."""


class PlannerRegistry:
    """The planners of one rank's model, by what their layers keep: that is what makes a group."""

    def __init__(self) -> None:
        self._planners: dict[WindowAndChunk, dict[AttentionSpec, StepPlanner]] = {}
        self._count = 0
        # whether every layer can do without its planner, and without the longest request's tokens
        self.planners_optional = True
        self.needs_max_query_len = False  # whether a state is advanced by the specification, token by token up to these
        # (tokens, requests) of the captured steps with prompts
        self.captured_sizes: frozenset[tuple[int, int]] = frozenset()
        # whether some layer has a mixer for whole prompts of so many
        self.serves_whole_prompt: Callable[[int], bool] | None = None

    def next_number(self) -> int:
        """Returns a new number for each layer."""
        self._count += 1
        return self._count

    @property
    def has_planners(self) -> bool:
        """True if some layer has a planner."""
        return bool(self._planners)

    def add(self, spec: AttentionSpec, planner: StepPlanner) -> None:
        self._planners.setdefault((spec.window, spec.chunk), {})[spec] = planner

    def plan(
        self, number: int, window_and_chunk: WindowAndChunk, batch: HostBatch, group: HostGroup
    ) -> tuple[IntArray, ...]:
        """Plans the step for a group; `number` is that of the layer that plans for it. Returns the group's plan."""
        size = len(batch.token_ids), len(batch.query_start_loc) - 1
        whole = (
            self.serves_whole_prompt is not None
            and _is_whole_prompt(batch, group)
            and self.serves_whole_prompt(size[0])
        )
        if size in self.captured_sizes and self.planners_optional:
            return (np.zeros((0, WHOLE_PROMPT if whole else UNPLANNED, number), np.int32),)
        for planner in self._planners.get(window_and_chunk, {}).values():
            planner.plan(number, batch, group)
        single = size[0] == size[1] and bool(np.diff(batch.query_start_loc).max(initial=0) <= 1)
        return (np.zeros((0, WHOLE_PROMPT if whole else SINGLE if single else MIXED, number), np.int32),)


class GraphAttention(Mixer):
    """Attention over pages by whatever serves the layer, in steps that may be captured.

    A plan is one empty array. Its shape says what a captured step is captured for: whether requests bring one token
    each, whether planners were asked, and the number of the layer that planned for the group.
    """

    def __init__(
        self,
        inner: Mixer,
        spec: AttentionSpec,
        planning: PlannerRegistry,
        unplanned: Mixer | None = None,
        whole_prompt: Mixer | None = None,
    ) -> None:
        """`unplanned` serves where planners are not asked, and `whole` steps that are planned as WHOLE_PROMPT,
        captured ones among them, over the same pages; None: `inner` does, and `unplanned`."""
        self.layouts = inner.layouts
        self._inner, self._unplanned, self._whole = inner, unplanned or inner, whole_prompt or unplanned or inner
        assert self._unplanned.layouts == self._whole.layouts == inner.layouts, "all read the same pages"
        self._planning, self._number = planning, planning.next_number()
        self._kept: WindowAndChunk = spec.window, spec.chunk
        self.fuses_rotary = inner.fuses_rotary and self._unplanned.fuses_rotary and self._whole.fuses_rotary

    def plan(self, batch: HostBatch, group: HostGroup) -> tuple[IntArray, ...]:
        return self._planning.plan(self._number, self._kept, batch, group)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor | None, state: State, context: StepContext, sinks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        return self._serving(context.group)(q, k, v, state, context, sinks)

    def with_rotary(  # noqa: PLR0913  # __call__'s, and the turn
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: RotaryArgs,
        state: State,
        context: StepContext,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        return self._serving(context.group).with_rotary(q, k, v, rotary, state, context, sinks)

    def _serving(self, group: Group) -> Mixer:
        kind = group.plan[0].shape[1] if group.plan else MIXED
        return self._unplanned if kind == UNPLANNED else self._whole if kind == WHOLE_PROMPT else self._inner


def _is_whole_prompt(batch: HostBatch, group: HostGroup) -> bool:
    """True if the step is all of its first request, with nothing cached, and at most an eighth of padding."""
    count, end = batch.query_start_loc[1], batch.query_start_loc[-1]
    return bool(count == end == group.seq_lens[0] and 8 * count >= 7 * len(batch.token_ids))


class GraphStates(StateMixer):
    """Plans how many tokens the longest request has only where the specification advances some layer's state: a plan's
    shape is part of what a graph is captured for, and our kernels read none."""

    def __init__(self, spec: StateSpec, ops: Ops, planning: PlannerRegistry) -> None:
        super().__init__(spec, ops)
        self._planning = planning
        if ops.choice(spec.op).provider == "reference":
            if not planning.needs_max_query_len:
                logger.info("steps with prompts are not captured: %s by the specification goes by tokens", spec.op)
            planning.needs_max_query_len, planning.planners_optional = True, False

    def plan(self, batch: HostBatch, group: HostGroup) -> tuple[IntArray, ...]:
        return super().plan(batch, group) if self._planning.needs_max_query_len else ()


def single(group: Group) -> bool:
    """True if the step was planned as one of single tokens."""
    return bool(group.plan) and group.plan[0].shape[1] == SINGLE


def planned_by(group: Group) -> int:
    """Returns the number under which planners keep this group's plan."""
    return group.plan[0].shape[2]
