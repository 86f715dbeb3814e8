"""Processes of ranks beside this one: started, watched, and ended with it."""

import dataclasses
import logging
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from quintet.common.processes import Child, Exit, close_all
from quintet.config import EngineConfig
from quintet.distributed.rendezvous import TCP, call_off
from quintet.engine.parallel.commands import RankStart
from quintet.interface.platform import Channel
from quintet.platforms.host import nameless_file
from quintet.platforms.numa import unbound

logger = logging.getLogger(__name__)

FOLLOWER = "quintet.engine.parallel.follower"
CLOSED = "rank 0 has closed its engine"  # why ranks of other machines end, where nothing is wrong
_GRACE = 5.0  # seconds that a rank has to end
_RETRY_SECONDS = 0.2  # seconds between two attempts to report the end of one


class RankProcesses:
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
        fields = plain_fields(config, _reason_for_processes(config))
        ended: weakref.WeakMethod[Callable[[int, Exit], None]] = weakref.WeakMethod(self._ended)
        self._children: list[Child] = []
        try:
            for place, rank in enumerate(self._ranks):
                says = aloud and not place
                orders = RankStart(rank, size, self.endpoint, torch.get_num_threads(), fields, says)
                with unbound():
                    child = Child(FOLLOWER, orders, (self._file.fileno(),), stdout=subprocess.DEVNULL)
                self._children.append(child)
                child.follow(partial(_call, ended, place))
        except OSError:
            close_all(self._children)
            raise

    @property
    def pids(self) -> list[int]:
        """Returns the process ids of these ranks."""
        return [each.pid for each in self._children]

    def wait(self) -> int:
        """Waits until one has ended, and the others had the time to -> its exit code; 1, after a log message, if a
        signal ended it."""
        self._first.wait()
        code = self._codes[0]
        for child in self._children:
            child.wait(_GRACE)
        if code >= 0:
            return code
        logger.error("%s", self._lost)
        return 1

    def set_channel(self, channel: Channel) -> None:
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
        close_all(self._children)

    def _ended(self, place: int, how: Exit) -> None:
        self._codes.append(how.code)
        if self._closing.is_set():
            self._first.set()
            return
        with self._lock:
            self._lost = self._lost or f"rank {self._ranks[place]} of {self.size} has ended: {how}"
            if self._channel is not None:
                self._channel.abort(self._lost)
        self._first.set()
        if self.endpoint.startswith(TCP) and not self._need_not_tell():
            report_call_off(self.endpoint, self._lost, self._need_not_tell)

    def _need_not_tell(self) -> bool:
        """Returns whether waiting ranks get the reason otherwise, or are another machine's: it may have met others by
        then."""
        return self._channel is not None or self._closing.is_set() or not self._leads


def _reason_for_processes(config: EngineConfig) -> str:
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


def report_call_off(endpoint: str, why: str, done: Callable[[], bool]) -> None:
    """Reports to the process that gathers the ranks, and may not listen yet, that a rank will not come: until it has
    received that, or `done` returns True."""
    while not call_off(endpoint, why) and not done():
        time.sleep(_RETRY_SECONDS)


def _call(ended: "weakref.WeakMethod[Callable[[int, Exit], None]]", place: int, how: Exit) -> None:
    """Calls a method of ranks that are still referred to: those that are not end by themselves."""
    call = ended()
    if call is not None:
        call(place, how)
