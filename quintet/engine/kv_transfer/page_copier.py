"""Copies pages of the KV cache to and from rows on the host: all ranks' parts of a page, one behind the other."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from quintet.engine.executor.worker import Worker
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.head_slices import ALIGN_WORDS
from quintet.interface.types import IntArray
from quintet.ops.pages import WORD

BYTES_PER_COPY = 2**26  # bytes that are copied between two steps: the next step waits for them


class PageCopier:
    """Copies pages to and from the caches of one model's workers. A device runs copies and steps in the order of
    submission: a read sees what earlier steps write, and later steps see what a write has copied."""

    def __init__(self, ranks: WorkerGroup, fixed: bool = False) -> None:
        """fixed: the device compiles for each number of pages, so counts are rounded up to powers of two; page 0 takes
        the rest."""
        self._ranks, self._fixed, start = ranks, fixed, 0
        self._places: list[list[slice]] = []  # slices of a row, for each rank's tensors
        for sizes in ranks.map_workers(_words):
            of_rank = []
            for words in sizes:
                of_rank.append(slice(start, start + words))
                start += -(-words // ALIGN_WORDS) * ALIGN_WORDS
            self._places.append(of_rank)
        self.words = start  # of a row
        self.pages_per_copy = max(1, BYTES_PER_COPY // max(self.nbytes, 1))  # pages that are copied between two steps

    @property
    def nbytes(self) -> int:
        """Returns the bytes of a row."""
        return WORD * self.words

    def read(self, pages: Sequence[int]) -> Callable[[], PageRows]:
        """Starts to copy the pages, as they are after all work submitted so far; calling the result waits for the
        rows."""
        ids, count = self._padded(pages), len(pages)
        waiting = self._ranks.map_workers(lambda worker: _read(worker, ids))

        def wait() -> PageRows:
            rows = np.zeros((count, self.words), np.int32)
            for places, parts in zip(self._places, waiting, strict=True):
                for place, part in zip(places, parts, strict=True):
                    rows[:, place] = part().numpy()[:count]
            return rows

        return wait

    def write(self, pages: Sequence[int], rows: PageRows) -> None:
        """Starts to copy the rows into these pages."""
        ids = self._padded(pages)
        if len(ids) > len(pages):
            rows = np.concatenate([rows, np.zeros((len(ids) - len(pages), self.words), np.int32)])
        places = dict(zip(self._ranks.workers, self._places, strict=True))
        self._ranks.map_workers(lambda worker: _write(worker, ids, [rows[:, place] for place in places[worker]]))

    def _padded(self, pages: Sequence[int]) -> IntArray:
        count = len(pages)
        ids = np.zeros(1 << (count - 1).bit_length() if self._fixed else count, np.int32)
        ids[:count] = pages
        return ids


def _page_tensors(worker: Worker) -> list[int]:
    """Returns the indices of the worker's state tensors that hold pages and are not empty."""
    return [at for at in range(len(worker.kv_cache_layout.layouts)) if worker._state[at].nbytes > 0]


def _words(worker: Worker) -> list[int]:
    """Returns the words of one page in each of these tensors."""
    state = worker._state
    return [-(-(state[at].nbytes // state[at].shape[0]) // WORD) for at in _page_tensors(worker)]


@torch.inference_mode()
def _read(worker: Worker, pages: IntArray) -> list[Callable[[], Tensor]]:
    (ids,) = worker.upload(pages)
    return [worker.device.to_host(worker.ops.gather_pages(worker._state[at], ids)) for at in _page_tensors(worker)]


@torch.inference_mode()
def _write(worker: Worker, pages: IntArray, content: Sequence[IntArray]) -> None:
    ids, *parts = worker.upload(pages, *content)
    state = list(worker._state)
    for at, part in zip(_page_tensors(worker), parts, strict=True):
        state[at] = worker.ops.scatter_pages(state[at], ids, part)
    worker._state = tuple(state)
