"""A response that goes on when its client has hung up, and can be read from any place by any caller."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from quintet.server.http.calls import Call
from quintet.server.http.errors import ApiError, as_api_error
from quintet.server.http.responses.reply import Events, Reply

logger = logging.getLogger(__name__)


class Cancelled(Exception):
    """A caller asked for the end."""


class Run:
    """Reads an open call to its end, on a task of its own. `told`: its events but the first.

    `ended` is called once, when it is over.
    """

    def __init__(self, call: Call, events: Events, told: AsyncIterator[list[bytes]], ended: Callable[[], None]) -> None:
        self.over = False
        self.size = 0  # bytes of the events so far
        self.reply: Reply = events.reply
        self._stop = call.stop
        self._log: list[bytes] = []  # event number i stands at place i
        self._news = asyncio.Event()  # set, and replaced, when the log grows
        self._add(events.begin())
        self._task = asyncio.get_running_loop().create_task(self._work(call, events, told, ended))

    async def cancel(self) -> None:
        """Frees its pages at once; returns when it is over. Passes over one that has ended."""
        if not self.over:
            self._stop(Cancelled())
            await asyncio.shield(self._task)

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """The events whose numbers are over `after`, those to come included."""
        place = after + 1
        while True:
            news = self._news
            while place < len(self._log):
                yield self._log[place]
                place += 1
            if self.over:
                return
            await news.wait()

    async def _work(
        self, call: Call, events: Events, told: AsyncIterator[list[bytes]], ended: Callable[[], None]
    ) -> None:
        try:
            async for made in told:
                self._add(made)
        except Cancelled:
            self._add([events.cancel()])
        except Exception as error:  # this task is not awaited: the response tells of the failure
            if not isinstance(error, ApiError):
                logger.exception("a response in the background failed")
            self._add([events.fail(as_api_error(error))])
        finally:
            call.close()
            self.over = True
            ended()
            del self.reply, self._stop  # the log is what stays, and what the store counts
            self._add([])

    def _add(self, made: Iterable[bytes]) -> None:
        """To the log, and wakes its readers."""
        for each in made:
            self._log.append(each)
            self.size += len(each)
        self._news.set()
        self._news = asyncio.Event()
