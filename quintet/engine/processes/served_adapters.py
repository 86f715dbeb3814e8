"""Adapters (LoRA) that a server's requests may name. Engine 0 has the names; every API process knows them."""

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from quintet.engine.lora.references import LoRAReferences
from quintet.engine.processes import messages as wire
from quintet.lora.errors import public_text
from quintet.lora.request import LoRAReference, LoRARequest

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

READERS = 2  # adapters that are read at once
MAX_SERVED = 4096  # names: all are sent to each API process when one changes
OFF = "this server has no LoRA adapters; start it with --enable-lora"

Send = Callable[[int, wire.FromEngine], None]  # to an API process


class _Outcome(NamedTuple):
    """Result of reading the adapter of an order."""

    order: wire.Order
    reference: LoRAReference | None
    refused: wire.Answer | None


class _Unconfirmed(NamedTuple):
    """An order that is done, and the API processes that have not confirmed its change of names."""

    version: int
    order: wire.Order
    clients: set[int]


class ServedAdapters:
    """Carries out orders about adapters, those of one name in turn. An adapter is read in a thread, and the engine
    steps meanwhile. An order is answered when every API process knows the change: the next request, to any of them,
    finds the name as the answer says."""

    def __init__(self, references: LoRAReferences | None, send: Send, wake: Callable[[], None]) -> None:
        """`references`: None if adapters are off. `wake` is called in a thread, and has finish() be called."""
        self.table = wire.Adapters()
        self._references, self._send, self._wake = references, send, wake
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="adapter-order")
        self._outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        self._queues: dict[str, deque[wire.Order]] = {}  # by the adapter's name; the first of each is under way
        self._unconfirmed: list[_Unconfirmed] = []
        self._clients: set[int] = set()
        self._numbers = itertools.count()

    def load_at_start(self, modules: Sequence[wire.LoadLoRA]) -> None:
        """Reads the adapters that are served from the start. ValueError or OSError names the one that is wrong."""
        references = list(self._threads.map(self._reference_at_start, modules))
        for work, reference in zip(modules, references, strict=True):
            self._set(work, reference)

    def _reference_at_start(self, work: wire.LoadLoRA) -> LoRAReference:
        with _named_in_errors(work):
            return self._reference(work)

    def _reference(self, work: wire.LoadLoRA) -> LoRAReference:
        if self._references is None:
            raise ValueError(OFF)
        request = LoRARequest(work.name, 0, work.path, work.base_model_name, work.load_inplace)
        return self._references.reference(request)

    def join(self, client: int) -> None:
        """Notes an API process that has the names: Hello brought them."""
        self._clients.add(client)

    def leave(self, client: int) -> None:
        """Notes that an API process has died."""
        self._clients.discard(client)
        self._confirm(client, self.table.version)

    def confirm(self, message: wire.HasAdapters) -> None:
        """Answers the orders whose changes all API processes now know."""
        self._confirm(message.worker, message.version)

    def _confirm(self, client: int, version: int) -> None:
        waiting, self._unconfirmed = self._unconfirmed, []
        for each in waiting:
            if each.version <= version:
                each.clients.discard(client)
            if each.clients:
                self._unconfirmed.append(each)
            else:
                self._send(each.order.worker, wire.Answer(each.order.number))

    def take(self, order: wire.Order) -> None:
        """Begins an order, or queues it behind others of that name."""
        assert isinstance(order.work, wire.LoadLoRA | wire.UnloadLoRA)
        queue = self._queues.setdefault(order.work.name, deque())
        queue.append(order)
        if len(queue) == 1:
            self._run_queue(order.work.name)

    def _run_queue(self, name: str) -> None:
        """Carries out the orders of a name, up to one that a thread has to work on."""
        queue = self._queues[name]
        while queue and not self._begin(queue[0]):
            queue.popleft()
        if not queue:
            del self._queues[name]

    def _begin(self, order: wire.Order) -> bool:
        """Begins an order -> whether a thread works on it; if not, it has ended."""
        work, names = order.work, {each.reference.name for each in self.table.served}
        if isinstance(work, wire.UnloadLoRA):
            if work.name in names:
                self._unset(work.name)
                self._changed(order)
            else:
                self._refuse(order, f"The lora adapter '{work.name}' cannot be found.", wire.ADAPTER_UNKNOWN)
            return False
        assert isinstance(work, wire.LoadLoRA)
        if self._references is None:
            self._refuse(order, OFF)
        elif work.name in names and not work.load_inplace:
            self._refuse(
                order, f"The lora adapter '{work.name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.", wire.ADAPTER_TAKEN,
            )  # fmt: skip
        elif work.name not in names and len(names) >= MAX_SERVED:
            self._refuse(order, f"{MAX_SERVED} adapters are served, and no more can be; unload one")
        else:
            self._threads.submit(self._read, order, work)
            return True
        return False

    def _next(self, name: str) -> None:
        """The first order of a name has ended."""
        self._queues[name].popleft()
        self._run_queue(name)

    def _read(self, order: wire.Order, work: wire.LoadLoRA) -> None:
        """Runs in a thread."""
        try:
            outcome = _Outcome(order, self._reference(work), None)
        except FileNotFoundError as error:
            why = f"No adapter found for '{work.path}': {public_text(error)}"
            outcome = _Outcome(order, None, wire.Answer(order.number, why, wire.ADAPTER_UNKNOWN))
        except tuple(wire.FIXABLE.values()) as error:
            logger.warning("adapter %r of %s: %s", work.name, work.path, error)  # with folders, which callers get not
            kind, why = wire.Failure.of(error).kind, public_text(error)
            outcome = _Outcome(order, None, wire.Answer(order.number, why, kind))
        except Exception as error:  # whatever a file holds: it costs this order, and not the engine
            logger.exception("the adapter %r cannot be read", work.name)
            why = f"the adapter {work.name!r} cannot be read ({type(error).__name__}); the server's log says more"
            outcome = _Outcome(order, None, wire.Answer(order.number, why, "ValueError"))
        self._outcomes.put(outcome)
        self._wake()

    def finish(self) -> None:
        """Ends the orders whose adapters were read."""
        while not self._outcomes.empty():
            order, reference, refused = self._outcomes.get()
            assert isinstance(order.work, wire.LoadLoRA)
            if refused is not None:
                self._refuse(order, refused.refused, refused.kind)
            elif reference is not None:
                self._set(order.work, reference)
                self._changed(order)
            self._next(order.work.name)

    def _set(self, work: wire.LoadLoRA, reference: LoRAReference) -> None:
        names = [each.reference.name for each in self.table.served]
        number = self.table.served[names.index(work.name)].number if work.name in names else next(self._numbers)
        served = wire.ServedLoRA(reference, work.path, work.base_model_name, int(time.time()), number)
        if work.name in names:  # it keeps its place in lists
            place = names.index(work.name)
            rest = (*self.table.served[:place], served, *self.table.served[place + 1 :])
        else:
            rest = (*self.table.served, served)
        self.table = wire.Adapters(self.table.version + 1, rest)
        logger.info("adapter %r is served from %s", work.name, reference.path)

    def _unset(self, name: str) -> None:
        assert self._references is not None
        self._references.remove(name)
        rest = tuple(each for each in self.table.served if each.reference.name != name)
        self.table = wire.Adapters(self.table.version + 1, rest)
        logger.info("adapter %r is served no more", name)

    def _changed(self, order: wire.Order) -> None:
        """Sends the names to all API processes; the order is answered when each has confirmed them."""
        self._unconfirmed.append(_Unconfirmed(self.table.version, order, set(self._clients)))
        for client in self._clients:
            self._send(client, self.table)

    def _refuse(self, order: wire.Order, why: str, kind: str = "ValueError") -> None:
        logger.warning("refused: %s", why)
        self._send(order.worker, wire.Answer(order.number, why, kind))


def check_modules(modules: Sequence[wire.LoadLoRA], read: Callable[[str], object]) -> None:
    """Has the adapters that are served from the start read by their paths, before the weights are. ValueError or
    OSError names the one that is wrong."""
    for work in modules:
        with _named_in_errors(work):
            read(work.path)


@contextlib.contextmanager
def _named_in_errors(work: wire.LoadLoRA) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"lora_modules: {work.name}={work.path}: {error}") from error


class Waker:
    """Sends AdapterRead to the engine's own inbox, from any thread: each has a socket of its own."""

    def __init__(self, connect: Callable[[], "zmq.Socket[bytes]"]) -> None:
        self._connect, self._local = connect, threading.local()
        self._frame = wire.encode(wire.AdapterRead())

    def __call__(self) -> None:
        if not hasattr(self._local, "socket"):
            self._local.socket = self._connect()
        self._local.socket.send(self._frame)
