"""Pages of the cache as rows on the host: all ranks' parts of a page, one behind the other."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from quintet.engine.elsewhere.connector import Rows
from quintet.engine.elsewhere.cuts import ALIGNED
from quintet.engine.runner import Ranks
from quintet.engine.worker import Worker
from quintet.ops.pages import WORD
from quintet.types import Array

AT_ONCE = 2**26  # bytes that are copied between two steps, for others wait for the next one


class Copies:
    """To and from the caches of one model's workers. A device copies in the order in which it was told: what a step
    writes that was started before is read, and what one reads that is started later is there."""

    def __init__(self, ranks: Ranks, fixed: bool = False) -> None:
        """fixed: a device compiles each number of pages, so there are few; page 0 takes the rest."""
        self._ranks, self._fixed, start = ranks, fixed, 0
        self._places: list[list[slice]] = []  # in a row, of each rank's tensors
        for sizes in ranks.each(_words):
            of_rank = []
            for words in sizes:
                of_rank.append(slice(start, start + words))
                start += -(-words // ALIGNED) * ALIGNED
            self._places.append(of_rank)
        self.words = start  # of a row
        self.at_once = max(1, AT_ONCE // max(self.nbytes, 1))  # pages that are copied between two steps

    @property
    def nbytes(self) -> int:
        """Of a row."""
        return WORD * self.words

    def read(self, pages: Sequence[int]) -> Callable[[], Rows]:
        """Starts to copy the pages as they will be when all that was started has run; calling the result waits."""
        ids, count = self._padded(pages), len(pages)
        waiting = self._ranks.each(lambda worker: _read(worker, ids))

        def wait() -> Rows:
            rows = np.zeros((count, self.words), np.int32)
            for places, parts in zip(self._places, waiting, strict=True):
                for place, part in zip(places, parts, strict=True):
                    rows[:, place] = part().numpy()[:count]
            return rows

        return wait

    def write(self, pages: Sequence[int], rows: Rows) -> None:
        """Starts to copy the rows into these pages."""
        ids = self._padded(pages)
        if len(ids) > len(pages):
            rows = np.concatenate([rows, np.zeros((len(ids) - len(pages), self.words), np.int32)])
        places = dict(zip(self._ranks.workers, self._places, strict=True))
        self._ranks.each(lambda worker: _write(worker, ids, [rows[:, place] for place in places[worker]]))

    def _padded(self, pages: Sequence[int]) -> Array:
        count = len(pages)
        ids = np.zeros(1 << (count - 1).bit_length() if self._fixed else count, np.int32)
        ids[:count] = pages
        return ids


def _paged(worker: Worker) -> list[int]:
    """Which tensors of its state pages lie in, and take any room."""
    return [at for at in range(len(worker.arrangement.layouts)) if worker._state[at].nbytes > 0]


def _words(worker: Worker) -> list[int]:
    """Of one page, in each of these."""
    state = worker._state
    return [-(-(state[at].nbytes // state[at].shape[0]) // WORD) for at in _paged(worker)]


@torch.inference_mode()
def _read(worker: Worker, pages: Array) -> list[Callable[[], Tensor]]:
    (ids,) = worker.upload(pages)
    return [worker.device.to_host(worker.ops.gather_pages(worker._state[at], ids)) for at in _paged(worker)]


@torch.inference_mode()
def _write(worker: Worker, pages: Array, content: Sequence[Array]) -> None:
    ids, *parts = worker.upload(pages, *content)
    state = list(worker._state)
    for at, part in zip(_paged(worker), parts, strict=True):
        state[at] = worker.ops.scatter_pages(state[at], ids, part)
    worker._state = tuple(state)
