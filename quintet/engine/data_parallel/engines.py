"""Data parallelism: several engines, each a process with its share of the machine and of the requests."""

import os
import socket
import subprocess
import time
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from quintet.common.interrupts import Uninterrupted
from quintet.config import EngineConfig
from quintet.engine.data_parallel import each_engine, messages
from quintet.engine.data_parallel.balancing import LoadBalancer
from quintet.engine.observability.profiler import Profiler
from quintet.engine.observability.stats import Stats, total
from quintet.engine.parallel import commands as inbox
from quintet.engine.parallel.multiproc import ChildProcesses, how, in_main_thread, line, plain_fields
from quintet.engine.request import CoreRequest
from quintet.engine.startup import EnginePlan
from quintet.interface.platform import ASIDE, DeviceLost
from quintet.model_loader.weight_files import Weights
from quintet.outputs import TokenDelta

MODULE = "quintet.engine.data_parallel.engine_process"
_TURN = 0.05  # seconds that compute() waits for an engine, so that calls in between get their turn
_GRACE = 5.0  # seconds from the end of a process's socket to its own


def shared_out(asked: EngineConfig, settled: EngineConfig) -> EngineConfig:
    """Returns the settings for each engine: those asked for, with the KV cache memory that the platform chose for one
    of them, before they take from one another what is free."""
    return asked.replace(kv_cache_memory_bytes=settled.kv_cache_memory_bytes)


