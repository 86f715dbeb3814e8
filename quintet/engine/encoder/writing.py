"""Runs an encoder's passes on all ranks, before the step that reads what they write."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quintet.engine.executor.media_parts import run_encoder
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
        ranks.map_workers(partial(run_encoder, embeds=frames, slots=write.places))
