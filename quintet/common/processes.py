"""Child processes of our own: started with orders, watched, and ended; none outlives its parent."""

import contextlib
import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any, NamedTuple, NoReturn, TypeVar

import msgspec

from quintet.common.imports import resume_garbage_collection
from quintet.common.subprocess_python import python_command

T = TypeVar("T")

DEVICE_CALL = "quintet-device-call"  # name of threads in a call of a device library that may never return

PARENT_GONE, REFUSED = 3, 4  # exit codes; refused: it has reported an error that the user can fix
ENDING = (signal.SIGINT, signal.SIGTERM)
_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_REASON = 1000  # characters that fit into a pipe that is not read
_GRACE = 5.0  # seconds that a process gets to notice that its parent is gone
_LOOK = 1.0  # seconds between two looks at the parent's id


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
    """A process that runs a module of ours, and ends with this one. Its standard input is the sign that this process
    lives: no other has its end. Ctrl-C in a terminal is for this process alone."""

    def __init__(
        self,
        module: str,
        orders: Any = None,
        inherit: Collection[int] = (),
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        """`orders`: what read_orders() returns there; `inherit`: file descriptors that it gets; `stdout`, `stderr`: as
        subprocess.Popen's."""
        with _blocked():
            self._process = subprocess.Popen(
                python_command(module, reads_orders=orders is not None), stdin=subprocess.PIPE, stdout=stdout,
                stderr=stderr, pass_fds=inherit, start_new_session=True,
            )  # fmt: skip
        weakref.finalize(self, _let_go, self._process).atexit = True  # a stopped child ends without close(), too
        if orders is not None:
            main = threading.current_thread() is threading.main_thread()
            self.tell(msgspec.json.encode([os.getpid(), main, orders]) + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> IO[bytes]:
        """Returns the end of its standard output, if that is a pipe."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def exit(self) -> Exit | None:
        """Returns its exit status; None while it runs."""
        code = self._process.poll()
        return None if code is None else Exit(code)

    def wait(self, seconds: float) -> Exit | None:
        """Waits for its end -> its exit status; None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.exit

    def follow(self, ended: Callable[[Exit], object]) -> None:
        """Calls `ended` from a thread of its own, once."""
        process = self._process  # not self: a child that is not referred to any more ends
        threading.Thread(
            target=lambda: ended(Exit(process.wait())), name=f"quintet-child-{self.pid}", daemon=True
        ).start()

    def tell(self, data: bytes) -> bool:
        """Writes to its standard input -> False if it reads no more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # the latter: it was let go
            return False
        return True

    def ask_to_end(self, why: str = "") -> None:
        """Passes a reason to the function that it has given follow_parent(); continues it if it was stopped."""
        self._process.send_signal(signal.SIGCONT)
        self.tell(why.replace("\n", " ")[:_REASON].encode(errors="replace") + b"\n")

    def let_go(self) -> None:
        """Closes its standard input, so that it ends at once."""
        _let_go(self._process)

    def kill(self) -> None:
        """Kills it at once, stopped or not."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self, seconds: float = 0.0) -> None:
        """Waits `seconds` for its end, then ends it."""
        if self.wait(seconds) is None:
            self.let_go()
            if self.wait(_GRACE) is None:
                self.kill()
                self._process.wait()
        self.let_go()
        if self._process.stdout is not None:
            self._process.stdout.close()


def close_all(children: Collection[Child]) -> None:
    """Ends all of them at once: none waits for another."""
    for child in children:
        child.let_go()
    for child in children:
        child.close()


def end(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Ends a process by SIGTERM, or, if it still runs after `seconds`, by SIGKILL."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _let_go(process: "subprocess.Popen[bytes]") -> None:
    """A process that was stopped (SIGSTOP) is continued: it would not see that its input has ended."""
    process.send_signal(signal.SIGCONT)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Context in which a child is started: signals that end a process are blocked until the child ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the child:


def read_orders(kind: type[T]) -> T:
    """Reads the orders from standard input, which stays open as long as the parent lives.

    Signals that end a program often go to all its processes; the parent decides what they mean. It started this process
    with them blocked, since imports take a while. If the thread that started this process lives as long as the parent,
    the system ends this process with it, even while it is stopped. Imports are made: see python_command().
    """
    resume_garbage_collection()
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:  # what comes after the line stays there
        parent, in_main_thread, orders = msgspec.json.decode(pipe.readline(), type=tuple[int, bool, kind])  # type: ignore[valid-type]
    if in_main_thread:
        ending_with_parent(parent, signal.SIGKILL)()
    return orders


def ending_with_parent(parent: int, by: signal.Signals) -> Callable[[], None]:
    """Returns a call that, on Linux, has the system send the calling process a signal when the thread that started it
    ends. It may be made between fork and exec."""
    libc = ctypes.CDLL(None)

    def call() -> None:
        if sys.platform == "linux":
            libc.prctl(_DEATH_SIGNAL, int(by), 0, 0, 0)
            if os.getppid() != parent:  # it ended before that
                os._exit(PARENT_GONE)

    return call


def follow_parent(report: Callable[[str], object] = lambda why: None) -> None:
    """Ends this process with its parent; calls the function, from a thread, if the parent wants its end before.

    Its argument is the reason: empty, to let running calls end first.
    """
    threading.Thread(target=_follow, args=(report,), name="quintet-parent", daemon=True).start()


def _follow(report: Callable[[str], object]) -> None:
    """A pipe's end is seen whatever killed the other side, unless a fork of the parent holds it, too. Nothing is worth
    saving: at once, in the midst of a step."""
    pipe, parent, rest = sys.stdin.fileno(), os.getppid(), b""
    while os.getppid() == parent:
        if not select.select([pipe], [], [], _LOOK)[0]:
            continue
        if not (piece := os.read(pipe, 4096)):
            break
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            with contextlib.suppress(RuntimeError):  # its loop has ended: so does the process
                report(line.decode())
    os._exit(PARENT_GONE)


def exit_process(code: int) -> NoReturn:
    """Ends this process; at once while a device call is under way: the interpreter would wait for one that never
    returns, and end by SIGABRT where it returns late."""
    if any(each.name == DEVICE_CALL for each in threading.enumerate()):
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
