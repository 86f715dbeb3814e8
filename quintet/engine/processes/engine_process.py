"""Process of an engine: takes requests of its clients, steps, and sends each client its deltas."""

import contextlib
import gc
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
import zmq

from quintet.common.free_memory import release_file_pages, release_free_memory
from quintet.common.imports import without_garbage_collection
from quintet.common.logging_setup import install_server_log, set_log_prefix
from quintet.common.processes import REFUSED, follow_parent, read_orders
from quintet.config import EngineConfig
from quintet.engine.engine import Engine
from quintet.engine.executor.engine_plan import EnginePlan
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.lora.factory import adapter_reader
from quintet.engine.lora.references import LoRAReferences
from quintet.engine.parallel.commands import ResetPrefixCacheCommand
from quintet.engine.parallel.follower import carry_out, grammars_of
from quintet.engine.pooling.adapted_heads import unchecked_heads
from quintet.engine.processes import messages as wire
from quintet.engine.processes.model_facts import served
from quintet.engine.processes.model_info import ModelInfo
from quintet.engine.processes.served_adapters import ServedAdapters, Waker, check_modules
from quintet.engine.startup import launch, prepare
from quintet.hub.adapters import resolve_adapter
from quintet.interface.platform import Capabilities, DeviceLost
from quintet.lora.adapter import adapter_digest
from quintet.lora.request import LoRAReference
from quintet.outputs import TokenDelta

logger = logging.getLogger(__name__)

UNREAD = 16  # signs of life that wait for a client
IDLE = 1000  # milliseconds that an idle engine waits for a message before it looks around


def main() -> int:
    """Runs until it is killed or its parent dies. REFUSED: the engine did not start, 1: it broke."""
    orders, shutdown = read_orders(wire.EngineOrders), Shutdown()
    follow_parent(shutdown)
    _log(orders)
    if orders.threads:
        torch.set_num_threads(orders.threads)
    folder, context = Path(orders.folder), zmq.Context(io_threads=1)
    pulse = Pulse(context, folder, range(orders.num_workers), orders.number, orders.stats_each_step)
    pulse.start()
    try:
        with without_garbage_collection():  # transformers may be imported
            prepared = prepare(EngineConfig(**orders.engine))
        check_lora_modules(prepared, orders.lora_modules)
        serves, grammars = served(prepared), grammars_of(prepared)
        engine = launch(prepared, progress=orders.progress, grammars=grammars)
        shutdown.ranks = prepared.ranks
        sockets = Sockets(context, folder, orders.number, pulse.workers)
        adapters = _served_adapters(prepared, engine, sockets)
        adapters.load_at_start(orders.lora_modules)
    except tuple(wire.FIXABLE.values()) as error:
        wire.Failure.of(error).leave(folder, orders.number)
        return REFUSED
    gc.collect()
    gc.freeze()  # the model and all modules stay: later collections need not walk them in the midst of a step
    release_free_memory()
    if prepared.capabilities.layout_key:  # weights need the host's memory, too
        release_file_pages()
    try:
        core = Core(sockets, engine, prepared, serves, pulse, adapters)
        if orders.warm_grammars and warms_grammars(prepared.capabilities):
            core.then = grammars.warm
        core.run()
    except Exception as error:
        shutdown.wait()
        logger.exception("the engine broke")
        known = isinstance(error, DeviceLost)
        wire.Failure(type(error).__name__, str(error), known).leave(folder, orders.number)
        return 1
    return 0


def warms_grammars(capabilities: Capabilities) -> bool:
    """Returns whether the vocabulary for grammars is made before a request asks for a grammar. It takes 100 MiB with
    150k tokens: not where the weights need the host's memory, too."""
    return not capabilities.layout_key and importlib.util.find_spec("llguidance") is not None


def _log(orders: wire.EngineOrders) -> None:
    name = f"engine {orders.number}"
    if orders.log is None:
        return logging.basicConfig(level=logging.ERROR, format=f"{name}: %(name)s: %(message)s")
    install_server_log(orders.log)
    if orders.engine["data_parallel_size"] > 1:
        set_log_prefix(name)


class Shutdown:
    """Ends the engine after an orderly end of the server; its remote ranks are closed, and end as well."""

    def __init__(self) -> None:
        self.ranks: WorkerGroup | None = None  # once they have started
        self._said = threading.Event()

    def __call__(self, why: str) -> None:
        """Called from a thread. A step that is under way is left."""
        self._said.set()
        try:
            if self.ranks is not None and self.ranks.remote_ranks is not None:
                self.ranks.remote_ranks.close()
                self.ranks.workers[0].comm.leave()
        finally:
            os._exit(0)

    def wait(self) -> None:
        """Blocks for ever if the engine is being ended: an error that follows is no failure."""
        if self._said.is_set():
            threading.Event().wait()


