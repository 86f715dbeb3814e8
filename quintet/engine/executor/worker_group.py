"""Workers of one model in this process, and the processes of the other ranks."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from quintet.engine.executor.worker import PreviousTokens, Worker
from quintet.interface.platform import Channel
from quintet.interface.types import HostBatch, Outputs

T = TypeVar("T")
STEP_LEFT = "StepLeft"  # the error of a rank that waited for one that had left: not the cause


class RemoteRanks(Protocol):
    """The processes of the other ranks, where this one has started them."""

    @property
    def pids(self) -> list[int]: ...

    def close(self) -> None: ...


class WorkerGroup:
    """The workers of one model in this process. More than one run side by side in threads, and meet in their
    collectives; where ranks are processes, there is one here, and `others` are the rest."""

    def __init__(self, size: int, make: Callable[[int], Worker], others: RemoteRanks | None = None) -> None:
        self.remote_ranks = others
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="rank") if size > 1 else None
        self.workers: list[Worker] = self._each([partial(make, rank) for rank in range(size)])

    @property
    def channel(self) -> Channel | None:
        """Channel to the other ranks, where they are processes."""
        return self.workers[0].comm.channel if self.workers else None  # a simulated engine has none

    def map_workers(self, call: Callable[[Worker], T]) -> list[T]:
        """The call on every worker, in rank order."""
        return self._each([partial(call, worker) for worker in self.workers])

    def _each(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        if self._pool is None:
            return [call() for call in calls]
        futures = [self._pool.submit(call) for call in calls]
        return [future.result() for future in futures]

    def run(self, host: HostBatch, carried: PreviousTokens | None = None) -> Outputs:
        """One step on all ranks -> what it gives, which every rank has alike."""
        if self._pool is None:
            return self.workers[0].run(host, carried)
        return self.map_workers(lambda worker: worker.run(host, carried))[0]

    def draft(self, host: HostBatch, rows: Sequence[int] | None = None) -> Outputs:
        """One step of the drafter on all ranks (see Worker) -> what it gives, which every rank has alike."""
        return self.map_workers(lambda worker: worker.draft(host, rows))[0]

    def close(self) -> None:
        for worker in self.workers:
            worker.finish_store()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self.remote_ranks is not None:
            self.remote_ranks.close()
