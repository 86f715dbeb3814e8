"""Data parallelism: several engines, each a process with its share of the machine and of the requests."""

import itertools
import os
import subprocess
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import zmq

from quintet.common.interrupts import DeferredSigint
from quintet.common.processes import REFUSED, Child, close_all
from quintet.common.socket_folder import PrivateFolder
from quintet.config import EngineConfig
from quintet.engine.data_parallel import local_engine_configs
from quintet.engine.executor.engine_plan import EnginePlan
from quintet.engine.observability.profiler import Profiler
from quintet.engine.observability.stats import Stats
from quintet.engine.parallel.commands import ReloadCommand, ResetPrefixCacheCommand, SleepCommand, WakeUpCommand, sent
from quintet.engine.parallel.multiproc import plain_fields
from quintet.engine.processes import messages as wire
from quintet.engine.processes.engine_clients import EngineClients
from quintet.engine.processes.model_info import ModelInfo
from quintet.engine.request import CoreRequest
from quintet.engine.sleep import check_tags
from quintet.engine.weight_transfer.remote import RemoteControls
from quintet.interface.platform import ASIDE, DeviceLost
from quintet.model_loader.weight_files import WeightFiles
from quintet.outputs import TokenDelta
from quintet.platforms.numa import unbound

MODULE = "quintet.engine.processes.engine_process"
UNREAD = 64  # messages of an engine that wait here; others wait there
_POLL_SECONDS = 0.05  # seconds that compute() waits for an engine, so that calls in between get their turn


def per_engine_config(asked: EngineConfig, settled: EngineConfig) -> EngineConfig:
    """Returns the settings for each engine: those asked for, with the KV cache memory that the platform chose for one
    of them, before they take from one another what is free."""
    return asked.replace(kv_cache_memory_bytes=settled.kv_cache_memory_bytes)


