"""Ctrl-C, and books that must not be left half written."""

import importlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# What `signal` is made of, without its enums: to make one takes longer than most of what is guarded here.
_raw: Any = importlib.import_module("_signal")


class Uninterrupted:
    """Ctrl-C waits until the block is through. For what takes no time: nothing here may wait for a device.

    Only the main thread is ever interrupted; in other threads, and if Ctrl-C raises nothing, this does nothing.
    """

    def __enter__(self) -> None:
        self._came: tuple[int, FrameType | None] | None = None
        self._before = _raw.getsignal(signal.SIGINT)
        self._held = callable(self._before) and threading.current_thread() is threading.main_thread()
        if self._held:
            _raw.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held:
            _raw.signal(signal.SIGINT, self._before)
            if self._came is not None and callable(self._before):
                self._before(*self._came)
