"""Requests that no engine takes part in, counted among the running calls of the server."""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from quintet.server.http.app_state import AppState

T = TypeVar("T")


class OtherCall:
    """Request without an engine, such as the text of a PDF file. Shutdown waits for it as for an EngineCall."""

    name = owner = ""  # it has no request in an engine

    def __init__(self, service: "AppState") -> None:
        self._service = service
        self._task: asyncio.Task[Any] | None = None
        self._why: Exception | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. Raises ApiError 503 once the server shuts down, and what ends the call."""
        try:
            self._service.admit_call(self, None)
        except BaseException:
            work.close()
            raise
        task = self._task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task})
            if self._why is not None:
                raise self._why
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            self._service.end_call(self, None)

    def fail(self, why: Exception) -> None:
        """Ends the call from outside: its client gets `why`."""
        self._why = why
        if self._task is not None:
            self._task.cancel()

    def engine_ids(self) -> list[str]:
        return []
