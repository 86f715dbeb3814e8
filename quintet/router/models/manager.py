"""Loads, wakes and unloads the engines of several models, by their requests and the memory plan."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from quintet.clients.http_client import HttpClient
from quintet.clients.http_connection import HttpTimeouts
from quintet.router.backends import Pool, RouterBackend
from quintet.router.models.config import ModelsConfig, ModelSpec
from quintet.router.models.engine import Engine, EngineFailed, Starter
from quintet.router.models.estimates import MemoryEstimate, default_budget, engine_memory, estimate_models
from quintet.router.models.managed_model import ManagedModel
from quintet.router.models.planner import FAIR_SECONDS, MemoryLedger, ModelSlot, ModelState, ModelTooLarge
from quintet.server.http.errors import ApiError

logger = logging.getLogger(__name__)

Estimator = Callable[[Sequence[ModelSpec]], AsyncGenerator[tuple[int, MemoryEstimate], None]]
_RETRY = {"Retry-After": "5"}
_RETRY_SECONDS = 1.0  # seconds, at least, until a pinned model that was not loaded is tried again
_BUSY_SECONDS = 1.0  # seconds between two looks at an engine that works on requests without a connection


class ModelManager:
    """Used in one event loop. Models load in the order of their oldest waiting requests."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        config: ModelsConfig,
        start: Starter,
        timeouts: HttpTimeouts,
        estimate: Estimator = estimate_models,
    ) -> None:
        self._config, self._start, self._timeouts, self._estimate = config, start, timeouts, estimate
        self.models = [
            ManagedModel(spec, ModelSlot(spec.name, spec.pinned), spec.name,
                         spec.idle_seconds(config.keep_alive))
            for spec in specs
        ]  # fmt: skip
        self.ledger = MemoryLedger(0, [each.slot for each in self.models])
        self._line: list[ManagedModel] = []  # models that wait for room, the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._fair_timer: asyncio.TimerHandle | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------------- start and end

    def start(self) -> None:
        """Plans the memory of all models, and loads those that are pinned as soon as they are planned."""
        self._begin_plan(self.models)
        for model in self.models:
            if model.spec.pinned:
                self._run(self._load_pinned(model))

    def close(self, seconds: float = 5.0) -> None:
        """Ends all engines: those without requests by themselves, others at once."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        engines = [(each.engine, each.slot.state) for each in self.models if each.engine is not None]
        for engine, _ in engines:
            engine.ask_to_end()
        for engine, state in engines:
            engine.close(0.0 if state is ModelState.LOADING else seconds)

    async def _load_pinned(self, model: ManagedModel, seconds: float = 0.0) -> None:
        """Loads a model after `seconds`; tries again by its back-off, unless the model is too large."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.acquire(model)
            except ApiError as error:
                logger.error("%s is pinned and was not loaded: %s", model.name, error.message)
                if error.code == "model_too_large":
                    return
                seconds = max(_RETRY_SECONDS, model.retry_at - asyncio.get_running_loop().time())
            else:
                return self.release(model)

    def _begin_plan(self, models: Sequence[ManagedModel]) -> None:
        for model in models:
            model.is_planning = True
        self._run(self._plan(models))

    async def _plan(self, models: Sequence[ManagedModel]) -> None:
        """Estimates the memory of models that have no size yet. Each may be loaded once it has one."""
        why = "its memory was not planned"
        try:
            async with contextlib.aclosing(self._estimate([each.spec for each in models])) as estimates:
                async for index, estimate in estimates:
                    self._size(models[index], estimate)
                    self._advance()
        except (ValueError, OSError, msgspec.MsgspecError) as error:
            why = str(error)
        for model in models:
            if model.is_planning:
                self._size(model, MemoryEstimate(error=why))
        self._advance()

    def _size(self, model: ManagedModel, estimate: MemoryEstimate) -> None:
        model.is_planning, model.estimate, why = False, estimate, estimate.error
        if not why:
            if not self.ledger.budget:  # later estimates see memory that engines have already
                utilization = min(each.spec.engine.gpu_memory_utilization for each in self.models)
                self.ledger.budget = default_budget(estimate, utilization, self._config.memory_budget)
                logger.info("memory budget of all models: %.2f GiB", self.ledger.budget / 2**30)
            try:
                model.memory = engine_memory(model.spec, estimate, self.ledger.budget)
                model.slot.size = model.memory.size
                logger.info("%s: %.2f GiB when loaded", model.name, model.memory.size.loaded / 2**30)
            except ValueError as error:
                why = str(error)
        if why:
            self._fail(model, why)

    # ------------------------------------------------------------------------------------------------ requests

    @contextlib.asynccontextmanager
    async def lease(self, model: ManagedModel) -> AsyncIterator[RouterBackend]:
        """Context in which the model is loaded and not unloaded. ApiError 503 with the reason if it cannot be."""
        await self.acquire(model)
        try:
            assert model.backend is not None
            yield model.backend
        finally:
            self.release(model)

    async def acquire(self, model: ManagedModel) -> None:
        """Waits until its engine takes a request, and counts the request there. ApiError 503 with the reason."""
        loop = asyncio.get_running_loop()
        if model.takes_requests:
            return self._grant(model)
        if loop.time() < model.retry_at:
            raise self._load_error(model, loop.time())
        if sum(each.slot.waiting for each in self.models) >= self._config.max_waiting_requests:
            raise ApiError(
                503, f"{self._config.max_waiting_requests} requests wait for models to load, and no more may; try "
                "again", code="server_overloaded", headers=_RETRY,
            )  # fmt: skip
        waiter: asyncio.Future[None] = loop.create_future()
        model.slot.waiting += 1
        if model.slot.waiting == 1:
            model.waiting_since = loop.time()
        model.waiters.append(waiter)
        if model not in self._line:
            self._line.append(model)
        try:
            self._advance()
            await asyncio.wait([waiter], timeout=self._config.max_wait)
        except asyncio.CancelledError:
            if waiter.done() and not waiter.exception():
                self.release(model)
            raise
        finally:
            model.slot.waiting -= 1
            if waiter.cancel():
                self._advance()  # those behind it wait for others now
        if waiter.cancelled():
            raise ApiError(
                503, f"the model {model.name!r} was not loaded within {self._config.max_wait:g} s: {self._why(model)}; "
                "try again", code="model_not_loaded", headers=_RETRY,
            )  # fmt: skip
        return waiter.result()

    def release(self, model: ManagedModel) -> None:
        """Ends a request that acquire() has counted."""
        slot, loop = model.slot, asyncio.get_running_loop()
        slot.in_flight -= 1
        slot.last_used = loop.time()
        if not slot.in_flight:
            self._start_timer(model)
            self._advance()

    def _grant(self, model: ManagedModel) -> None:
        model.stop_timer()
        model.slot.in_flight += 1
        model.slot.last_used = asyncio.get_running_loop().time()

    def _why(self, model: ManagedModel) -> str:
        if model.is_planning:
            return "its memory is being planned, or its files are being downloaded"
        busy = [each.name for each in self.models if each.slot.in_flight]
        return f"{', '.join(busy)} had requests" if busy else "it loads"

    def _load_error(self, model: ManagedModel, now: float) -> ApiError:
        after = str(max(1, round(model.retry_at - now)))
        return ApiError(
            503, f"the model {model.name!r} could not be loaded: {model.failure}", param="model",
            code="model_load_failed", headers={"Retry-After": after},
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------- loads and unloads

    def _advance(self) -> None:
        """Gives waiting requests to engines that are loaded, and loads the models that are next."""
        self._grant_waiting()
        for model in () if self._closed else tuple(self._line):
            if model.is_planning:
                continue  # those behind it are loaded meanwhile
            if not self._start_next(model):
                break
            if not model.is_planning:
                self._line.remove(model)
            self._grant_waiting()

    def _grant_waiting(self) -> None:
        waiting = {each.name for each in self._line}
        for model in self.models:
            if model.slot.held_for not in waiting:
                model.slot.held_for = None
            while model.takes_requests and (waiter := model.next_waiter()) is not None:
                self._grant(model)
                waiter.set_result(None)

    def _start_next(self, model: ManagedModel) -> bool:
        """Loads a model, or begins to plan it. Returns False if it has to wait for room: so do all behind it."""
        slot, loop = model.slot, asyncio.get_running_loop()
        if not any(not each.done() for each in model.waiters) or slot.state is ModelState.LOADING:
            return True
        if slot.state not in (ModelState.UNLOADED, ModelState.SLEEPING):
            return False
        if slot.size is None:
            self._begin_plan([model])
            return True
        waited = loop.time() - model.waiting_since
        try:
            room = self.ledger.room_for(slot, waited)
        except ModelTooLarge as error:
            model.fail_waiters(ApiError(503, str(error), param="model", code="model_too_large"))
            return True
        if room.fits:
            asleep, slot.state, slot.is_asleep = slot.is_asleep, ModelState.LOADING, False
            model.stop_timer()
            self._run(self._load(model, asleep))
            return True
        for each in room.unload:
            self._begin_unload(self._model_of(each), "memory")
        for each in room.hold:
            each.held_for = model.name
        if waited < FAIR_SECONDS and (self._fair_timer is None or self._fair_timer.when() <= loop.time()):
            self._fair_timer = loop.call_later(FAIR_SECONDS - waited + 0.001, self._advance)
        return False

    async def _load(self, model: ManagedModel, asleep: bool) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        logger.info("%s %s", "waking" if asleep else "loading", model.name)
        try:
            if not asleep or not await self._wakes(model):
                model.gone, model.engine = asyncio.Event(), None
                cache = None if model.memory is None else model.memory.kv_cache_bytes
                ended: list[Engine] = []  # the engine, once it is there
                model.engine = engine = self._start(model.spec, cache, lambda why: self._on_end(model, ended, why))
                ended.append(engine)
                await engine.wait_ready(self._config.load_timeout)
        except (EngineFailed, OSError, ValueError) as error:
            await self._drop(model)
            self._fail(model, str(error))
        except Exception as error:
            logger.exception("%s could not be loaded", model.name)
            await self._drop(model)
            self._fail(model, f"the server failed ({type(error).__name__}); its log says more")
        else:
            assert model.engine is not None
            model.record_success()
            model.counts.loads += not asleep
            model.counts.load_seconds.observe(loop.time() - begun)
            model.backend = RouterBackend(
                model.url, Pool.ALL, HttpClient(model.engine.address, times=self._timeouts), up=True,
                was_checked=True, counts=model.answers,
            )  # fmt: skip
            model.slot.state, model.slot.loaded_at = ModelState.LOADED, loop.time()
            model.slot.last_used = loop.time()
            logger.info("%s is loaded after %.1f s", model.name, loop.time() - begun)
            self._start_timer(model)
        self._advance()

    async def _wakes(self, model: ManagedModel) -> bool:
        """Returns whether an engine that sleeps is awake again; if not, it is ended."""
        assert model.engine is not None
        try:
            await model.engine.wake()
        except EngineFailed as error:
            logger.warning("%s: %s; it is started anew", model.name, error)
            await self._drop(model)
            model.slot.state = ModelState.LOADING
            return False
        model.counts.wakes += 1
        return True

    def _fail(self, model: ManagedModel, why: str) -> None:
        now = asyncio.get_running_loop().time()
        model.record_failure(now, why)
        logger.error("%s could not be loaded: %s", model.name, why)
        model.fail_waiters(self._load_error(model, now))

    async def _drop(self, model: ManagedModel) -> None:
        """Ends its engine. Its memory is planned until then."""
        engine, backend = model.engine, model.backend
        model.engine = model.backend = None
        if backend is not None:
            backend.upstream.close()
        try:
            if engine is not None:
                await engine.end()
        finally:
            model.slot.state, model.slot.held_for, model.slot.is_asleep = ModelState.UNLOADED, None, False
            model.gone.set()

    def _on_end(self, model: ManagedModel, engines: list[Engine], why: str) -> None:
        """An engine's process has ended."""
        slot = model.slot
        if model.engine not in engines or slot.state not in (ModelState.LOADED, ModelState.SLEEPING):
            return
        logger.error("the engine of %s has ended: %s; the next request starts it again", model.name, why)
        self._begin_unload(model, "exit")

    def _begin_unload(self, model: ManagedModel, reason: str) -> None:
        before, model.slot.state = model.slot.state, ModelState.UNLOADING
        model.stop_timer()
        model.unloading = self._run(self._unload(model, before, reason))

    async def _unload(self, model: ManagedModel, before: ModelState, reason: str) -> None:
        """Ends an engine, or lets one sleep that was idle."""
        engine = model.engine
        if engine is not None and before is ModelState.LOADED and reason != "exit":
            if await engine.is_busy():
                return self._keep_busy(model)
            if reason == "idle" and self._can_sleep(model) and await engine.sleep():
                if model.backend is not None:
                    model.backend.upstream.close()
                model.slot.state, model.slot.is_asleep, model.backend = ModelState.SLEEPING, True, None
                model.counts.sleeps += 1
                logger.info("%s sleeps", model.name)
                self._start_timer(model)
                return self._advance()
        await self._drop(model)
        model.counts.unloads[reason] += 1
        logger.info("%s is unloaded (%s)", model.name, reason)
        seconds = model.record_end(reason, asyncio.get_running_loop().time())
        if model.spec.pinned and reason == "exit" and not self._closed:
            self._run(self._load_pinned(model, seconds))
        return self._advance()

    def _keep_busy(self, model: ManagedModel) -> None:
        """Counts a request for a while: the engine works on one that no connection waits for."""
        model.slot.state = ModelState.LOADED
        self._grant(model)
        asyncio.get_running_loop().call_later(_BUSY_SECONDS, self.release, model)
        self._advance()

    def _can_sleep(self, model: ManagedModel) -> bool:
        return model.keep_alive > 0 and model.memory is not None and model.memory.sleeps

    def _start_timer(self, model: ManagedModel) -> None:
        model.stop_timer()
        if model.never_idle or model.slot.in_flight or self._closed:
            return
        loop = asyncio.get_running_loop()
        model.idle_at = loop.time() + model.keep_alive
        model.idle_timer = loop.call_later(model.keep_alive, self._on_idle, model)

    def _on_idle(self, model: ManagedModel) -> None:
        if model.slot.state in (ModelState.LOADED, ModelState.SLEEPING) and not model.slot.in_flight:
            self._begin_unload(model, "idle")

    async def unload(self, model: ManagedModel) -> None:
        """Unloads a model, pinned or not. ApiError 409 if it has requests; a background response is one."""
        slot, gone = model.slot, model.gone
        while slot.state is not ModelState.UNLOADED:
            if slot.in_flight or slot.state is ModelState.LOADING:
                why = f"the model {model.name!r} {f'has {slot.in_flight} requests' if slot.in_flight else 'loads'}"
                raise ApiError(409, f"{why}; try again later", param="model", code="model_busy")
            if slot.state is not ModelState.UNLOADING:
                self._begin_unload(model, "admin")
            assert model.unloading is not None
            await asyncio.shield(model.unloading)  # it may end with the engine busy, or asleep
            if gone.is_set():
                return

    def _model_of(self, slot: ModelSlot) -> ManagedModel:
        return next(each for each in self.models if each.slot is slot)

    def _run(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the models failed", exc_info=error)
