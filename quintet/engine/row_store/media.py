"""Items of the row store for media: the encoder's rows, in the places of their tokens."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quintet.engine.executor.media_parts import run_tower
from quintet.interface.platform import DeviceLost
from quintet.media.items import MediaItem
from quintet.media.spans import overlaps

if TYPE_CHECKING:
    from quintet.engine.executor.worker_group import WorkerGroup
    from quintet.engine.request import CoreRequest, Request
    from quintet.engine.row_store.items import RowWrite, RowWriter

logger = logging.getLogger(__name__)

LONGEST = 300  # characters of an error of the encoder's code


class EncodingFailed(RuntimeError):
    """Raised by a step that could not encode some of its media; nothing of the model was run."""

    def __init__(self, failed: Mapping[bytes, str]) -> None:
        """`failed`: the digest of each, and why."""
        super().__init__(next(iter(failed.values())))
        self.failed = failed

    def requests(self, requests: Iterable["Request"]) -> "dict[Request, str]":
        """Returns those of the requests that have such media, and why they end."""
        found = {}
        for request in requests:
            digests = [each.digest for each in request.core_request.media if each.digest in self.failed]
            if digests:
                found[request] = self.failed[digests[0]]
        return found


def write_media(ranks: "WorkerGroup", writes: "Sequence[RowWrite]") -> None:
    """Encodes each medium by itself, and writes its rows on every rank. EncodingFailed names those that failed."""
    failed = {}
    for item, places in writes:
        assert isinstance(item, MediaRows), "this writer is of media alone"
        try:
            ranks.map_workers(partial(run_tower, item=item.media, places=places))
        except DeviceLost:
            raise
        except Exception as error:  # whatever the encoder's code raises: it ends the requests of this medium
            logger.error("%s of %d rows was not encoded", item.media.kind, item.count, exc_info=error)
            failed[item.key] = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]
    if failed:
        raise EncodingFailed(failed)


@dataclass(eq=False)
class MediaRows:
    """Rows of one medium. Its tokens may stand in several runs, with tokens of text between."""

    media: MediaItem
    writer: "RowWriter" = write_media

    @property
    def first(self) -> int:
        return self.media.spans[0][0]

    @property
    def stop(self) -> int:
        return self.media.spans[-1][1]

    @property
    def count(self) -> int:
        return self.media.count

    @property
    def key(self) -> bytes:
        return self.media.digest

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        yield from overlaps(self.media, start, stop)


def media_items(core_request: "CoreRequest") -> list[MediaRows]:
    """Returns a prompt's media, in the order of their tokens."""
    return [MediaRows(each) for each in core_request.media]
