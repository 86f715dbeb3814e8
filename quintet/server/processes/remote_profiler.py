"""Traces of the engine, as an API process begins and ends them over the wire."""

from collections.abc import Callable, Coroutine
from typing import Any

from quintet.engine.processes import messages as wire


class RemoteTraces:
    """A backend's `traces`."""

    def __init__(self, order: Callable[[wire.Work], Coroutine[Any, Any, wire.Answer]]) -> None:
        """`order` returns what the engine answers."""
        self._order = order

    async def start(self) -> None:
        await self._order(wire.StartProfile())

    async def stop(self) -> tuple[str, int, str]:
        return (await self._order(wire.StopProfile())).trace
