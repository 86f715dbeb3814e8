"""Media as a processor makes them, whatever prompt they are in, and the cache of them."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np

from quintet.media.items import DecodedMedia, WireArray

DIGEST_BYTES = 16


@dataclass(frozen=True)
class ProcessedMedia:
    """A picture, video or recording as the processor makes it."""

    kind: str
    digest: bytes
    fields: dict[str, WireArray]  # all arrays that the part of the processor gives
    token_ids: tuple[int, ...]  # in the place of the text's placeholder
    count: int  # those of them in whose places rows stand
    facts: dict[str, Any] = field(default_factory=dict)  # what else the part gives, such as a video's times
    timing: dict[str, WireArray] = field(default_factory=dict)  # what the whole processor gives: KindFacts.timing
    samples: int = 0  # of a recording, at the rate of the processor's part

    @property
    def nbytes(self) -> int:
        """Bytes in memory, of the arrays."""
        return sum(len(each.data) for each in self.fields.values())


class MediaCache:
    """Processed media by the digest of their content, up to so many bytes; those that were used last stay."""

    def __init__(self, most: int) -> None:
        self._most, self.nbytes, self._lock = most, 0, Lock()
        self._held: OrderedDict[bytes, ProcessedMedia] = OrderedDict()

    def __len__(self) -> int:
        """Media that are held."""
        return len(self._held)

    def find(self, key: bytes) -> ProcessedMedia | None:
        """Returns what is held under the key."""
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
            return found

    def put(self, key: bytes, made: ProcessedMedia) -> None:
        """Holds a medium, unless it is larger than the cache."""
        with self._lock:
            if key in self._held or made.nbytes > self._most:
                return
            self._held[key] = made
            self.nbytes += made.nbytes
            while self.nbytes > self._most:
                self.nbytes -= self._held.popitem(last=False)[1].nbytes


def fields_digest(kind: str, fields: Mapping[str, WireArray]) -> bytes:
    """Returns the digest of what the encoder is given, and of what positions follow from."""
    found = hashlib.blake2b(kind.encode(), digest_size=DIGEST_BYTES, person=b"quintet-media")
    for name, each in sorted(fields.items()):
        found.update(f"/{name}/{each.dtype}/{each.shape}/".encode())
        found.update(each.data)
    return found.digest()


def raw_digest(media: DecodedMedia, options: Mapping[str, Any], several: bool) -> bytes:
    """Returns the digest of a medium as it was given, and of how it is processed."""
    settings = json.dumps([options, several], sort_keys=True, default=str).encode()
    found = hashlib.blake2b(settings, digest_size=DIGEST_BYTES, person=b"quintet-raw")
    found.update(f"/{media.kind}/{media.rate!r}/{media.times!r}".encode())
    if media.uuid:
        found.update(f"/uuid/{media.uuid}".encode())
    else:
        found.update(f"/{media.data.dtype}/{media.data.shape}/".encode())
        found.update(np.ascontiguousarray(media.data).data)
    return found.digest()
