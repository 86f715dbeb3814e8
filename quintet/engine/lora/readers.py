"""Threads that read adapters beside steps."""

import os
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from quintet.engine.lora.loaded import CLOSED
from quintet.lora.adapter import adapter_digest

READERS_NICE = 10  # their share of a core that a step computes on: a tenth


class Digests:
    """Computes digests of adapters, in a thread that waits for no adapter that is read whole."""

    def __init__(self) -> None:
        self._thread, self._closed = reading_pool(1, "adapter-digest"), False

    def of(self, folder: Path) -> bytes:
        """Returns an adapter's digest. Any thread may call it. RuntimeError if the engine was closed."""
        if self._closed:
            raise RuntimeError(CLOSED)
        try:
            return self._thread.submit(adapter_digest, folder).result()
        except (CancelledError, RuntimeError):
            if self._closed:
                raise RuntimeError(CLOSED) from None
            raise

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


def reading_pool(count: int, name: str) -> ThreadPoolExecutor:
    """Returns threads that read beside steps."""
    return ThreadPoolExecutor(count, name, _begin_reading, (torch.get_num_threads(),))


def _begin_reading(torch_threads: int) -> None:
    """Called first in a thread that reads: where cores are short, steps have them. `torch_threads`: of the others."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may refuse it: then readers share the cores alike
            nice = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, max(READERS_NICE, nice))
    torch.get_num_threads()  # the first call in a thread sets its number
    torch.set_num_threads(1)  # of this thread, and of those to come, which the next lines take back
    other = threading.Thread(target=torch.set_num_threads, args=(torch_threads,))
    other.start()
    other.join()