class DataParallelEngines:
    """Several engines with the interface of an Engine, for a Client. One thread at a time.

    A request belongs to one engine, from add() to its last delta. When an engine ends, its requests end with an error;
    the others finish theirs, and none accepts more.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Returns when all are loaded. ValueError, OSError or MemoryError says why one is not, and then none is left.

        `config`: as the user gave it; every engine derives the same from it.
        """
        self.profiler, self.asleep = Profiler(), 0
        self._parts_awake = False  # while they sleep, the weights are awake
        self.controls = RemoteControls(self._jointly, self.stats)
        self._timeout = config.distributed_timeout_seconds
        self._names: dict[str, str] = {}  # of requests that have not ended, as their engine knows them -> their ids
        self._ids: dict[str, str] = {}  # and back
        self._num_added = 0
        self._deltas: list[TokenDelta] = []  # that no call of take() has returned yet
        self._lost: dict[int, str] = {}  # engines that have ended, and why
        self._served: ModelInfo | None = None  # once all are loaded
        self._numbers = itertools.count()  # of orders
        self._answers: dict[int, wire.Answer] = {}
        engines = [_fields(each) for each in local_engine_configs(config)]
        self._folder, context = PrivateFolder(), zmq.Context[zmq.Socket[bytes]]()
        self._clear = weakref.finalize(self, _clear, os.getpid(), self._folder, context)
        self._inbox = context.socket(zmq.PULL)
        self._inbox.rcvhwm = UNREAD
        self._inbox.bind(wire.worker_address(self._folder.path, 0))
        self.clients = EngineClients(context, self._folder.path, len(engines), self._timeout)
        self.children: list[Child] = []
        try:
            for number, fields in enumerate(engines):
                self.children.append(self._started(number, fields))
            self.clients.tell_all(wire.Join(0))
            self.max_model_len = self._loaded().max_model_len
        except BaseException:
            self.close()
            raise

    def _started(self, number: int, fields: dict[str, Any]) -> Child:
        threads = torch.get_num_threads()
        orders = wire.EngineOrders(str(self._folder.path), number, 1, fields, threads=threads, stats_each_step=True)
        with unbound():
            return Child(MODULE, orders, stdout=subprocess.DEVNULL)

    def _loaded(self) -> ModelInfo:
        """Waits for all engines, unless one ends -> what they serve together."""
        while self._served is None:
            self._listen()
            for engine, why in self._lost.items():
                failure, how = wire.Failure.left(self._folder.path, engine), self.children[engine].exit
                if failure is not None and how is not None and how.code == REFUSED:
                    raise wire.FIXABLE[failure.kind](failure.why)
                raise ValueError(f"the engines did not start: {why}")
        return self._served

    def limit_plan(self, prepared: EnginePlan) -> EnginePlan:
        """Returns `prepared`, limited to what all engines can serve."""
        plan = replace(prepared.memory_plan, max_model_len=min(prepared.memory_plan.max_model_len, self.max_model_len))
        return replace(prepared, memory_plan=plan)

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
        with sent(request_id):
            frame = wire.encode(wire.Submit.of(0, [[replace(admitted, request_id=name)]]))
        self._num_added += 1
        with DeferredSigint():
            self._ids[request_id], self._names[name] = name, request_id
            self.clients.send(self.clients.choose(name, admitted), frame)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Aborts requests, as Engine.abort does."""
        ids = dict.fromkeys(request_ids)
        self._deltas = [delta for delta in self._deltas if delta.request_id not in ids]
        with DeferredSigint():
            names = [self._end(request_id) for request_id in ids if request_id in self._ids]
            if names:
                self.clients.tell_all(wire.Abort(0, names))

    def take_deltas(self) -> list[TokenDelta]:
        """Returns the deltas that compute() has collected."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def compute(self) -> None:
        """Takes in what engines have sent; waits for a moment if that is nothing."""
        self._listen(0.0 if self._deltas else _POLL_SECONDS)
        if self._ids and (hung := self.clients.hung(self._timeout, self._lost)) is not None:
            engine, why = hung
            self.children[engine].kill()
            self._lose(engine, f"{why} and was ended")

    def reset_prefix_cache(self) -> None:
        self._jointly(ResetPrefixCacheCommand())
        self.clients.forget()

    def sleep(self, level: int = ASIDE) -> int:
        """Sleeps as Engine.sleep does: all engines, or none."""
        if self._ids:
            raise ValueError(f"the engine has {len(self)} requests; let them finish, or abort them, before it sleeps")
        was = self.asleep
        try:
            freed = sum(answer.freed for answer in self._jointly(SleepCommand(level)))
        except tuple(wire.FIXABLE.values()):
            if not was:
                self._jointly(WakeUpCommand())
            raise
        self.asleep = level
        self.clients.forget()
        return freed

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        wakes = check_tags(tags)
        self._jointly(WakeUpCommand(list(wakes)))
        if "kv_cache" in wakes:
            self.asleep = 0
        self._parts_awake = self.asleep > 0

    def reload_weights(self, folder: Path | WeightFiles | None) -> None:
        """Reloads weights as Engine.reload_weights does; each engine reads them."""
        if not self._parts_awake:
            self.check_awake(torn=True)
        path = folder.folder if isinstance(folder, WeightFiles) else folder
        self._jointly(ReloadCommand(None if path is None else str(path)))
        self.controls.refusal = ""
        self.clients.forget()

    def check_awake(self, torn: bool = False) -> None:
        """Raises ValueError while the engines sleep, or, but for `torn`, while their weights are torn."""
        if self.controls.refusal and not torn:
            raise ValueError(self.controls.refusal)
        if self.asleep:
            raise ValueError(f"the engine is asleep (level {self.asleep}) and takes no requests; call wake_up() first")

    def close(self) -> None:
        """Ends the engines."""
        self.profiler.close()
        close_all(self.children)
        self._clear()

    def stats(self) -> Stats:
        """Returns the total of the engines' last reports. Any thread may call it."""
        stats = self.clients.stats()
        assert stats is not None, "all have sent some with Hello"
        return (
            stats
            if self._ids
            else replace(stats, scheduler=replace(stats.scheduler, num_running=0, num_waiting=0, kv_usage=0.0))
        )

    def _jointly(self, work: wire.Work) -> list[wire.Answer]:
        """Sends an order to all engines -> their answers. Raises the error of one that fails."""
        self._check_alive()
        with DeferredSigint():
            numbers = [next(self._numbers) for _ in self.children]
            for engine, number in enumerate(numbers):
                self.clients.send(engine, wire.encode(wire.Order(0, number, work)))
            while not all(number in self._answers for number in numbers):
                self._listen()
                self._check_alive()
            answers = [self._answers.pop(number) for number in numbers]
        for answer in answers:
            if answer.refused:
                raise wire.FIXABLE[answer.kind](answer.refused)
        return answers

    def _listen(self, seconds: float = _POLL_SECONDS) -> None:
        """Takes in what has arrived; waits so long for something. Then looks for engines that have ended."""
        began = time.monotonic()
        ready = self._inbox.poll(round(seconds * 1000))
        with DeferredSigint():
            ended = [(n, how) for n, child in enumerate(self.children) if n not in self._lost and (how := child.exit)]
            self.clients.turn(
                min(time.monotonic() - began, _POLL_SECONDS)
            )  # this process may have been stopped meanwhile
            while ready:
                self._hear(wire.decode_from_engine(self._inbox.recv()))
                ready = self._inbox.poll(0)
            for engine, how in ended:
                failure = wire.Failure.left(self._folder.path, engine)
                why = "" if failure is None else f" ({failure.kind}: {failure.why})"
                self._lose(engine, f"{wire.engine_name(engine, self.clients.count)} has ended: {how}{why}")

    def _hear(self, message: wire.FromEngine) -> None:
        self.clients.hear(message)
        if isinstance(message, wire.Deltas):
            for delta in message.deltas:
                self._pass_on(delta)
        elif isinstance(message, wire.Hello):
            self._served = self.clients.meet(message)
        elif isinstance(message, wire.Answer):
            self._answers[message.number] = message

    def _pass_on(self, delta: TokenDelta) -> None:
        """Keeps a delta, under the caller's id; drops deltas of requests that have ended here."""
        request_id = self._names.get(delta.request_id)
        if request_id is not None:
            delta.request_id = request_id
            self._deltas.append(delta)
            if delta.finish_reason is not None:
                self._end(request_id)

    def _end(self, request_id: str) -> str:
        """Ends a request, for which no more deltas come -> its engine's name for it."""
        name = self._ids.pop(request_id)
        del self._names[name]
        self.clients.close_request(name)
        return name

    def _lose(self, engine: int, why: str) -> None:
        """Records that an engine is lost; its requests end with an error."""
        self._lost[engine] = why
        for request_id, name in list(self._ids.items()):
            if self.clients.engine_of(name) == engine:
                self._end(request_id)
                self._deltas.append(TokenDelta(request_id, [], finish_reason="error", error=why))

    def _check_alive(self) -> None:
        """Raises DeviceLost, a RuntimeError, if an engine has ended."""
        if self._lost:
            raise DeviceLost(next(iter(self._lost.values())))


def _fields(config: EngineConfig) -> dict[str, Any]:
    return plain_fields(config, f"data_parallel_size={config.data_parallel_size}")


def _clear(owner: int, folder: PrivateFolder, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Removes the sockets; a fork of the process that has made them leaves them."""
    if os.getpid() == owner:
        context.destroy(0)
        folder.remove()
