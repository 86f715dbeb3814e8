"""Checks in separate processes that grammars compile: nothing else can stop a compilation."""

import contextlib
import queue
import select
import subprocess
import threading

from quintet.common.processes import Child
from quintet.structured_output.xgrammar_source import guidance_text

PROCESSES = 2  # that try grammars at a time; each takes 30 MB
TIMEOUT = 30.0  # seconds for one grammar, of which it may take trial_process.SECONDS of a processor

TOO_MUCH = "it takes too much time or memory to compile; simplify it"


class CompileChecker:
    """Starts its processes when they are needed, and keeps them. Used from any thread."""

    def __init__(self) -> None:
        self._places: queue.LifoQueue[_CheckProcess | None] = queue.LifoQueue()  # None: no process runs there
        for _ in range(PROCESSES):
            self._places.put(None)
        self._closed = threading.Event()

    def compile_error(self, text: str) -> str:
        """Waits for a place and until it is tried -> why it cannot be compiled; empty if it can be."""
        process, kept = self._places.get(), None
        try:
            process = process or _CheckProcess()
            why = process.compile_error(text)
            if why is not None and not self._closed.is_set():
                kept = process
            return TOO_MUCH if why is None else why
        finally:
            if process is not None and kept is None:  # it died, or its answer was not read
                process.end()
            self._places.put(kept)

    def close(self) -> None:
        """Ends the processes that wait, and those that work when they have done so."""
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            for _ in range(PROCESSES):
                if (process := self._places.get_nowait()) is not None:
                    process.end()


class _CheckProcess:
    """A process that tries one grammar at a time. It ends with this process: then its input ends."""

    def __init__(self) -> None:
        # its stderr has only panics, and its exit shows them and a kill
        self._child = Child(
            "quintet.structured_output.compile_worker", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def compile_error(self, text: str) -> str | None:
        """None: it did not live to say."""
        data, answers = guidance_text(text).encode(), self._child.stdout
        if not self._child.tell(len(data).to_bytes(4, "big") + data):
            return None
        waiting = select.poll()  # select() knows no file beyond the 1024th
        waiting.register(answers, select.POLLIN)
        if not waiting.poll(TIMEOUT * 1000):
            return None
        head = answers.read(4)
        return answers.read(int.from_bytes(head, "big")).decode() if len(head) == 4 else None

    def end(self) -> None:
        self._child.kill()
        self._child.close()
