"""Items of the row store for media: the encoder's rows, in the places of their tokens."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quintet.engine.executor.media_parts import run_tower
from quintet.engine.executor.worker_group import STEP_LEFT, WorkerGroup
from quintet.interface.platform import CacheLost, DeviceLost
from quintet.media.items import MediaItem
from quintet.media.spans import overlaps

if TYPE_CHECKING:
    from quintet.engine.request import CoreRequest, Request
    from quintet.engine.row_store.items import RowWrite, RowWriter, Written

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
            keys = [each.digest for each in request.core_request.media]
            keys += [] if request.encoded is None else [request.encoded.item.key]
            if failed := [key for key in keys if key in self.failed]:
                found[request] = self.failed[failed[0]]
        return found


@contextlib.contextmanager
def noting_failure(item: "Written", kind: str, failed: dict[bytes, str]) -> Iterator[None]:
    """Adds the item to `failed` where its encoder's code raises. Errors that are not the item's pass through: of a lost
    device or cache, and of a rank whose peer has failed on it."""
    try:
        yield
    except (DeviceLost, CacheLost):
        raise
    except Exception as error:  # whatever the encoder's code raises: it ends the requests of this medium
        if type(error).__name__ == STEP_LEFT:
            raise
        logger.error("%s of %d rows was not encoded", kind, item.count, exc_info=error)
        why = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]
        failed[item.key] = f"the model's encoder failed on the {kind} of this request: {why}"


def write_media(ranks: WorkerGroup, writes: "Sequence[RowWrite]") -> None:
    """Encodes each medium by itself, and writes its rows on every rank. EncodingFailed names those that failed."""
    failed: dict[bytes, str] = {}
    for item, places in writes:
        assert isinstance(item, MediaRows), "this writer is of media alone"
        with noting_failure(item, item.media.kind, failed):
            ranks.map_workers(partial(run_tower, item=item.media, places=places))
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
    def attends_ahead(self) -> bool:
        return self.media.attends_ahead

    @property
    def key(self) -> bytes:
        return self.media.digest

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        yield from overlaps(self.media, start, stop)


def media_items(core_request: "CoreRequest") -> list[MediaRows]:
    """Returns a prompt's media, in the order of their tokens."""
    return [MediaRows(each) for each in core_request.media]
