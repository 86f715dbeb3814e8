"""A background response: continues after its client disconnects; its events can be read again from any number."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from quintet.server.http.engine_call import EngineCall
from quintet.server.http.errors import ApiError, as_api_error
from quintet.server.http.responses.response_builder import ResponseEventWriter, ResponseReply

logger = logging.getLogger(__name__)


class Cancelled(Exception):
    """A client cancelled the response."""


class BackgroundRun:
    """Reads an open engine call to its end in its own task. The iterator yields its events after events.begin().

    `ended` is called once, when the call is over.
    """

    def __init__(
        self,
        call: EngineCall,
        events: ResponseEventWriter,
        batches: AsyncIterator[list[bytes]],
        ended: Callable[[], None],
    ) -> None:
        self.is_over = False
        self.size = 0  # bytes of the events so far
        self.reply: ResponseReply = events.reply
        self._stop = call.fail
        self._log: list[bytes] = []  # event number i stands at place i
        self._news = asyncio.Event()  # set, and replaced, when the log grows
        self._add(events.begin())
        self._task = asyncio.get_running_loop().create_task(self._work(call, events, batches, ended))

    async def cancel(self) -> None:
        """Stops the call, which frees its KV pages; returns when it is over. Does nothing if it has already ended."""
        if not self.is_over:
            self._stop(Cancelled())
            await asyncio.shield(self._task)

    async def events_after(self, after: int = -1) -> AsyncIterator[bytes]:
        """Yields the events with numbers greater than `after`, including future ones."""
        place = after + 1
        while True:
            news = self._news
            while place < len(self._log):
                yield self._log[place]
                place += 1
            if self.is_over:
                return
            await news.wait()

    async def _work(
        self,
        call: EngineCall,
        events: ResponseEventWriter,
        batches: AsyncIterator[list[bytes]],
        ended: Callable[[], None],
    ) -> None:
        try:
            async for made in batches:
                self._add(made)
        except Cancelled:
            self._add([events.cancel()])
        except Exception as error:  # this task is not awaited: the response reports the failure
            if not isinstance(error, ApiError):
                logger.exception("a response in the background failed")
            self._add([events.fail(as_api_error(error))])
        finally:
            call.close()
            self.is_over = True
            ended()
            del self.reply, self._stop  # only the log stays; the store counts its bytes
            self._add([])

    def _add(self, made: Iterable[bytes]) -> None:
        """Appends events to the log and wakes its readers."""
        for each in made:
            self._log.append(each)
            self.size += len(each)
        self._news.set()
        self._news = asyncio.Event()