class Engines:
    """Several engines with the interface of an Engine, for a Client. One thread at a time.

    A request belongs to one engine, from add() to its last delta. When an engine ends, its requests end with an error;
    the others finish theirs, and none accepts more.
    """

    def __init__(self, config: EngineConfig, page_size: int) -> None:
        """Returns when all are loaded. ValueError, OSError or MemoryError says why one is not, and then none is left.

        `config`: as the user gave it; every engine derives the same from it.
        """
        self.profiler, self.asleep = Profiler(), 0
        engines = each_engine(config)
        self.size = len(engines)
        self._timeout = config.distributed_timeout_seconds
        self._router = LoadBalancer(self.size, page_size)
        self._names: dict[str, str] = {}  # of requests that have not ended, as their engine knows them -> their ids
        self._ids: dict[str, str] = {}  # and back
        self._num_added = 0
        self._deltas: list[TokenDelta] = []  # that no call of take() has returned yet
        self._lost: dict[int, str] = {}  # engines that have ended, and why
        self._heard = [time.monotonic()] * self.size
        self._asked = [0.0] * self.size  # when each was last sent something
        self._stats: list[Stats | None] = [None] * self.size
        self._replies: dict[int, messages.Ready | messages.Done | messages.Refused] = {}
        self._links: list[Connection[bytes, bytes]] = []
        self.children = self._start(engines)
        try:
            self.max_model_len = min(self._loaded())
        except BaseException as error:
            self.children.close()
            if isinstance(error, DeviceLost):
                raise ValueError(f"the engines did not start: {error}") from None
            raise

    def _start(self, engines: list[EngineConfig]) -> ChildProcesses:
        pairs = [socket.socketpair() for _ in engines]
        try:
            files = [theirs.fileno() for _, theirs in pairs]
            orders = [
                line(self._orders(each, number, file))
                for number, (each, file) in enumerate(zip(engines, files, strict=True))
            ]
            children = ChildProcesses(MODULE, orders, [(file,) for file in files])
            self._links = [Connection(ours.detach()) for ours, _ in pairs]
            return children
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()

    def _orders(self, config: EngineConfig, number: int, file: int) -> messages.Orders:
        fields = plain_fields(config, f"data_parallel_size={config.data_parallel_size}")
        return messages.Orders(number, file, torch.get_num_threads(), fields, os.getpid(), in_main_thread())

    def _loaded(self) -> list[int]:
        """Returns the max_model_len of each engine; waits for all, unless one refuses."""
        while len(self._replies) < self.size:
            self._listen(1.0)
            for reply in self._replies.values():
                if isinstance(reply, messages.Refused):
                    raise reply.error()
            self._check_alive()
        replies, self._replies = self._replies, {}
        return [each.max_model_len for each in replies.values() if isinstance(each, messages.Ready)]

    def within(self, prepared: EnginePlan) -> EnginePlan:
        """Returns `prepared`, limited to what all engines can serve; closing its ranks closes them."""
        prepared.ranks.others = self.children
        plan = replace(prepared.plan, max_model_len=min(prepared.plan.max_model_len, self.max_model_len))
        return replace(prepared, plan=plan)

    def __len__(self) -> int:
        """Returns the number of requests that have not ended."""
        return len(self._ids)

    @property
    def busy(self) -> bool:
        """Returns whether compute() has anything to do."""
        return bool(self._ids or self._deltas)

    def add(self, admitted: CoreRequest) -> None:
        """Sends a request to an engine; ValueError says why it cannot, RuntimeError that an engine is gone."""
        self.check_awake()
        self._check_alive()
        request_id = admitted.request_id
        if request_id in self._ids:
            raise ValueError(f"request id {request_id!r} is in use; give each running request its own")
        name = str(self._num_added)  # an id may be used again while deltas of its first request are under way
        letter = inbox.added(replace(admitted, request_id=name))
        self._num_added += 1
        with Uninterrupted():
            engine = self._router.choose(name, admitted.prompt_ids, admitted.salt + admitted.embeds)
            self._ids[request_id], self._names[name] = name, request_id
            self._send(engine, letter)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Aborts requests, as Engine.abort does."""
        ids = dict.fromkeys(request_ids)
        self._deltas = [delta for delta in self._deltas if delta.request_id not in ids]
        theirs: dict[int, list[str]] = {}
        with Uninterrupted():
            for request_id in ids:
                if request_id in self._ids:
                    name, engine = self._ids[request_id], self._end(request_id)
                    theirs.setdefault(engine, []).append(name)
            for engine, names in theirs.items():
                self._send(engine, inbox.aborted(names))

    def take(self) -> list[TokenDelta]:
        """Returns the deltas that compute() has collected."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def compute(self) -> None:
        """Takes in what engines have sent; waits for a moment if that is nothing."""
        self._listen(0.0 if self._deltas else _TURN)
        self._end_silent()

    def reset_prefix_cache(self) -> None:
        self._check_alive()
        self._router.forget()
        for engine in range(self.size):
            self._send(engine, inbox.ResetPrefixCache())

    def sleep(self, level: int = ASIDE) -> int:
        """Sleeps as Engine.sleep does: all engines, or none."""
        if self._ids:
            raise ValueError(f"the engine has {len(self)} requests; let them finish, or abort them, before it sleeps")
        was = self.asleep
        try:
            freed = sum(self._jointly(inbox.Sleep(level)))
        except (ValueError, NotImplementedError, OSError, MemoryError):
            if not was:
                self._jointly(inbox.WakeUp())
            raise
        self.asleep = level
        self._router.forget()
        return freed

    def wake_up(self) -> None:
        self._jointly(inbox.WakeUp())
        self.asleep = 0

    def reload_weights(self, folder: Path | Weights | None) -> None:
        """Reloads weights as Engine.reload_weights does; each engine reads them."""
        self.check_awake()
        path = folder.folder if isinstance(folder, Weights) else folder
        self._jointly(inbox.Reload(None if path is None else str(path)))
        self._router.forget()

    def check_awake(self) -> None:
        """Raises ValueError while the engines sleep."""
        if self.asleep:
            raise ValueError(f"the engine is asleep (level {self.asleep}) and takes no requests; call wake_up() first")

    def close(self) -> None:
        """Closes the profiler. Each engine ends with its process, and that with the ranks of within()."""
        self.profiler.close()

    def stats(self) -> Stats:
        """Returns the total of the engines' last reports. Any thread may call it."""
        stats = total([each for each in self._stats if each is not None])
        if self._ids:
            return stats
        return replace(stats, scheduler=replace(stats.scheduler, num_running=0, num_waiting=0, kv_usage=0.0))

    def stats_of_each(self) -> list[Stats | None]:
        """Returns the last report of each engine; None: it has sent none yet."""
        return list(self._stats)

    def _jointly(self, order: inbox.Joint) -> list[int]:
        """Sends an order to all engines -> the bytes that each freed. Raises the error of one that fails."""
        self._check_alive()
        with Uninterrupted():
            for engine in range(self.size):
                self._send(engine, messages.Run(order))
            replies = self._answers()
        refused = [each for each in replies if isinstance(each, messages.Refused)]
        if refused:
            raise refused[0].error()
        return [each.freed for each in replies if isinstance(each, messages.Done)]

    def _answers(self) -> list["messages.Ready | messages.Done | messages.Refused"]:
        """Waits for a reply of each engine, and returns them."""
        while len(self._replies) < self.size:
            self._listen(1.0)
            self._check_alive()
        replies, self._replies = self._replies, {}
        return [replies[engine] for engine in range(self.size)]

    def _listen(self, seconds: float) -> None:
        """Takes in what has arrived; waits so long for something."""
        links = {link: engine for engine, link in enumerate(self._links) if engine not in self._lost}
        for link in wait(list(links), seconds):
            engine = links[link]  # type: ignore[index]
            with Uninterrupted():
                try:
                    self._hear(engine, messages.decode_reply(self._links[engine].recv_bytes()))
                except (EOFError, OSError):
                    self._lose(engine, self._end_of(engine))

    def _hear(self, engine: int, reply: messages.Reply) -> None:
        self._heard[engine] = time.monotonic()
        if isinstance(reply, messages.Report):
            self._stats[engine] = reply.stats
            for delta in reply.deltas:
                self._pass_on(delta)
        elif isinstance(reply, messages.Crashed):
            self._lose(engine, f"broke: {reply.why}")
        else:
            self._replies[engine] = reply

    def _pass_on(self, delta: TokenDelta) -> None:
        """Keeps a delta, under the caller's id; drops deltas of requests that have ended here."""
        request_id = self._names.get(delta.request_id)
        if request_id is not None:
            delta.request_id = request_id
            self._deltas.append(delta)
            if delta.finish_reason is not None:
                self._end(request_id)

    def _end(self, request_id: str) -> int:
        """Ends a request, for which no more deltas come -> its engine."""
        name = self._ids.pop(request_id)
        del self._names[name]
        engine = self._router.close(name)
        assert engine is not None, f"{request_id} was given to no engine"
        return engine

    def _end_silent(self) -> None:
        """Ends an engine that has requests and gives no sign of life, stopped or stuck."""
        if not self._ids:
            return
        for engine, heard in enumerate(self._heard):
            silent = time.monotonic() - max(heard, self._asked[engine])
            if engine not in self._lost and silent > self._timeout and self._router.loads[engine]:
                self.children.kill(engine)
                self._lose(engine, f"gave no sign of life for {self._timeout} s and was ended")

    def _lose(self, engine: int, why: str) -> None:
        """Records that an engine is lost; its requests end with an error."""
        why = f"engine {engine} of {self.size} {why}"
        self._lost[engine] = why
        for request_id, name in list(self._ids.items()):
            if self._router.engine_of(name) == engine:
                self._end(request_id)
                self._deltas.append(TokenDelta(request_id, [], finish_reason="error", error=why))

    def _end_of(self, engine: int) -> str:
        try:
            return f"has ended: {how(self.children.wait(engine, _GRACE))}"
        except subprocess.TimeoutExpired:
            self.children.kill(engine)
            return "hung up, and was ended"

    def _check_alive(self) -> None:
        """Raises DeviceLost, a RuntimeError, if an engine has ended."""
        if self._lost:
            raise DeviceLost(next(iter(self._lost.values())))

    def _send(self, engine: int, letter: Any) -> None:
        """Sends a message; if the engine has ended, nothing: _listen() finds out."""
        self._asked[engine] = time.monotonic()
        try:
            self._links[engine].send_bytes(messages.encode(letter))
        except OSError:
            pass
