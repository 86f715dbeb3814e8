"""A device's queue: one thread does what is put in, in order; whoever wants to know when, waits for its ticket."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

Work = Callable[[], None]  # raises nothing: what goes wrong belongs to the buffers that it was to fill


class Progress:
    """How far the thread has come. The thread holds this and not the queue, so that a forgotten queue ends it."""

    def __init__(self) -> None:
        self.done = 0
        self.changed = threading.Condition()


class Queue:
    """Tickets count 1, 2, 3, ...; ticket 0 is always done."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Work | None] = SimpleQueue()
        self._lock, self._last, self._progress = threading.Lock(), 0, Progress()
        threading.Thread(target=_run, args=(self._tasks, self._progress), name=name, daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def put(self, work: Work) -> int:
        """-> the ticket of this work."""
        with self._lock:
            self._last += 1
            self._tasks.put(work)
            return self._last

    def wait(self, ticket: int) -> None:
        """Until this work, and so all before it, is done."""
        progress = self._progress
        if progress.done < ticket:
            with progress.changed:
                progress.changed.wait_for(lambda: progress.done >= ticket)

    def drain(self) -> None:
        """Until all that was put in is done."""
        self.wait(self._last)


def _run(tasks: "SimpleQueue[Work | None]", progress: Progress) -> None:
    torch.set_num_threads(1)  # kernels are small, and their sums keep one order
    with torch.no_grad():
        while (work := tasks.get()) is not None:
            work()
            del work  # or it would keep its tensors until the next one comes
            with progress.changed:
                progress.done += 1
                progress.changed.notify_all()