class Sockets:
    """The engine's inbox, and an outbox for each API process."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path, engine: int, workers: range) -> None:
        self._context, self._address = context, wire.engine_address(folder, engine)
        self.inbox = context.socket(zmq.PULL)
        self.inbox.rcvhwm = 0
        self.inbox.bind(self._address)
        self.outboxes = [wire.push(context, wire.worker_address(folder, worker)) for worker in workers]

    def send(self, worker: int, message: wire.FromEngine) -> None:
        """Sends to that API process."""
        self.outboxes[worker].send(wire.encode(message))

    def connect_to_inbox(self) -> "zmq.Socket[bytes]":
        """Returns a socket that sends to the inbox, for one thread."""
        return wire.push(self._context, self._address)


def _served_adapters(prepared: EnginePlan, engine: Engine, sockets: Sockets) -> ServedAdapters:
    config, references = prepared.config, None
    if engine.lora is not None:
        references = LoRAReferences(config, lambda path: resolve_adapter(path, config), engine.lora)
    return ServedAdapters(references, sockets.send, Waker(sockets.connect_to_inbox))


def check_lora_modules(prepared: EnginePlan, modules: list[wire.LoadLoRA]) -> None:
    """Compares adapters that are served from the start with the model, whose weights are not read yet."""
    if modules and prepared.config.enable_lora:
        read = adapter_reader(prepared.config, prepared.ranks, partial(unchecked_heads, prepared.pooling is not None))

        def read_path(path: str) -> None:
            folder = resolve_adapter(path, prepared.config)
            read(LoRAReference(path, str(folder), adapter_digest(folder)))

        check_modules(modules, read_path)


class Core:
    """Owns the engine and the wire, in one thread."""

    def __init__(
        self,
        sockets: Sockets,
        engine: Engine,
        prepared: EnginePlan,
        serves: ModelInfo,
        pulse: "Pulse",
        adapters: ServedAdapters,
    ) -> None:
        self._engine, self._prepared, self._served = engine, prepared, serves
        self._pulse, self._number = pulse, pulse.number
        self._sockets, self._inbox, self._outboxes = sockets, sockets.inbox, sockets.outboxes
        self._adapters = adapters
        self._owners: dict[str, int] = {}  # engine request -> API process
        self._met: set[int] = set()  # API processes that know what is served
        # Done in a thread when all of them do. A vocabulary of 150k tokens takes 1.5 s that hold Python's lock: while
        # weights are read it would put off the start by as much, and at the first who asks, everybody's tokens.
        self.then: Callable[[], None] | None = None

    def run(self) -> None:
        """Messages are answered between two steps, so what was aborted is gone from the next."""
        self._pulse.engine = self._engine
        while True:
            if self._engine.busy or self._inbox.poll(IDLE):
                self._receive()
            if self._engine.busy:
                self._step()

    def _step(self) -> None:
        self._pulse.step_began = time.monotonic()
        deltas = self._engine.step()
        self._pulse.step_began = 0.0
        if deltas:
            if self._pulse.each_step:
                self._send_pulse()
            self._send(deltas)

    def _receive(self) -> None:
        """Handles all messages that have come."""
        while True:
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._obey(wire.decode_to_engine(frame))

    def _obey(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Submit):
            self._submit(message)
        elif isinstance(message, wire.Abort):
            self._end(message.request_ids)
        elif isinstance(message, wire.Join):
            self._leave(message.worker)  # what one that died had sent may have come after its Leave
            hello = wire.Hello(self._served, self._pulse.message(), self._number, self._adapters.table)
            self._sockets.send(message.worker, hello)
            self._adapters.join(message.worker)
            self._meet(message.worker)
        elif isinstance(message, wire.Leave):
            self._leave(message.worker)
        elif isinstance(message, wire.HasAdapters):
            self._adapters.confirm(message)
        elif isinstance(message, wire.AdapterRead):
            self._adapters.finish()
        elif isinstance(message.work, wire.LoadLoRA | wire.UnloadLoRA):
            self._adapters.take(message)
        else:
            answer = msgspec.structs.replace(self._do(message), engine=self._number)
            self._sockets.send(message.worker, answer)

    def _meet(self, worker: int) -> None:
        self._met.add(worker)
        if self.then is not None and len(self._met) == len(self._outboxes):
            threading.Thread(target=self.then, name="quintet-vocabulary", daemon=True).start()
            self.then = None

    def _do(self, order: wire.Order) -> wire.Answer:
        """Carries out an order; an error that users can fix becomes the answer. Clients get the sleep state before."""
        try:
            if isinstance(order.work, wire.StartProfile | wire.StopProfile):
                return self._trace(order)
            assert not isinstance(order.work, wire.LoadLoRA | wire.UnloadLoRA)
            freed, result = carry_out(self._engine, self._prepared, order.work)
        except tuple(wire.FIXABLE.values()) as error:
            logger.warning("refused: %s", error)
            failure = wire.Failure.of(error)
            return wire.Answer(order.number, failure.why, failure.kind)
        if not isinstance(order.work, ResetPrefixCacheCommand):
            self._send_pulse()
        return wire.Answer(order.number, freed=freed, result=result)

    def _send_pulse(self) -> None:
        frame = wire.encode(self._pulse.message())
        for outbox in self._outboxes:
            outbox.send(frame)

    def _trace(self, order: wire.Order) -> wire.Answer:
        """Starts or stops a trace. A failure in the profiler, torch's perhaps, costs the trace and no request."""
        try:
            if isinstance(order.work, wire.StartProfile):
                self._engine.profiler.start()
                return wire.Answer(order.number)
            path, steps, ended = self._engine.profiler.stop()
            return wire.Answer(order.number, trace=(path.name, steps, ended))
        except (RuntimeError, LookupError, TypeError) as error:
            logger.exception("the trace is lost")
            return wire.Answer(order.number, f"the trace is lost: {type(error).__name__}; the server's log says more")

    def _submit(self, message: wire.Submit) -> None:
        """Adds requests to the engine. A refused request ends alone, and only its sender gets the error."""
        for admitted in message.requests():
            try:
                self._engine.add(admitted)
            except ValueError as error:
                refused = TokenDelta(admitted.request_id, [], finish_reason="error", error=str(error))
                self._sockets.send(message.worker, wire.Deltas([refused], self._number))
            else:
                self._owners[admitted.request_id] = message.worker

    def _leave(self, worker: int) -> None:
        self._adapters.leave(worker)
        self._end([each for each, owner in self._owners.items() if owner == worker])

    def _end(self, request_ids: list[str]) -> None:
        self._engine.abort(request_ids)
        for request_id in request_ids:
            self._owners.pop(request_id, None)

    def _send(self, deltas: list[TokenDelta]) -> None:
        if len(self._outboxes) == 1:
            shares = {0: deltas}
        else:
            shares = {}
            for delta in deltas:
                shares.setdefault(self._owners[delta.request_id], []).append(delta)
        for worker, share in shares.items():
            self._sockets.send(worker, wire.Deltas(share, self._number))
        for delta in deltas:
            if delta.finish_reason is not None:
                self._owners.pop(delta.request_id, None)


