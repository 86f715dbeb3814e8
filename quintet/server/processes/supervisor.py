"""The server as a whole: the engines' processes, further API processes, and this one, which serves and watches."""

import asyncio
import dataclasses
import logging
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from quintet.common.processes import ENDING, REFUSED, Child, Exit, close_all
from quintet.common.socket_folder import PrivateFolder
from quintet.config import EngineConfig
from quintet.config.schema.error_names import NameTranslation
from quintet.engine.data_parallel import local_engine_configs
from quintet.engine.processes.messages import EngineOrders, Failure, LoadLoRA, engine_name
from quintet.hub.model_names import tokenizer_file
from quintet.parsers import FROM_CHECKPOINT
from quintet.server.config import ServerConfig
from quintet.server.processes.messages import ApiOrders

logger = logging.getLogger(__name__)

ENGINE, API = "quintet.engine.processes.engine_process", "quintet.server.processes.api_process"
_POLL_SECONDS = 0.5  # seconds between two looks at the engine's pulse
_FAILURE_SECONDS = 10.0  # seconds that API processes have to tell their callers of a failure
_FORCED_SECONDS = 3.0  # seconds that they have when all end at once: of these, callers get one
_SHUTDOWN_SECONDS = 15.0  # seconds that engines have to end ranks of other machines
_MIN_RESTART_SECONDS = 1.0  # seconds before an API process that died is started again


