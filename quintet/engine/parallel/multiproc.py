"""Processes beside this one, of ranks or of engines: started, watched, and ended with it."""

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from quintet.common.subprocess_python import running
from quintet.config import EngineConfig
from quintet.distributed.rendezvous import TCP, call_off
from quintet.engine.parallel.commands import Command
from quintet.interface.platform import Channel
from quintet.platforms.host import nameless_file
from quintet.platforms.numa import standing

logger = logging.getLogger(__name__)

FOLLOWER = "quintet.engine.parallel.follower"
PARENT_GONE, REFUSED = 3, 4  # exit codes; refused: it has reported why
CLOSED = "rank 0 has closed its engine"  # why ranks of other machines end, where nothing is wrong
_GRACE = 5.0  # seconds that a rank has to end
_AGAIN = 0.2  # seconds between two attempts to report the end of one


class ChildProcesses:
    """Processes that end with this one. Their standard input shows that it lives: no other has its other end."""

    def __init__(
        self,
        module: str,
        orders: Sequence[bytes],
        inherit: Sequence[tuple[int, ...]],
        ended: Callable[[int, int], None] | None = None,
    ) -> None:
        """Starts one for each of `orders`, its first line of input, with the files that it inherits. `ended`: a bound
        method, called from a thread with a child's place among them and its exit code."""
        self._processes: list[subprocess.Popen[bytes]] = []
        watch = None if ended is None else weakref.WeakMethod(ended)
        try:
            for place, (order, files) in enumerate(zip(orders, inherit, strict=True)):
                child = _started(module, order, files)
                self._processes.append(child)
                if watch is not None:
                    threading.Thread(
                        target=_watch, args=(child, place, watch), name=f"{module}-{place}", daemon=True
                    ).start()
        except OSError:
            self.close()
            raise
        # without close() no processes are left, either
        weakref.finalize(self, _let_go, self._processes).atexit = True

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self._processes]

    def wait(self, place: int, seconds: float) -> int:
        """Waits for one to end -> its exit code; subprocess.TimeoutExpired if it lives on."""
        return self._processes[place].wait(seconds)

    def kill(self, place: int) -> None:
        self._processes[place].kill()

    def close(self) -> None:
        """Ends all of them; waits until they have ended."""
        _let_go(self._processes)
        for each in self._processes:
            try:
                each.wait(_GRACE)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()


class Processes:
    """Processes of ranks 1 and up, or of those on this machine."""

    def __init__(
        self, config: EngineConfig, size: int, ranks: range | None = None, endpoint: str = "", aloud: bool = False
    ) -> None:
        """`config`: as the platform settled it; `ranks`: those of `size` that are started here, to meet the others at
        the endpoint; `aloud`: the first of them prints why they end. ValueError if `config` has a value that cannot be
        sent to another process."""
        self.size, self._file = size, nameless_file()
        self.endpoint = endpoint or f"shared://{self._file.fileno()}"
        self._ranks = range(1, size) if ranks is None else ranks
        self._channel: Channel | None = None
        self._leads = config.node_rank == 0  # on this machine rank 0 gathers the others
        self._codes, self._first = list[int](), threading.Event()  # exit codes of those that have ended
        self._lost, self._closing, self._lock = "", threading.Event(), threading.Lock()
        fields, main = plain_fields(config, _asked(config)), in_main_thread()
        orders = [
            Command(
                rank,
                size,
                self.endpoint,
                torch.get_num_threads(),
                fields,
                os.getpid(),
                main,
                aloud and rank == self._ranks[0],
            )
            for rank in self._ranks
        ]
        inherit = [(self._file.fileno(),)] * len(orders)
        self._children = ChildProcesses(FOLLOWER, [line(each) for each in orders], inherit, self._ended)

    @property
    def pids(self) -> list[int]:
        """Returns the process ids of these ranks."""
        return self._children.pids

    def wait(self) -> int:
        """Waits until one has ended, and the others had the time to -> its exit code; 1, after a log message, if a
        signal ended it."""
        self._first.wait()
        code = self._codes[0]
        for place in range(len(self._ranks)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._children.wait(place, _GRACE)
        if code >= 0:
            return code
        logger.error("%s", self._lost)
        return 1

    def attach(self, channel: Channel) -> None:
        """Sets the channel that stops when a rank ends, so that all that wait get the reason."""
        with self._lock:
            self._channel = channel
            if self._lost:
                channel.abort(self._lost)

    def close(self) -> None:
        """Ends all of them; waits until they have ended."""
        self._closing.set()
        if self._channel is not None and len(self._ranks) < self.size - 1:
            self._channel.abort(CLOSED)  # ranks of other machines get the reason
        self._children.close()

    def _ended(self, place: int, code: int) -> None:
        self._codes.append(code)
        if self._closing.is_set():
            self._first.set()
            return
        with self._lock:
            self._lost = self._lost or f"rank {self._ranks[place]} of {self.size} has ended: {how(code)}"
            if self._channel is not None:
                self._channel.abort(self._lost)
        self._first.set()
        if self.endpoint.startswith(TCP) and not self._need_not_tell():
            called_off(self.endpoint, self._lost, self._need_not_tell)

    def _need_not_tell(self) -> bool:
        """Returns whether waiting ranks get the reason otherwise, or are another machine's: it may have met others by
        then."""
        return self._channel is not None or self._closing.is_set() or not self._leads


def _asked(config: EngineConfig) -> str:
    name = "tensor_parallel_size" if config.pipeline_parallel_size == 1 else "pipeline_parallel_size"
    return f"{name}={getattr(config, name)}"


def plain_fields(config: EngineConfig, why: str) -> dict[str, Any]:
    """Returns the settings to send to another process, which `why` asks for; ValueError where one is an object."""
    fields = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    try:
        msgspec.json.encode(fields)
    except TypeError as error:
        raise ValueError(
            f"{why} gives the settings to other processes, and one is a Python object ({error}); give it by name, as "
            "module:name"
        ) from None
    return fields


def called_off(endpoint: str, why: str, done: Callable[[], bool]) -> None:
    """Reports to the process that gathers the ranks, and may not listen yet, that a rank will not come: until it has
    received that, or `done` returns True."""
    while not call_off(endpoint, why) and not done():
        time.sleep(_AGAIN)


def line(orders: Any) -> bytes:
    return msgspec.json.encode(orders) + b"\n"


def in_main_thread() -> bool:
    """Returns whether this is the main thread: it lives as long as this process."""
    return threading.current_thread() is threading.main_thread()


def _started(module: str, orders: bytes, files: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    """Starts a process in a session of its own: Ctrl-C in a terminal is for the process that starts it."""
    with standing():
        child = subprocess.Popen(
            running(module), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=files, start_new_session=True
        )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(orders)
        child.stdin.flush()
    return child


def how(code: int) -> str:
    """Returns an exit code in words; negative: a signal."""
    if code >= 0:
        return f"it exited with code {code}"
    name = signal.Signals(-code).name
    return f"it was killed by {name}" + ("; the system may have run out of memory" if name == "SIGKILL" else "")


def _watch(
    child: "subprocess.Popen[bytes]", place: int, ended: "weakref.WeakMethod[Callable[[int, int], None]]"
) -> None:
    code = child.wait()
    call = ended()
    if call is not None:
        call(place, code)


def _let_go(children: "list[subprocess.Popen[bytes]]") -> None:
    """Ends the processes: closes their standard input, and continues those that were stopped, so that they see it."""
    for each in children:
        assert each.stdin is not None
        with contextlib.suppress(ProcessLookupError):
            if each.returncode is None:
                os.kill(each.pid, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            each.stdin.close()
