"""Runs an encoder's passes on all ranks, before the step that reads what they write."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quintet.interface.types import HostBatch, HostGroup, HostInputs, IntArray
from quintet.media.audio.log_mel import FEATURES

if TYPE_CHECKING:
    from quintet.engine.executor.worker_group import WorkerGroup
    from quintet.engine.row_store.items import RowWrite


def write_encoded(ranks: "WorkerGroup", writes: "Sequence[RowWrite]") -> None:
    """Runs one pass for each item. An item is encoded alone: its rows have the same bits whatever else is asked."""
    for write in writes:
        item: Any = write.item
        features = item.media.fields[FEATURES].array()
        frames = np.zeros((features.shape[1] + 2, features.shape[0]), np.float32)  # zeros at both ends
        frames[1:-1] = features.T
        ranks.map_workers(lambda worker, given=(frames, write.places): worker.encode(*given))  # type: ignore[misc]


def encoder_batch(embeds: Any, slots: IntArray, num_groups: int, group: int) -> HostBatch:
    """Returns the batch of one pass: a token for each row, which goes to its slot [E] in the group's pages."""
    rows = len(slots)
    nothing, one = np.zeros(rows, np.int32), np.zeros((1, 1), np.int32)
    lengths = np.array([rows], np.int32)
    groups = [HostGroup(slots if index == group else nothing, one, lengths) for index in range(num_groups)]
    return HostBatch(
        token_ids=nothing,
        positions=np.arange(rows, dtype=np.int32),
        token_to_seq=nothing,
        query_start_loc=np.array([0, rows], np.int32),
        logits_indices=np.zeros(0, np.int32),
        groups=tuple(groups),
        inputs=HostInputs(embeds=embeds),
    )