class Supervisor:
    """Starts the engine when it is made, so that it loads while this process imports what it needs for HTTP."""

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        listener: socket.socket,
        wording: NameTranslation | None = None,
    ) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until run() can clear up behind what is begun here
        self._settings, self._listener, self._wording = server, listener, wording or NameTranslation()
        self._profiles = engine.profiler_config.profiler is not None
        self._tokenizer = tokenizer_file(engine)
        self._folder = PrivateFolder()  # of the sockets between the processes
        self._server_fields = _plain_config(server)
        self._failed: str | None = None  # why the server ends
        self._engines: list[Child] = []  # one, as a rule
        try:
            for number, config in enumerate(local_engine_configs(engine)):
                self._engines.append(Child(ENGINE, self._engine_orders(number, config)))
        except OSError:
            self._end_engines()
            self._remove_files()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            raise
        self._others: dict[int, Child] = {}  # API processes besides this one
        self._silent: dict[int, str] = {}  # API processes that were ended, and why, until their end is seen
        self._signal = "shutdown requested"  # by which signal, if it was one
        self._told = False  # to end, while nothing else listens to that
        self._serving = self._ending = False
        self._refused = False  # the engine has printed why it does not start

    def _engine_orders(self, number: int, config: EngineConfig) -> EngineOrders:
        return EngineOrders(
            str(self._folder.path), number, self._settings.api_workers, _plain_config(config), self._server_fields,
            progress=sys.stderr.isatty(), warm_grammars=True,
            lora_modules=[LoadLoRA(each.name, each.path, each.base_model_name) for each in self._settings.lora_modules],
        )  # fmt: skip

    def run(self) -> int:
        """Serves until it is stopped, and returns 0; or until the engine is gone, and returns 1."""
        try:
            for each in ENDING:
                signal.signal(each, self._on_signal)  # until the HTTP server has its own
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            from quintet.server.uvicorn_server import run_loop

            run_loop(self._serve())
        finally:
            self._close()
        if self._serving and self._api.end is not None:
            logger.info("%s", self._api.end.end_message(len(self._api.service.ended_calls)))
        if self._failed is not None and not self._refused:
            logger.error("%s; the server ends", self._failed)
        return 0 if self._failed is None else 1

    async def _serve(self) -> None:
        from quintet.server.processes.api_process import ApiServer

        self._loop, self._serving = asyncio.get_running_loop(), True
        self._api = ApiServer(
            self._settings, self._folder.path, 0, self._stop_others, self._profiles, len(self._engines)
        )
        self._api.backend.expected_tokenizer = self._tokenizer
        for number, each in enumerate(self._engines):
            each.follow(partial(self._on_engine_exit, number))
        for worker in range(1, self._settings.api_workers):
            self._start(worker)
        watch = self._loop.create_task(self._watch())
        await self._api.run(self._listener)
        await self._wait_for_others()
        self._ending = True
        watch.cancel()

    async def _wait_for_others(self) -> None:
        """Waits for API processes that still have calls; handles the engine's end and signals meanwhile."""
        forced, self._told = self._api.is_forced, False
        drain = self._settings.drain_timeout if self._failed is None else 0.0
        end = self._loop.time() + (_FORCED_SECONDS if forced else _FAILURE_SECONDS + drain)
        while self._loop.time() < end and any(child.exit is None for child in self._others.values()):
            if self._told and not forced:
                forced, end = True, min(end, self._loop.time() + _FORCED_SECONDS)
                self._stop_others()
            if self._failed is not None:
                end = min(end, self._loop.time() + _FAILURE_SECONDS)
            await asyncio.sleep(_POLL_SECONDS / 10)

    def _on_signal(self, number: int, *_: object) -> None:
        """No exception: whatever is imported meanwhile might catch it. A second signal does not wait for that."""
        self._signal = signal.Signals(number).name
        if self._told and not self._serving:
            raise SystemExit(0)
        self._told = True

    def _call_in_loop(self, call: partial[None]) -> None:
        """From a thread, into the loop; which may have ended by then."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            logger.debug("a child ended after the loop")

    async def _watch(self) -> None:
        """Logs when the server is ready, ends it when the engine hangs, and API processes that do."""
        ready = False
        while True:
            await asyncio.sleep(_POLL_SECONDS if ready else _POLL_SECONDS / 10)
            remote = self._api.backend
            if self._told and not self._api.service.draining:
                self._api.stop(self._signal)
            if not ready and self._api.is_serving and remote.unavailable_reason() is None:
                ready = True
                if why := self._refused_parser():
                    return self._fail(why)
                page = self._settings.playground and not self._settings.uds
                names = ", ".join(self._api.service.model_names) + (f", page at {self._where()}/, API" if page else "")
                logger.info("ready: %s at %s", names, self._where())
            if remote.death_reason is not None:
                return self._fail(remote.death_reason)
            hung = remote.hung_reason(self._settings.engine_timeout)
            if hung is not None:
                self._fail(f"{hung}; it was ended")
                for each in self._engines:
                    each.kill()
                return None
            self._end_silent()

    def _refused_parser(self) -> str:
        """Returns why a parser that the checkpoint should describe cannot be made; empty if it can or none is named."""
        if {self._settings.tool_call_parser, self._settings.reasoning_parser}.isdisjoint(FROM_CHECKPOINT):
            return ""
        try:
            _ = self._api.service.parsers
        except ValueError as error:
            return str(error)
        return ""

    def _where(self) -> str:
        if self._settings.uds:
            return self._settings.url
        return dataclasses.replace(self._settings, port=self._listener.getsockname()[1]).url

    def _on_engine_exit(self, number: int, how: Exit) -> None:
        self._call_in_loop(partial(self._end_after_engine, number, how))

    def _end_after_engine(self, number: int, how: Exit) -> None:
        """Ends the server: the other engines would serve with part of the machine, a restarted server gets all of
        it."""
        if self._ending:
            return
        failure = Failure.left(self._folder.path, number)
        if failure is not None and how.code == REFUSED and not self._refused:
            self._refused = True
            print(f"quintet serve: error: {self._wording(failure.why)}", file=sys.stderr, flush=True)
        why = "" if failure is None else f" ({failure.for_callers()})"
        self._fail(f"{engine_name(number, len(self._engines))} has ended: {how}{why}")

    def _fail(self, why: str) -> None:
        if self._failed is None:
            self._failed = why
            self._api.fail(why)
            self._stop_others(why)

    def _start(self, worker: int) -> None:
        if self._ending or self._failed is not None or self._api.service.draining:
            return  # a process that gets no order to end would keep the server
        listener = self._listener.fileno()
        orders = ApiOrders(
            str(self._folder.path), worker, len(self._engines), self._profiles, self._server_fields, listener
        )
        try:
            child = Child(API, orders, (listener,))
            self._others[worker] = child
            child.follow(lambda how: self._call_in_loop(partial(self._on_api_exit, worker, how)))
        except (OSError, RuntimeError) as error:  # nothing to spare for a process, or for the thread that watches it
            logger.error("API process %d cannot be started (%s); it is tried again", worker, error)
            unwatched = self._others.pop(worker, None)
            if unwatched is not None:
                unwatched.kill()
            self._loop.call_later(_MIN_RESTART_SECONDS, self._start, worker)

    def _on_api_exit(self, worker: int, how: Exit) -> None:
        """Its requests end; another takes its place."""
        why = self._silent.pop(worker, how)
        self._api.backend.peers.remove(self._others[worker].pid)
        if self._ending or self._failed is not None or self._api.service.draining:
            return
        logger.error("API process %d has ended: %s; another is started", worker, why)
        self._api.backend.remove_worker(worker)
        self._loop.call_later(_MIN_RESTART_SECONDS, self._start, worker)

    def _end_silent(self) -> None:
        """Ends API processes that are stopped or hang: callers wait in vain, and the engine still writes to them."""
        peers = self._api.backend.peers
        for worker, child in self._others.items():
            quiet = peers.silent_seconds(child.pid)
            if quiet > self._settings.engine_timeout:
                peers.remove(child.pid)
                self._silent[worker] = f"it gave no sign of life for {quiet:.0f} s"
                child.kill()

    def _stop_others(self, why: str = "") -> None:
        """They drain, or fail, while this process does; those that drain already end at once."""
        for child in self._others.values():
            child.ask_to_end(why)

    def _force_stop(self, *_: object) -> None:
        """Ends all at once, at a signal that comes while this process waits for the others."""
        for child in (*self._others.values(), *self._engines):
            child.let_go()

    def _close(self) -> None:
        """Ends every process, and leaves nothing in the file system."""
        for each in ENDING:
            signal.signal(each, self._force_stop)
        close_all(self._others.values())
        self._end_engines()
        self._remove_files()

    def _end_engines(self) -> None:
        """Ends all engines at once: none waits for another. In an orderly end, they end ranks of other machines
        first."""
        orderly = self._failed is None
        for each in self._engines:
            (each.ask_to_end if orderly else each.let_go)()
        end = time.monotonic() + (_SHUTDOWN_SECONDS if orderly else 0.0)
        for each in self._engines:
            each.close(max(0.0, end - time.monotonic()))

    def _remove_files(self) -> None:
        self._folder.remove()
        self._listener.close()
        if self._settings.uds:
            Path(self._settings.uds).unlink(missing_ok=True)


def _plain_config(config: EngineConfig | ServerConfig) -> dict[str, Any]:
    return {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
