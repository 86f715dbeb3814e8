"""Writes rows to the store of each rank, before the step that reads them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quintet.interface.types import FloatArray, IntArray

if TYPE_CHECKING:
    from quintet.engine.executor.worker import Worker
    from quintet.engine.executor.worker_group import WorkerGroup
    from quintet.engine.row_store.items import RowWrite, RowWriter


def write_rows(ranks: "WorkerGroup", writes: "dict[bytes, RowWrite]") -> None:
    """Writes the rows of these items, which may be read from now on. Clears `writes`, so that it is known."""
    by_writer: dict[RowWriter, list[RowWrite]] = {}
    for write in writes.values():
        by_writer.setdefault(write.item.writer, []).append(write)
    for writer, mine in by_writer.items():
        writer(ranks, mine)
    writes.clear()


def write_embeds(ranks: "WorkerGroup", writes: "Sequence[RowWrite]") -> None:
    """Writes items of prompt embeddings, all at once."""
    given = [np.frombuffer(write.item.content, np.float32).reshape(write.item.count, -1) for write in writes]  # type: ignore[attr-defined]
    rows: FloatArray = np.concatenate(given)
    places: IntArray = np.concatenate([write.places for write in writes])

    def write_here(worker: "Worker") -> None:
        if worker.row_store is not None:  # the first pipeline stage embeds tokens
            worker.row_store.write(worker.platform, worker.device, places, rows)

    ranks.map_workers(write_here)
