"""Order of loads: a request names its host, so a host that has not proved to have the key may hold few threads."""

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

SLOW_SECONDS = 1.0  # a failure to connect after this is silence, and no refusal
SILENCE_SECONDS = 10.0  # for which nothing is asked of a host that was silent
MAX_HOSTS = 1024  # that are remembered


class LoadOrigin(NamedTuple):
    """The hosts of a load, and the caller that named them."""

    host_ports: tuple[str, ...]
    caller: bytes

    @property
    def hosts(self) -> set[tuple[bytes, str]]:
        return {(self.caller, each.rpartition(":")[0]) for each in self.host_ports}


class QueuedLoad(Protocol):
    """Load that waits for a thread."""

    origin: LoadOrigin

    def fail(self, why: str) -> None: ...


class LoadQueue:
    """Loads that wait for threads of two kinds: for hosts that have proved the key, and for others.

    Of the others, a caller has one thread for each host, and `share` threads in all: a caller that names silent hosts
    delays neither other callers nor hosts that are known. A host that was silent is not asked again for a while.
    """

    def __init__(self, share: int) -> None:
        self._share = share
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: deque[QueuedLoad] = deque()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._silent: OrderedDict[str, float] = OrderedDict()  # until when, time.monotonic()
        self._trying: list[LoadOrigin] = []  # of loads with threads for hosts that are not known
        self._closed = False

    def put(self, load: QueuedLoad) -> None:
        with self._changed:
            self._waiting.append(load)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, known: bool) -> QueuedLoad | None:
        """Waits for a load of known hosts, or of others; None once the queue is closed and has none."""
        with self._changed:
            while True:
                self._drop_silent()
                for load in self._waiting:
                    if self._is_known(load.origin) == known and (known or self._may_try(load.origin)):
                        self._waiting.remove(load)
                        if not known:
                            self._trying.append(load.origin)
                        return load
                if self._closed:
                    return None
                self._changed.wait()

    def tried(self, origin: LoadOrigin) -> None:
        """Notes that a load that take(known=False) gave needs such a thread no more."""
        with self._changed:
            self._trying.remove(origin)
            self._changed.notify_all()

    def note_proved(self, host_port: str) -> None:
        with self._changed:
            self._silent.pop(host_port, None)
            _remember(self._known, host_port, None)
            self._changed.notify_all()

    def note_failed(self, host_port: str, seconds: float) -> None:
        """Notes that no connection came about, after so many seconds."""
        with self._changed:
            self._known.pop(host_port, None)
            if seconds > SLOW_SECONDS:
                _remember(self._silent, host_port, time.monotonic() + SILENCE_SECONDS)
            self._changed.notify_all()

    def _is_known(self, origin: LoadOrigin) -> bool:
        return all(each in self._known for each in origin.host_ports)

    def _may_try(self, origin: LoadOrigin) -> bool:
        trying = Counter(key for each in self._trying for key in each.hosts)
        busy = sum(each.caller == origin.caller for each in self._trying)
        return busy < self._share and not any(trying[key] for key in origin.hosts)

    def _drop_silent(self) -> None:
        now = time.monotonic()
        silent = {each for each, until in self._silent.items() if until > now}
        for load in [each for each in self._waiting if silent.intersection(each.origin.host_ports)]:
            self._waiting.remove(load)
            host_port = sorted(silent.intersection(load.origin.host_ports))[0]
            load.fail(f"{host_port}: the peer did not answer {SILENCE_SECONDS:g} s ago or less; it is not asked again")


def _remember(hosts: OrderedDict[str, float] | OrderedDict[str, None], host_port: str, value: float | None) -> None:
    hosts[host_port] = value  # type: ignore[assignment]
    hosts.move_to_end(host_port)
    if len(hosts) > MAX_HOSTS:
        hosts.popitem(last=False)


def origin_of(host_ports: Sequence[str], caller: bytes) -> LoadOrigin:
    return LoadOrigin(tuple(dict.fromkeys(host_ports)), caller)
