"""Process of one data-parallel engine: carries out its messages, steps, and reports what came of them."""

import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec
import torch

from quintet.config import EngineConfig
from quintet.engine.data_parallel import messages
from quintet.engine.engine import Engine
from quintet.engine.parallel import commands as inbox
from quintet.engine.parallel.follower import carried_out, end_with_leader, grammars_of
from quintet.engine.parallel.multiproc import PARENT_GONE, REFUSED
from quintet.engine.startup import EnginePlan, launch, prepare
from quintet.outputs import TokenDelta


def main() -> int:
    """Runs until the parent process is gone. Exit code REFUSED: the engine did not start, 1: it crashed."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        orders = msgspec.json.decode(pipe.readline(), type=messages.Orders)
    end_with_leader(orders.leader, orders.in_main_thread)
    logging.basicConfig(level=logging.ERROR, format=f"engine {orders.number}: %(name)s: %(message)s")
    torch.set_num_threads(orders.threads)
    link = Connection(orders.descriptor)
    try:
        prepared = prepare(EngineConfig(**orders.engine))
        engine = launch(prepared, progress=False, grammars=grammars_of(prepared))
    except tuple(messages.ERRORS.values()) as error:
        link.send_bytes(messages.encode(messages.Refused.of(error)))
        return REFUSED
    link.send_bytes(messages.encode(messages.Ready(prepared.plan.max_model_len)))
    try:
        EngineProcess(engine, prepared, link).run()
    except BaseException as error:
        link.send_bytes(messages.encode(messages.Crashed(f"{type(error).__name__}: {error}")))
    return 1


class EngineProcess:
    """One engine, driven by messages."""

    def __init__(self, engine: Engine, prepared: EnginePlan, link: "Connection[bytes, bytes]") -> None:
        self._engine, self._prepared, self._link = engine, prepared, link
        self._letters: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._refused: list[TokenDelta] = []

    def run(self) -> None:
        """Steps and reports until the process ends. A thread reads messages, so that neither side ever waits to write
        while the other does."""
        threading.Thread(target=self._read, name="quintet-letters", daemon=True).start()
        while True:
            for letter in self._come():
                self._obey(messages.decode_letter(letter))
            if self._engine.busy:
                self._engine.compute()
            deltas, self._refused = [*self._refused, *self._engine.take()], []
            self._tell(messages.Report(deltas, self._engine.stats()))

    def _read(self) -> None:
        try:
            while True:
                self._letters.put(self._link.recv_bytes())
        except (EOFError, OSError):
            os._exit(PARENT_GONE)

    def _come(self) -> Iterator[bytes]:
        """Yields all messages that have arrived; an idle engine waits for one."""
        if not self._engine.busy:
            yield self._letters.get()
        while not self._letters.empty():
            yield self._letters.get()

    def _obey(self, letter: messages.Letter) -> None:
        if isinstance(letter, inbox.Add):
            self._add(letter)
        elif isinstance(letter, inbox.Abort):
            self._engine.abort(letter.request_ids)
        elif isinstance(letter, inbox.ResetPrefixCache):
            self._engine.reset_prefix_cache()
        else:
            self._do(letter.joint)

    def _add(self, letter: inbox.Add) -> None:
        """Adds a request; one that the engine refuses ends alone."""
        try:
            self._engine.add(letter.admitted)
        except ValueError as error:
            why = str(error)
            self._refused.append(TokenDelta(letter.admitted.request_id, [], finish_reason="error", error=why))

    def _do(self, order: inbox.Joint) -> None:
        try:
            freed = carried_out(self._engine, self._prepared, order)
        except tuple(messages.ERRORS.values()) as error:
            self._tell(messages.Refused.of(error))
        else:
            self._tell(messages.Done(freed))

    def _tell(self, reply: messages.Reply) -> None:
        self._link.send_bytes(messages.encode(reply))


if __name__ == "__main__":
    sys.exit(main())
