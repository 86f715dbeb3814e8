"""Response store of one API process: limited in number, bytes and age; evicts the oldest first."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from quintet.server.http.errors import ApiError
from quintet.server.http.ids import new_id
from quintet.server.http.responses.background import BackgroundRun

MAX_RESPONSES = 10_000  # keys and objects then take some MB
MAX_BYTES = 128 * 2**20  # about the memory of an API process itself; holds 1000 long conversations of 100 KB
MAX_AGE = 24 * 3600.0  # seconds; a conversation can go on the next morning
_PREFIX = "resp"
_MAX_INDEXED = 200  # bytes of one entry in the index of item ids


@dataclass(eq=False)
class StoredResponse:
    """One response and the items before it, as JSON; a conversation continues from both."""

    id: str
    owner: str  # identifies the API key that created it; other keys cannot find it
    items: bytes  # JSON
    response: bytes = b""  # JSON; empty while it runs
    run: BackgroundRun | None = None  # of a background response; its events stay, so that they can be read again
    since: float = 0.0  # when it was stored, or ended
    item_ids: tuple[str, ...] = ()  # new items of its input, and its output items

    @property
    def running(self) -> bool:
        return self.run is not None and not self.run.is_over

    def has_item(self, item_id: str) -> bool:
        """True if the item belongs to this running response."""
        return self.run is not None and self.running and item_id in self.run.reply.item_ids

    @property
    def size(self) -> int:
        events = self.run.size if self.run is not None else 0
        return len(self.items) + len(self.response) + events + _MAX_INDEXED * len(self.item_ids)


class ResponseStore:
    """Responses of one API process. Their ids contain its name: other processes do not have them."""

    def __init__(
        self,
        process: str,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_age: float = MAX_AGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._max_responses, self._max_bytes, self._max_age = max_responses, max_bytes, max_age
        self._clock = clock
        self._running: dict[str, StoredResponse] = {}
        self._ended: dict[str, StoredResponse] = {}  # oldest first
        self._ended_size = 0
        self._holders: dict[str, StoredResponse] = {}  # by the ids of items

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    @property
    def size(self) -> int:
        """Bytes in the store."""
        return self._ended_size + sum(stored.size for stored in self._running.values())

    def new_id(self) -> str:
        """Returns an unguessable response id: clients that share an API key can read each response by its id."""
        return f"{_PREFIX}_{self._process}_{new_id()}"

    def put(self, stored: StoredResponse) -> None:
        """Stores the response and evicts the oldest ones. A background response is put again when it has ended."""
        if stored.running:
            self._running[stored.id] = stored
        else:
            self._running.pop(stored.id, None)
            assert stored.id not in self._ended
            stored.since = self._clock()
            self._ended[stored.id] = stored
            self._ended_size += stored.size
        self._holders.update((item_id, stored) for item_id in stored.item_ids)
        self._trim()

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Returns a response. Raises ApiError 404 with the possible reasons."""
        self._trim()
        stored = self._running.get(response_id) or self._ended.get(response_id)
        if stored is None or stored.owner != owner:
            raise ApiError(404, self._why_not(response_id), param="response_id", code="response_not_found")
        return stored

    def response_of(self, item_id: str, owner: str) -> StoredResponse | None:
        """Returns the response that an item first came with. Both are deleted together, even if it was repeated."""
        self._trim()
        stored = self._holders.get(item_id) or next(
            filter(lambda each: each.has_item(item_id), self._running.values()), None
        )
        return stored if stored is not None and stored.owner == owner else None

    def delete(self, response_id: str, owner: str) -> StoredResponse:
        stored = self.get(response_id, owner)
        if self._running.pop(response_id, None) is None:
            self._drop(stored)
        else:
            self._forget_items(stored)
        return stored

    def contains(self, stored: StoredResponse) -> bool:
        return stored.id in self._running or stored.id in self._ended

    def _trim(self) -> None:
        """Evicts ended responses. Running ones stay: the gate limits their number."""
        born = self._clock() - self._max_age
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if len(self) <= self._max_responses and self.size <= self._max_bytes and oldest.since >= born:
                break
            self._drop(oldest)

    def _drop(self, stored: StoredResponse) -> None:
        del self._ended[stored.id]
        self._ended_size -= stored.size
        self._forget_items(stored)

    def _forget_items(self, stored: StoredResponse) -> None:
        for item_id in stored.item_ids:
            self._holders.pop(item_id, None)

    def _why_not(self, response_id: str) -> str:
        shown = repr(response_id[:100])
        parts = response_id.split("_")
        if len(parts) == 3 and parts[0] == _PREFIX and parts[1] != self._process:
            return (
                f"the response {shown} was made by the API process {parts[1][:20]}, and this one is {self._process}: "
                "each keeps its own; with one API process (--api-workers 1) every response is found"
            )
        return (
            f"the response {shown} is not here: it was never stored (store=false), was deleted, ended over "
            f"{self._max_age / 3600:g} hours ago, had to make room for others or belongs to another API key, or the "
            "server has started anew"
        )
