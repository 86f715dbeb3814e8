"""Ctrl-C, and books that must not be left half written."""

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

# What `signal` is made of, without its enums: to make one takes longer than most of what is guarded here.
_raw: Any = importlib.import_module("_signal")
_AGAIN = 0.01  # seconds: what drops it has returned by then, as a rule; else it comes once more


class DeferredSigint:
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


@contextlib.contextmanager
def repeated_interrupts() -> Iterator[None]:
    """Context in which Ctrl-C comes again where Python drops it: a KeyboardInterrupt in a destructor, or in a callback
    of a weak reference, as imports have them, is only printed. For programs of our own."""
    before = sys.unraisablehook

    def lost(found: "sys.UnraisableHookArgs") -> None:
        if found.exc_type is not KeyboardInterrupt:
            return before(found)
        again = threading.Timer(_AGAIN, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = lost
    try:
        yield
    finally:
        sys.unraisablehook = before
