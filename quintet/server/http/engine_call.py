"""One API call's requests in the engine: queued together, read as one stream, and gone when the call is over."""

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from starlette.requests import Request as HttpRequest

from quintet.chat.prepare import PreparedChat
from quintet.chat.prompts import Prompt
from quintet.lora.request import LoRAReference
from quintet.outputs import RequestOutput, child_ids
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import SamplingParams
from quintet.server.backend import SubmitRequest
from quintet.server.http.call_cost import LOGPROB_BYTES, MAX_TEXTS, cost_of
from quintet.server.http.capacity import RequestCost
from quintet.server.http.errors import ApiError, ClientGone
from quintet.server.http.middleware.auth import key_of
from quintet.server.http.middleware.base import connection_of
from quintet.server.metrics.call_record import CallRecord

if TYPE_CHECKING:
    from quintet.server.http.app_state import AppState

logger = logging.getLogger(__name__)

T = TypeVar("T")

STRUCTURED_OUTPUTS = "structured_outputs"  # begins errors that are the fault of a request's grammar
ADAPTER = "the adapter '"  # begins errors of a request whose adapter cannot be read any more
MAX_UNREAD = 2**20  # bytes of outputs that may wait for a reader, for each completion; a few thousand tokens of text
MAX_STEPS = 2  # of the engine that the texts of one call may fill, where they are long: one runs, one is at hand
_OUTPUT = 600  # bytes of memory that an output takes besides its text

_request_numbers = itertools.count()
_ANY_PROMPT = Prompt([0])  # in the place of one that the engine has


class PromptRequest(NamedTuple):
    """One prompt of a call, checked. All asks of a call are the same but for their prompts."""

    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    grammar: str = ""  # of params.structured_outputs
    pooling: PoolingParams | None = None  # what numbers are wanted of it; `params` say nothing then

    @classmethod
    def of(cls, chat: PreparedChat, priority: int | None) -> "PromptRequest":
        return cls(chat.prompt, chat.params, priority or 0, chat.grammar)


class Caller(NamedTuple):
    """Facts of a call that all its prompts share."""

    owner: str = ""  # "": all callers are one
    adapter: LoRAReference | None = None  # that they are answered with

    def bind(self, ask: PromptRequest) -> PromptRequest:
        """Returns a prompt with the adapter, and with a cache salt that no other owner's request can have: the names of
        owners have one length."""
        if not self.owner and self.adapter is None:
            return ask
        salt = self.owner + (ask.prompt.cache_salt or "") if self.owner else ask.prompt.cache_salt
        return ask._replace(prompt=replace(ask.prompt, cache_salt=salt, lora=self.adapter))


