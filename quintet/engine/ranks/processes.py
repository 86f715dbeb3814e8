"""The processes of the ranks beside this one: started, watched, and ended with it."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable

import msgspec
import torch

from quintet.config import EngineConfig
from quintet.engine.ranks.inbox import Orders
from quintet.interpreter import running
from quintet.platforms.host import nameless_file
from quintet.platforms.interface import Channel

FOLLOWER = "quintet.engine.ranks.follower"
PARENT_GONE, REFUSED = 3, 4  # exit codes; refused: it has told why
_GRACE = 5.0  # seconds that a rank has to end


class Processes:
    """Ranks 1 and up. Their standard input is the sign that this process lives: it alone holds the other end."""

    def __init__(self, config: EngineConfig, size: int) -> None:
        """`config` as the platform settled it. ValueError if it holds what another process cannot be given."""
        self.size, self._file = size, nameless_file()
        self.endpoint = f"shared://{self._file.fileno()}"
        self._channel: Channel | None = None
        self._lost, self._closing, self._lock = "", threading.Event(), threading.Lock()
        orders = [self._orders(config, rank) for rank in range(1, size)]
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            for rank, order in enumerate(orders, 1):
                self._children.append(self._start(rank, order))
        except OSError:
            self.close()
            raise
        # who forgets to close has no processes left all the same
        weakref.finalize(self, _let_go, self._children).atexit = True

    @property
    def pids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [each.pid for each in self._children]

    def attach(self, channel: Channel) -> None:
        """From now on whoever waits hears of a rank's end."""
        with self._lock:
            self._channel = channel
            if self._lost:
                channel.stop(self._lost)

    def close(self) -> None:
        """Ends all of them; waits until they have ended."""
        self._closing.set()
        _let_go(self._children)
        for each in self._children:
            try:
                each.wait(_GRACE)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()

    def _orders(self, config: EngineConfig, rank: int) -> bytes:
        fields = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
        main = threading.current_thread() is threading.main_thread()
        orders = Orders(rank, self.size, self._file.fileno(), torch.get_num_threads(), fields, os.getpid(), main)
        try:
            return msgspec.json.encode(orders) + b"\n"
        except TypeError as error:
            raise ValueError(
                f"tensor_parallel_size={self.size} gives the settings to other processes, and one is a Python object "
                f"({error}); give it by name, as module:name"
            ) from None

    def _start(self, rank: int, orders: bytes) -> subprocess.Popen[bytes]:
        """In a session of its own: Ctrl-C in a terminal is rank 0's to heed."""
        child = subprocess.Popen(
            running(FOLLOWER), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(self._file.fileno(),),
            start_new_session=True,
        )  # fmt: skip
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(orders)
            child.stdin.flush()
        watch = weakref.WeakMethod(self._ended)
        threading.Thread(target=_watch, args=(child, rank, watch), name=f"quintet-rank-{rank}", daemon=True).start()
        return child

    def _ended(self, rank: int, code: int) -> None:
        if self._closing.is_set():
            return
        with self._lock:
            self._lost = self._lost or f"rank {rank} of {self.size} has ended: {how(code)}"
            if self._channel is not None:
                self._channel.stop(self._lost)


def how(code: int) -> str:
    """An exit code in words; negative: a signal."""
    if code >= 0:
        return f"it exited with code {code}"
    name = signal.Signals(-code).name
    return f"it was killed by {name}" + ("; the system may have run out of memory" if name == "SIGKILL" else "")


def _watch(
    child: "subprocess.Popen[bytes]", rank: int, ended: "weakref.WeakMethod[Callable[[int, int], None]]"
) -> None:
    code = child.wait()
    call = ended()
    if call is not None:
        call(rank, code)


def _let_go(children: "list[subprocess.Popen[bytes]]") -> None:
    """They see this process gone, those that were stopped too."""
    for each in children:
        assert each.stdin is not None
        with contextlib.suppress(ProcessLookupError):
            if each.returncode is None:
                os.kill(each.pid, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            each.stdin.close()
