"""Shares one client among threads: the thread that has the turn steps for all, and hands the others their outputs."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Set
from typing import Any, TypeVar

from quintet.common.interrupts import DeferredSigint
from quintet.engine.client import EngineClient
from quintet.outputs import RequestOutput

T = TypeVar("T")


class LLMClosed(RuntimeError):
    """The LLM was closed, and runs nothing any more."""


class _Caller:
    """One call. It waits for its turn; if `ids` names requests, for outputs of theirs too, whichever comes first."""

    __slots__ = ("bell", "ids", "outputs", "thread")

    def __init__(self, ids: Set[str] | None = None) -> None:
        self.ids, self.thread = ids, threading.get_ident()
        self.outputs: list[RequestOutput] = []
        self.bell: Any = None  # a lock that is held until what it waits for is there


class SharedClient:
    """Calls on one Client from any thread.

    One thread at a time has the turn, and it alone touches the engine. A call that waits for outputs keeps the turn
    from step to step until it has some; calls that do something in between (add, sleep) get it after the step that
    runs, so that what they add is in the next. A thread that passes the turn on wakes the next in line: no thread
    polls, and none starves. Ctrl-C works while a step runs or a call waits; the fields below change as a whole.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._lock = threading.RLock()  # of what follows; again by one thread: a collected generator calls abort()
        self._turn: _Caller | None = None
        self._line: list[_Caller] = []  # callers that wait
        self._kept: dict[str, list[RequestOutput]] = {}  # of requests that no caller waits for just now
        self._left: deque[tuple[str, ...]] = deque()  # requests of callers that are gone
        self._closed = False

    def call(self, function: Callable[[], T]) -> T:
        """Does it between two steps."""
        return self._run_call(_Caller(), function)

    def receive(self, request_ids: Set[str]) -> list[RequestOutput]:
        """Outputs of these requests, once there are any: from steps of this thread or of others'.

        Closed, if that is what happens instead; RuntimeError if the engine has none of them.
        """
        caller = _Caller(request_ids)
        return self._run_call(caller, lambda: self._step(caller))

    def step(self, request_ids: Set[str]) -> list[RequestOutput]:
        """At most one step -> the outputs of these requests that there are then; maybe none."""
        caller = _Caller(request_ids)

        def once() -> list[RequestOutput]:
            if not caller.outputs:
                self._advance(caller)
            return caller.outputs

        return self._run_call(caller, once)

    def abort(self, request_ids: Collection[str]) -> None:
        """Ends requests, now or after the step that runs; ids that are not running are passed over. Never waits."""
        self._left.append(tuple(request_ids))
        caller = _Caller()
        with DeferredSigint():
            with self._lock:
                if self._turn is None:  # else the thread that has it will do it
                    self._turn = caller
            self._leave(caller)

    def close(self) -> None:
        """Ends every request; calls that wait for one, and all later calls, raise Closed."""
        if not self._closed:
            self.call(self._close)

    def _run_call(self, caller: _Caller, function: Callable[[], T]) -> T:
        """Twice to leave, for Ctrl-C may come when the first begins."""
        try:
            try:
                self._enter(caller)
                return function()
            finally:
                self._leave(caller)
        except BaseException:
            self._leave(caller)
            raise

    def _enter(self, caller: _Caller) -> None:
        """Returns when it has the turn, or outputs."""
        with DeferredSigint(), self._lock:
            self._check(caller)
            for each in [each for each in self._kept if caller.ids and each in caller.ids]:
                caller.outputs += self._kept.pop(each)
            if caller.outputs:
                return
            if self._turn is None:
                self._turn = caller
                return
            caller.bell = threading.Lock()
            caller.bell.acquire()
            self._line.append(caller)
        caller.bell.acquire()  # until another thread releases it
        if self._closed and not caller.outputs and self._turn is not caller:
            raise LLMClosed("this LLM was closed while the call waited; make a new one")

    def _check(self, caller: _Caller) -> None:
        if self._closed:
            raise LLMClosed("this LLM is closed; make a new one")
        if self._turn is not None and self._turn.thread == caller.thread:
            raise RuntimeError("this LLM is in a step, which waits for this very call; call it from outside of a step")

    def _leave(self, caller: _Caller) -> None:
        """Removes a caller from the line; if it has the turn, the turn goes on. May be repeated."""
        with DeferredSigint():
            with self._lock:
                if caller in self._line:
                    self._line.remove(caller)
            if self._turn is caller:
                self._pass_on()

    def _step(self, caller: _Caller) -> list[RequestOutput]:
        """Steps, as long as it has the turn, until there are outputs for the caller."""
        while not caller.outputs:
            if self._turn is not caller:
                self._enter(caller)
                continue
            self._advance(caller)
        return caller.outputs

    def _advance(self, caller: _Caller) -> None:
        """Runs one step for the caller that has the turn; calls that run between steps get the turn after it."""
        self.client.engine.compute()
        with DeferredSigint():
            self._deliver(self.client.collect())
            self._abort_abandoned()
            lost = not caller.outputs and not self.client.busy
            if any(other.ids is None for other in self._line):
                self._pass_on()
        if lost:
            raise RuntimeError(f"the engine has none of the requests {', '.join(sorted(caller.ids or ())[:9])}")

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Gives outputs to the callers that wait for them; the rest is kept until a caller asks for it."""
        with self._lock:
            waiting = [each for each in (self._turn, *self._line) if each and each.ids]
            for output in outputs:
                owner = next((each for each in waiting if each.ids and output.request_id in each.ids), None)
                kept = self._kept.setdefault(output.request_id, []) if owner is None else owner.outputs
                kept.append(output)
            served = [each for each in self._line if each.outputs]
            self._line = [each for each in self._line if not each.outputs]
            for each in served:
                each.bell.release()

    def _pass_on(self) -> None:
        """The turn, to the next in line: calls that do something before those that wait for a step."""
        while True:
            self._abort_abandoned()
            with self._lock:
                if self._left:
                    continue
                self._turn = next((each for each in self._line if each.ids is None), None)
                if self._turn is None and self._line:
                    self._turn = self._line[0]
                if self._turn is not None:
                    self._line.remove(self._turn)
                    self._turn.bell.release()
                return

    def _abort_abandoned(self) -> None:
        """Ends the requests of callers that are gone."""
        while self._left:
            ids = self._left.popleft()
            self.client.abort(ids)
            for each in ids:
                self._kept.pop(each, None)

    def _close(self) -> None:
        with DeferredSigint(), self._lock:
            self._closed = True
            line, self._line, self._kept = self._line, [], {}
            self.client.close()
            for each in line:
                each.bell.release()