class EngineCall:
    """Iterate for (number of the ask, output); the loop ends when all asks have finished.

    async with Call(service, http, asks) as call:
        async for number, output in call: ...

    A caller that hangs up raises ClientGone, one that takes too long ApiError 504, a failure inside one of the
    requests ApiError 500. However the block is left, what still runs is aborted at once. A caller that does not read
    is cut off when MAX_UNREAD is reached.

    Texts that become numbers come in turns: a call has MAX_TEXTS of them in the engine at most, or what MAX_STEPS
    steps take, so that a small call waits for so much of a large one and not for all.
    """

    def __init__(
        self,
        service: "AppState",
        http: HttpRequest | None,
        asks: Sequence[PromptRequest],
        timeout: float,
        caller: Caller,
        waits: bool = False,
    ) -> None:
        """`waits`: the asks say how much room it takes, and again() brings the first that is asked."""
        self._caller, self.owner = caller, caller.owner
        self.requests = [caller.bind(ask) for ask in ([] if waits else asks)]
        self._service, self._http, self._timeout = service, http, timeout
        self._connection = None if http is None else connection_of(http.scope)
        self._events: asyncio.Queue[tuple[int, RequestOutput, int] | Exception] = asyncio.Queue()
        self._unread = 0  # bytes in there that came while the reader did not read
        self._running: dict[int, str] = {}  # ask -> its request in the engine
        self._entries: dict[int, int | None] = {}  # answer()'s number -> its place in the record; others have their own
        self._begun = 0  # asks that came to the engine
        self._peeked: tuple[int, RequestOutput] | None = None
        self._size = cost_of(asks, service.backend.model_info, streamed=http is not None)
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._side_task: asyncio.Task[Any] | None = None
        self._record: CallRecord  # while it is open
        self._open = False

    async def __aenter__(self) -> "EngineCall":
        """Queues all asks, or none of them."""
        self._service.admit_call(self, self._size)
        try:
            self._record = self._service.record(self._http, self.requests)
        except BaseException:
            self._service.end_call(self, self._size)
            raise
        self._open = True
        try:
            if self.requests:
                self._submit()
        except BaseException:
            self.close()
            raise
        loop = asyncio.get_running_loop()
        late = ApiError(504, f"the request took longer than {self._timeout:g} s", code="timeout")
        self._timer = loop.call_later(self._timeout, self.fail, late)
        if self._http is not None:
            self._watcher = loop.create_task(self._watch(self._http))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs and gives the place back; a second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._abort()
        for waiting in (self._timer, self._watcher):
            if waiting is not None:
                waiting.cancel()
        self._record.end()
        self._service.end_call(self, self._size)

    def fail(self, why: Exception) -> None:
        """Ends the call from outside: its reader gets `why`. The pages are free within a step, read or not."""
        self._record.why = why
        self._abort()
        self._events.put_nowait(why)
        if self._side_task is not None:
            self._side_task.cancel()

    @property
    def name(self) -> str:
        """The request's name, which its answer has; "" for one that goes on without its client."""
        return "" if self._http is None else str(self._http.scope["state"]["tally"].request_id)

    def engine_ids(self) -> list[str]:
        """Returns the ids of its requests that run in the engine, one for each completion."""
        running = self._running.items()
        return [each for number, name in running for each in child_ids(name, self.requests[number].params.n)]

    async def peek(self) -> None:
        """Waits for the first output, so that a failure before it can still be an HTTP status."""
        if self._peeked is None and self._running:
            self._peeked = await self._next()

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        if self._peeked is not None:
            yield self._peeked
            self._peeked = None
        while self._running or not self._events.empty():
            yield await self._next()

    async def outputs(self) -> list[RequestOutput]:
        """The last output of each ask, in order."""
        last: dict[int, RequestOutput] = {}
        async for number, output in self:
            last[number] = output
        return [last[number] for number in range(len(self.requests))]

    async def answer(self, ask: PromptRequest, counted: bool = True) -> RequestOutput:
        """Returns the only output of a further request, which runs beside others: for `work` of run_between().

        Cancelling ends the request. Its media are kept until the engine has them, not longer. `counted`: False for one
        that is a step of another, and no request in metrics and traces. Raises what has ended the call, and ApiError
        for a request that fails.
        """
        if self._record.why is not None or not self._open:
            raise self._record.why or ClientGone()
        number, ask = len(self.requests), self._caller.bind(ask)
        self.requests.append(ask._replace(prompt=_ANY_PROMPT))
        entry = len(self._record.watches)
        self._entries[number] = entry if counted else None
        if counted:
            self._record.add(ask._replace(prompt=Prompt(ask.prompt.token_ids)))
        finished: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()

        def deliver(output: RequestOutput) -> None:
            if counted:
                self._record.record_output(entry, output)
            if output.finished:
                self._running.pop(number, None)
                if not finished.done():
                    finished.set_result(output)

        wanted = SubmitRequest(self._request_id(), ask.prompt, deliver)
        self._service.backend.submit([wanted], ask.params, ask.priority, ask.grammar)
        self._running[number], self._begun = wanted.request_id, len(self.requests)
        try:
            output = await finished
        finally:
            if self._running.pop(number, None) is not None:
                if counted:
                    self._record.abort([entry])
                self._service.backend.abort(wanted.request_id)
        self._check_output(output)
        return output

    async def run_between(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for `work` between two rounds. An error that ends the call cancels the work and is raised."""
        if not self._events.empty():
            work.close()
            await self._next()
        task = self._side_task = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.wait({task})
            if not self._events.empty():
                await self._next()
            return task.result()
        finally:
            self._side_task = None
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def submit_next(self, ask: PromptRequest) -> None:
        """A further round, when all asks before have ended: iterate once more for its outputs.

        Raises ApiError 429 where there is no room for its prompt.
        """
        assert not self._running
        size = cost_of([ask], self._service.backend.model_info, streamed=self._http is not None)
        self._service.capacity.release(self._size, key_of(self.owner))
        self._size = RequestCost()  # what it holds if there is no room
        self._service.capacity.acquire(size, key_of(self.owner))
        self._size = size
        ask = self._caller.bind(ask)
        self.requests = [*self.requests, ask]
        self._record.add(ask)
        self._submit(len(self.requests) - 1)

    async def _next(self) -> tuple[int, RequestOutput]:
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        number, output, size = event
        self._unread -= size
        self._check_output(output)
        return number, output

    def _check_output(self, output: RequestOutput) -> None:
        """Raises ApiError for an output that says that its request has failed."""
        failed = next((each.error for each in output.outputs if each.finish_reason == "error"), None)
        if failed is not None:
            if self._service.sleep_level:  # it fell asleep before the request came to it
                self._service.check_ready()
            if failed.startswith(STRUCTURED_OUTPUTS):  # the request's own fault: to send it again would not help
                raise ApiError(400, failed, param=STRUCTURED_OUTPUTS)
            if failed.startswith(ADAPTER):  # its files are gone, or have changed
                raise ApiError(400, failed, param="model", code="invalid_adapter")
            raise ApiError(500, f"the request failed: {failed}", code="request_failed")

    def _submit(self, first: int = 0) -> None:
        """Submits the asks from number `first` on; of texts that become numbers, as many as may be there at once."""
        last = len(self.requests) if self.requests[first].pooling is None else self._turn(first)
        wanted = {number: self._wanted(number, self.requests[number].prompt) for number in range(first, last)}
        _, params, priority, grammar, pooling = self.requests[first]
        self._service.backend.submit(list(wanted.values()), pooling or params, priority, grammar)
        self._running.update((number, each.request_id) for number, each in wanted.items())
        self._begun = last

    def _turn(self, first: int) -> int:
        """Returns the end of the asks, from `first` on, that the engine takes now; at least one."""
        room = MAX_STEPS * self._service.backend.model_info.step_tokens - self._tokens()
        last = first
        while last < len(self.requests) and last - first + len(self._running) < MAX_TEXTS:
            room -= self.requests[last].prompt.num_tokens
            if room < 0 and last > first:
                break
            last += 1
        return last

    def _tokens(self) -> int:
        """Prompt tokens of the texts that are in the engine."""
        return sum(self.requests[number].prompt.num_tokens for number in self._running)

    def _submit_more(self) -> None:
        """Brings the next texts when half of those before have their numbers: together they cost less."""
        if self._begun == len(self.requests) or 2 * len(self._running) > MAX_TEXTS:
            return
        if self._running and 2 * self._tokens() > MAX_STEPS * self._service.backend.model_info.step_tokens:
            return
        try:
            self._submit(self._begun)
        except Exception as error:  # the engine is gone: the reader gets the error
            self.fail(error)

    def _wanted(self, number: int, prompt: Prompt) -> SubmitRequest:
        def deliver(output: RequestOutput) -> None:
            if output.finished:
                self._running.pop(number, None)
            self._record.record_output(number, output)
            self._keep(number, output)
            if output.finished and self._begun < len(self.requests) and output.pooled is not None:
                self._submit_more()

        return SubmitRequest(self._request_id(), prompt, deliver)

    def _request_id(self) -> str:
        # the process that takes this one's place gives other ids, while the engine may still have these
        return f"{self._service.name}-{os.getpid()}-{next(_request_numbers)}"

    def _keep(self, number: int, output: RequestOutput) -> None:
        """Queues an output for the reader, unless it has stopped reading and too much waits for it."""
        size = _output_bytes(output) if self._connection is not None and self._connection.is_stuck else 0
        self._events.put_nowait((number, output, size))
        self._unread += size
        if self._running and self._unread > MAX_UNREAD * self._size.completions:
            self._disconnect()

    def _disconnect(self) -> None:
        assert self._http is not None and self._connection is not None
        name = self._http.scope["state"]["tally"].request_id
        logger.warning("request %s ended: %d bytes wait for a reader that does not read", name, self._unread)
        self._connection.disconnect()
        self._leave()

    def _abort(self) -> None:
        self._begun = len(self.requests)
        entries = (self._entries.get(number, number) for number in self._running)
        self._record.abort([entry for entry in entries if entry is not None])
        for request_id in self._running.values():
            self._service.backend.abort(request_id)
        self._running.clear()

    async def _watch(self, http: HttpRequest) -> None:
        """The body was read: the next message that comes is that the client has gone."""
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        """The reader has gone: the loop has better to do than to write out what waits for it."""
        while not self._events.empty():
            self._events.get_nowait()
        self.fail(ClientGone())


def _output_bytes(output: RequestOutput) -> int:
    """Returns about how many bytes an output takes while it waits."""
    experts = sum(each.routed_experts.nbytes for each in output.outputs if each.routed_experts is not None)
    texts = sum(
        _OUTPUT + len(each.text) + LOGPROB_BYTES * sum(map(len, each.logprobs or ())) for each in output.outputs
    )
    return texts + experts