class Pulse(threading.Thread):
    """Heartbeat of the engine: sends every API process its statistics. A stopped process sends none."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        folder: Path,
        workers: range,
        number: int = 0,
        each_step: bool = False,
    ) -> None:
        """`number`: of the engine; `each_step`: statistics are also sent with the deltas of each step."""
        super().__init__(name="quintet-pulse", daemon=True)
        self.workers, self.number, self.each_step = workers, number, each_step
        self.engine: Engine | None = None  # once it is loaded
        self.step_began = 0.0  # time.monotonic(); 0 between steps
        self._context, self._folder = context, folder
        self._seen, self._turns = 0.0, 0  # the step that ran at the last beat; beats since, in it

    def run(self) -> None:
        outboxes = [
            wire.push(self._context, wire.worker_address(self._folder, worker), UNREAD) for worker in self.workers
        ]
        while True:
            self._count()
            frame = wire.encode(self.message())
            for outbox in outboxes:
                with contextlib.suppress(zmq.Again):  # a client that does not read, such as an idle LLM
                    outbox.send(frame, zmq.NOBLOCK)
            time.sleep(wire.BEAT)

    def _count(self) -> None:
        """A step's time counts in beats, too: while this process stood still, no step ran."""
        began = self.step_began
        self._turns = self._turns + 1 if began and began == self._seen else 0
        self._seen = began

    def message(self) -> wire.Pulse:
        made, began, engine = time.monotonic(), self.step_began, self.engine
        stats = None if engine is None else engine.stats()
        stepping = min(made - began, (self._turns + 1) * wire.BEAT) if began else 0.0
        return wire.Pulse(stats, stepping, made, self.number)


if __name__ == "__main__":
    sys.exit(main())
