"""Traces of the engine, as an API process begins and ends them over the wire."""

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from quintet.server.processes import messages as wire


class RemoteTraces:
    """A backend's `traces`."""

    def __init__(
        self, worker: int, numbers: Iterator[int], order: Callable[[wire.Order], Coroutine[Any, Any, wire.Answer]]
    ) -> None:
        """`order` returns what the engine answers; `numbers` are those of orders."""
        self._worker, self._numbers, self._order = worker, numbers, order

    async def start(self) -> None:
        await self._order(wire.StartProfile(self._worker, next(self._numbers)))

    async def stop(self) -> tuple[str, int, str]:
        return (await self._order(wire.StopProfile(self._worker, next(self._numbers)))).trace
