"""The processes of one server: started with their orders, watched, and ended; none outlives its parent."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from quintet.common.subprocess_python import running
from quintet.server.processes.child import ENDING, PARENT_GONE
from quintet.server.processes.messages import Orders

ENGINE, API = "quintet.server.processes.engine_process", "quintet.server.processes.api_process"
_REASON = 1000  # characters that fit into a pipe that is not read
_GRACE = 5.0  # seconds that a process gets to notice that we are gone


class Exit(NamedTuple):
    """Exit status of a process."""

    code: int  # negative: the signal

    def __str__(self) -> str:
        if self.code == PARENT_GONE:
            return "its parent had gone"
        if self.code >= 0:
            return f"it exited with code {self.code}"
        name = signal.Signals(-self.code).name
        hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
        return f"it was killed by {name}{hint}"


class Child:
    """A process that ends with this one. Its standard input is the sign that we live: we alone hold its end."""

    def __init__(self, module: str, orders: Orders) -> None:
        inherit = () if orders.listen < 0 else (orders.listen,)
        with _blocked():
            self._process = subprocess.Popen(running(module), stdin=subprocess.PIPE, pass_fds=inherit)
        assert self._process.stdin is not None
        self._tell(msgspec.json.encode(orders) + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def follow(self, ended: Callable[[Exit], None]) -> None:
        """Calls `ended` from a thread of its own, once."""
        threading.Thread(
            target=lambda: ended(Exit(self._process.wait())), name=f"quintet-child-{self.pid}", daemon=True
        ).start()

    def ask_to_end(self, why: str = "") -> None:
        """Lets an API process finish what it has, or end it when it was asked before; with a reason, it ends that, and
        tells the callers that wait."""
        self._wake()
        self._tell(why.replace("\n", " ")[:_REASON].encode(errors="replace") + b"\n")

    def let_go(self) -> None:
        """Closes its standard input, so that it ends at once."""
        self._wake()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kills it at once, stopped or not."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self, seconds: float = 0.0) -> None:
        """Waits `seconds` for its end, then ends it."""
        for patience in (seconds, _GRACE):
            try:
                self._process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                self.let_go()
        else:
            self.kill()
            self._process.wait()
        self.let_go()

    def _wake(self) -> None:
        """Continues a process that was stopped (SIGSTOP): it would read no message."""
        self._process.send_signal(signal.SIGCONT)

    def _tell(self, word: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # the latter: it was let go
            self._process.stdin.write(word)
            self._process.stdin.flush()


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Context in which a child is started: signals that end a server are blocked until the child ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def inheritable(descriptor: int) -> int:
    """The same file under a number that children may have."""
    os.set_inheritable(descriptor, True)
    return descriptor
