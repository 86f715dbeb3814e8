"""Resolves item_reference inputs: items of stored responses, only of the same API key."""

from typing import Any

import msgspec

from quintet.chat.validation import object_of, text_of
from quintet.sampling_params import ParameterError
from quintet.server.http.errors import ApiError
from quintet.server.http.responses.protocol import Item
from quintet.server.http.responses.store import ResponseStore, StoredResponse

_KEYS = ("type", "id")


def is_reference(item: Any) -> bool:
    """True for an item_reference. OpenAI's clients may omit the type: an item with only an id is one."""
    if not isinstance(item, dict):
        return False
    return item.get("type") == "item_reference" or (item.get("type") is None and "id" in item and set(item) <= {*_KEYS})


def without_logprobs(item: Item) -> Item:
    """Returns the item without log-probabilities, for the next conversation."""
    if item.get("role") != "assistant":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


class ItemReferences:
    """References of one input: looked up in the store on the event loop, decoded in a worker thread."""

    def __init__(self, given: Any, store: ResponseStore, owner: str, most: int) -> None:
        """`most`: maximum bytes of all referenced items. Raises ApiError 404 for an item that is not stored."""
        self._most = self._left = most
        self._holders: dict[str, StoredResponse] = {}  # by the item's id
        self._items: dict[str, tuple[Item, int]] = {}  # with its bytes
        for place, item in enumerate(given if isinstance(given, list) else ()):
            if is_reference(item):
                item_id = _id_of(item, f"input[{place}]")
                self._holders[item_id] = _holder(store, item_id, owner, f"input[{place}]")

    @property
    def size(self) -> int:
        """Bytes to decode for the references, at most `most`."""
        held = {stored.id: len(stored.items) + len(stored.response) for stored in self._holders.values()}
        return min(sum(held.values()), self._most)

    def read(self) -> None:
        """Decodes each needed response once."""
        for stored in {stored.id: stored for stored in self._holders.values()}.values():
            items = [*msgspec.json.decode(stored.items), *msgspec.json.decode(stored.response)["output"]]
            for item in items:
                if self._holders.get(item["id"]) is stored:
                    item = without_logprobs(item)
                    self._items[item["id"]] = item, len(msgspec.json.encode(item))

    def item(self, reference: Any, where: str) -> Item:
        """Returns the referenced item. Its bytes count each time: a short id may refer to a long text."""
        item_id = _id_of(reference, where)
        if item_id not in self._items:  # the answer of a response that failed before it had one
            raise _not_found_error(item_id, where, "its response has no answer")
        item, size = self._items[item_id]
        self._left -= size
        if self._left < 0:
            raise ParameterError(
                where, f"refers to more than fits: all items may have {self._most} bytes, as a request's body may"
            )
        return item

    def is_referenced(self, item: Item) -> bool:
        """True if the item is the target of a reference."""
        return item["id"] in self._holders


def _id_of(item: Any, where: str) -> str:
    item = object_of(item, where, _KEYS)
    if "id" not in item:
        raise ParameterError(where, "needs the id of an item of a stored response")
    return text_of(item["id"], f"{where}.id")


def _holder(store: ResponseStore, item_id: str, owner: str, where: str) -> StoredResponse:
    stored = store.response_of(item_id, owner)
    if stored is None:
        raise _not_found_error(
            item_id, where, "the response that it came with was never stored (store=false), was deleted, was too "
            "old or had to make room, belongs to another API key or was made by another API process; give the item",
        )  # fmt: skip
    if stored.running:
        raise _not_found_error(item_id, where, "its response is still in progress; wait for its end")
    return stored


def _not_found_error(item_id: str, where: str, why: str) -> ApiError:
    return ApiError(404, f"{where}: the item {item_id[:100]!r} is not here: {why}", param=where, code="item_not_found")
