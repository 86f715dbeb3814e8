"""Servers that keep responses: by the response's id, read from the beginning of the answer that made it."""

import re
from collections import OrderedDict
from typing import NamedTuple

MAX_LOCATIONS = 1 << 16  # ids that are remembered; the ones that were not asked for the longest go first
_MAX_SCANNED = 64 * 2**10  # bytes of an answer in which its id has to come
_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_.-]{1,256})"')


class ResponseLocation(NamedTuple):
    """Location of a response."""

    url: str
    owner: str  # the key that made it, by name


class ResponseLocations:
    """Locations of the latest responses."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, ResponseLocation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, response_id: str) -> ResponseLocation | None:
        found = self._places.get(response_id)
        if found is not None:
            self._places.move_to_end(response_id)
        return found

    def put(self, response_id: str, place: ResponseLocation) -> None:
        self._places[response_id] = place
        self._places.move_to_end(response_id)
        while len(self._places) > MAX_LOCATIONS:
            self._places.popitem(last=False)


class ResponseIdFinder:
    """Looks for the id of a response in what passes by."""

    def __init__(self, kept: ResponseLocations, place: ResponseLocation) -> None:
        self._kept, self._place = kept, place
        self._seen = b""
        self._done = False

    def feed(self, piece: bytes) -> None:
        if self._done:
            return
        self._seen += piece
        found = _ID.search(self._seen)
        if found is not None:
            self._put(found[1].decode())
        self._done = found is not None or len(self._seen) > _MAX_SCANNED
        if self._done:
            self._seen = b""

    def _put(self, response_id: str) -> None:
        known = self._kept.find(response_id)
        if known is None or known.owner == self._place.owner:  # no answer makes another owner's response its own
            self._kept.put(response_id, self._place)
