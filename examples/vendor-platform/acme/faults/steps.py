"""Faults of captured steps."""

import weakref
from typing import Any

from quintet.contract import ShapeBucket

from acme.faults import fault

OFTEN = 5  # every so many steps


def _stale_table(launch: Any) -> Any:
    """A run takes the page table of the run before."""
    before: dict[int, Any] = {}

    def faulty(self: Any, state: Any, batch: Any) -> Any:
        tables = before.get(id(self), [group.block_table for group in batch.groups])
        before[id(self)] = [group.block_table for group in batch.groups]
        weakref.finalize(self, before.pop, id(self), None)
        groups = [group._replace(block_table=table) for group, table in zip(batch.groups, tables, strict=True)]
        return launch(self, state, batch._replace(groups=tuple(groups)))

    return faulty


def _backwards(launch: Any) -> Any:
    def faulty(self: Any, state: Any, batch: Any) -> Any:
        outputs = launch(self, state, batch)
        return outputs._replace(aux_hidden_states=outputs.aux_hidden_states[::-1])

    return faulty


def _variant(batch: Any) -> ShapeBucket:
    """The size of a step."""
    tokens, requests, rows = batch.token_ids.shape[0], batch.query_start_loc.shape[0] - 1, batch.logits_indices.shape[0]
    return ShapeBucket(tokens, requests, rows, tuple(group.block_table.shape[1] for group in batch.groups))


def _captures_again(find: Any) -> Any:
    asked: list[Any] = []

    def faulty(self: Any, batch: Any) -> Any:
        asked.append(None)
        program = find(self, batch)
        if len(asked) % OFTEN == 0:
            self.add(_variant(batch))
        return program

    return faulty


def _captures_late(find: Any) -> Any:
    def faulty(self: Any, batch: Any) -> Any:
        try:
            return find(self, batch)
        except RuntimeError:
            self.add(_variant(batch))
            return find(self, batch)

    return faulty


def _never_again(step: Any) -> Any:
    dead: list[Any] = []

    def faulty(self: Any, state: Any, batch: Any) -> Any:
        if any(each() is self for each in dead):
            raise RuntimeError("acme: the queue was closed by an earlier error")
        try:
            return step(self, state, batch)
        except Exception:
            dead.append(weakref.ref(self))
            raise

    return faulty


fault(
    "stale-table",
    "A step uses the page table of the step before.",
    "graphs.replay",
    ("program:Program.launch", _stale_table),
)
fault(
    "recompiles",
    "Steps are captured anew while requests wait.",
    "graphs.settled",
    ("compile:Programs.find", _captures_again),
)
fault(
    "late-capture",
    "A size that nobody declared is captured in silence.",
    "graphs.buckets",
    ("compile:Programs.find", _captures_late),
)
fault(
    "queue-dies",
    "After one error there are no more steps.",
    "graphs.buckets",
    ("compile:Programs.__call__", _never_again),
)
fault("taps-backwards", "Taps come in another order.", "models.outputs", ("program:Program.launch", _backwards))
