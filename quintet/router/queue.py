"""Concurrency limits and the queue of a router: requests that run on a server, and those that wait for a place."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from quintet.router.backends import Pool, RouterBackend, RouterBackends
from quintet.router.config import RouterConfig
from quintet.router.policies import Policy, make_policy
from quintet.router.request_info import RequestInfo
from quintet.server.http.errors import ApiError

RETRY_SOON = {"Retry-After": "1"}


@dataclass(eq=False)
class _WaitingRequest:
    """A request that has no place. `take` takes one if there is one; None: not yet."""

    try_acquire: Callable[[], Any]
    future: "asyncio.Future[Any]"


class RequestQueue:
    """Used in one event loop. A place that becomes free goes to the request that waits the longest and can use it."""

    def __init__(self, config: RouterConfig, backends: RouterBackends) -> None:
        self._config, self._backends = config, backends
        ahead = config.balance_abs_threshold
        names = {Pool.ALL: config.policy, Pool.PREFILL: config.prefill_policy, Pool.DECODE: config.decode_policy}
        names[Pool.ENCODE] = "least_loaded"
        self._policies: dict[Pool, Policy] = {pool: make_policy(name, ahead) for pool, name in names.items()}
        self._line: dict[_WaitingRequest, None] = {}
        self.in_flight = 0

    @property
    def waiting(self) -> int:
        return len(self._line)

    async def acquire(self) -> bool:
        """Takes a place among all requests -> whether there was one at once. ApiError 429 or 503 if there is none."""
        if self._enter():
            return True
        await self._wait(self._enter, lambda entered: self.release())
        return False

    def release(self) -> None:
        self.in_flight -= 1
        self.wake_waiting()

    async def acquire_backend(self, ask: RequestInfo, pool: Pool) -> RouterBackend:
        """Returns the server for a request, and counts the request there. ApiError 404, 429 or 503 if there is none."""
        found = self._place(ask, pool)
        if found is None:
            ask.arrived = 0.0
            found = await self._wait(lambda: self._place(ask, pool), self.release_backend)
        return found

    def other_backend(self, ask: RequestInfo, pool: Pool, tried: Collection[RouterBackend]) -> RouterBackend | None:
        """Returns another server that can take it at once, or None."""
        now = asyncio.get_running_loop().time()
        able = [each for each in self._usable_backends(ask, pool, now) if each not in tried]
        return self._take(able, ask, pool) if able else None

    def acquire_pinned(self, backend: RouterBackend) -> RouterBackend:
        """Returns that server, draining or not: it keeps what is asked for."""
        if not backend.up:
            raise ApiError(
                503, "the server that keeps this response cannot be reached now; try again", code="backend_down",
                headers=RETRY_SOON,
            )  # fmt: skip
        backend.in_flight += 1
        return backend

    @contextlib.contextmanager
    def releasing(self, backend: RouterBackend) -> Iterator[None]:
        """Gives back the place on the server when the block ends."""
        try:
            yield
        finally:
            self.release_backend(backend)

    def release_backend(self, backend: RouterBackend) -> None:
        backend.in_flight -= 1
        if backend.leaving and not backend.in_flight:
            self._backends.remove(backend)
        self.wake_waiting()

    def wake_waiting(self) -> None:
        """Lets waiting requests try again, the oldest first, after something has changed."""
        for each in list(self._line):
            if each.future.done():
                continue
            try:
                found = each.try_acquire()
            except ApiError as error:
                each.future.set_exception(error)
                continue
            if found:
                each.future.set_result(found)

    def _enter(self) -> bool:
        if self.in_flight >= self._config.max_concurrent_requests:
            return False
        self.in_flight += 1
        return True

    def _usable_backends(self, ask: RequestInfo, pool: Pool, now: float) -> list[RouterBackend]:
        most = self._config.max_backend_requests
        model = ask.fields.model
        return [each for each in self._backends.in_pool(pool) if each.usable(now, most) and each.serves_model(model)]

    def _place(self, ask: RequestInfo, pool: Pool) -> RouterBackend | None:
        """None: all that could take it have as many as they may."""
        now = asyncio.get_running_loop().time()
        able = self._usable_backends(ask, pool, now)
        if able:
            return self._take(able, ask, pool)
        self._refuse(ask, pool, now)
        return None

    def _take(self, able: list[RouterBackend], ask: RequestInfo, pool: Pool) -> RouterBackend:
        chosen = self._policies[pool](able, ask)
        chosen.in_flight += 1
        return chosen

    def _refuse(self, ask: RequestInfo, pool: Pool, now: float) -> None:
        """Raises what is wrong where waiting for a place would not help."""
        model, there = ask.fields.model, self._backends.in_pool(pool)
        if any(each.usable(now) and each.serves_model(model) for each in there):
            return
        known = sorted({name for each in there for name in each.models})
        if model is not None and known and not any(each.serves_model(model) for each in there if each.was_checked):
            raise ApiError(
                404, f"the model {model[:200]!r} is not served here; there is {', '.join(known[:20])}", param="model",
                code="model_not_found",
            )  # fmt: skip
        what = "no server" if pool is Pool.ALL else f"no server of --{pool.value}"
        raise ApiError(503, f"{what} takes requests now; try again", code="no_backend", headers=RETRY_SOON)

    async def _wait(self, take: Callable[[], Any], undo: Callable[[Any], None]) -> Any:
        if len(self._line) >= self._config.queue_size:
            raise ApiError(
                429, f"{len(self._line)} requests wait for a place, and no more may; try again",
                code="server_overloaded", headers=RETRY_SOON,
            )  # fmt: skip
        waiter = _WaitingRequest(take, asyncio.get_running_loop().create_future())
        self._line[waiter] = None
        try:
            await asyncio.wait([waiter.future], timeout=self._config.queue_timeout)
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.exception():
                undo(waiter.future.result())
            raise
        finally:
            del self._line[waiter]
        if waiter.future.done():
            return waiter.future.result()
        raise ApiError(
            503, f"no place became free within {self._config.queue_timeout:g} s; try again", code="server_overloaded",
            headers=RETRY_SOON,
        )  # fmt: skip
