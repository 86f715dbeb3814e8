"""What the engine's books hold for a connector: pages that are arriving, and pages that leave.

A connector is one more holder of pages of the pool. A request whose beginning lies elsewhere waits while it arrives,
and others go past it: free pages are taken for what is missing, written between steps as it comes, and entered into
the prefix cache; once all has come or failed the pages are let go, and the request finds them as it would find any. A
page that failed is computed as if it had never been anywhere.

What a step has computed leaves when that step has landed. A device does what it is told in order: once it was told to
copy a page, whoever gets that page writes to it behind the copy.
"""

import enum
import hashlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.engine.elsewhere.connector import Connector, Load, Lookup, Rows
from quintet.engine.elsewhere.council import Council
from quintet.engine.elsewhere.joint import Source, either
from quintet.engine.elsewhere.transfer import Transfer
from quintet.engine.interrupts import Uninterrupted
from quintet.engine.request import Request
from quintet.engine.tables import Tables, note
from quintet.engine.weight_files import Weights
from quintet.platforms.interface import CacheLost, DeviceLost

if TYPE_CHECKING:  # it copies by the runner's workers, and the runner knows the scheduler
    from quintet.engine.elsewhere.copies import Copies

logger = logging.getLogger(__name__)

WAIT = 0.02  # seconds that an engine waits that has nothing else to do
Entered = tuple[int, bytes]  # a page, and the hash under which it was entered into the prefix cache


class Wait(enum.Enum):
    """What a request waits for."""

    NO = 0  # nothing
    COMES = 1  # its pages, or its turn to ask for them: others go past it
    ROOM = 2  # room for them: nobody goes past it


@dataclass(eq=False)
class Arrival:
    """Pages on their way for a request."""

    load: Load
    held: list[int]  # pages of its beginning that were in the cache
    pages: list[int]  # taken for what comes, by place in the load
    digests: list[bytes]  # of these
    here: int  # tokens that were in the cache
    heard: float = field(default_factory=time.monotonic)  # when something came, or it began
    failed: str = ""  # why some did not come


@dataclass
class Counts:
    """Since the start."""

    asked: int = 0  # tokens of prompts that were looked for elsewhere
    loaded: int = 0  # pages that came
    stored: int = 0  # that were handed over
    failures: int = 0  # that did not come, though they were there


class Elsewhere:
    """One connector's holdings. `ask()` is the scheduler's; the rest stands between steps."""

    def __init__(  # noqa: PLR0913  # the last are of engines that have others, or ranks
        self,
        connector: Connector,
        copies: "Copies",
        tables: Tables,
        identity: bytes,
        patience: float,
        fails: bool,
        transfer: Transfer | None = None,
        council: Council | None = None,
    ) -> None:
        """identity: of all that a page's numbers depend on, besides its tokens. patience: seconds until what has not
        come counts as failed. fails: a request ends where pages failed, instead of computing them. council: of ranks
        that are processes."""
        self.connector, self.copies, self._tables, self._pool = connector, copies, tables, tables.pool
        self.transfer = transfer  # pages of other engines, and for them
        self.council = council
        self._found: dict[Request, set[bytes]] = {}  # pages that were found beside them, of those who wait
        self._lookups: dict[Request, tuple[Lookup, list[bytes]]] = {}  # of which pages, whose answers are waited for
        closing = connector.close if transfer is None else partial(_close_both, connector, transfer)
        self._close = weakref.finalize(self, closing)  # threads keep the connector, and nothing of the engine
        self._identity, self._patience, self._fails = identity, patience, fails
        self._root = _root(identity, b"")
        self._arrivals: dict[Request, Arrival] = {}
        self._queued: dict[Request, int] = {}  # who will ask for so many pages, when there is room
        self._copying: tuple[list[bytes], Callable[[], Rows]] | None = None
        self._at_once = copies.at_once  # pages
        self.counts = Counts()

    @property
    def held(self) -> list[list[int]]:
        """Pages, by who waits for them."""
        return [arrival.held + arrival.pages for arrival in self._arrivals.values()]

    @property
    def arriving(self) -> int:
        """Requests that wait for pages, or to know of them."""
        return len(self._arrivals) + len(self._lookups)

    @property
    def told(self) -> dict[str, Any]:
        """Of other engines, as fields of Stats."""
        return {} if self.transfer is None else self.transfer.counts()

    # ------------------------------------------------------------------------------------------------------- arriving

    def ask(self, request: Request, alone: bool) -> Wait:
        """Whether it can begin. The first that is asked of a request begins to bring what there is of it, if there is
        room for all of it; where it is alone there will not be more, and it does without."""
        if request in self._arrivals:
            return Wait.COMES
        if request.asked and self._tables.find(request).tokens >= request.num_there:
            return Wait.NO  # else others took what had come before it could begin
        if request in self._queued and self._is_much(self._queued[request]):
            return Wait.COMES
        if not self._looked_up(request):
            return Wait.COMES
        found = self._tables.find(request)
        source = self._source(request)
        wanted = self._tables.beyond(request, source.has)
        missing = [digest for digest in wanted if not self._pool.has(digest)]
        if not missing:
            self._count(request, found.tokens)
            return Wait.NO
        held = [self._pool.page(each) for each in wanted if self._pool.has(each)]
        whole, need = len(request.token_ids), len(missing) + sum(map(self._pool.is_free, held))
        if need > self._pool.num_free or not self._tables.fits(found, whole, whole):
            return Wait.NO if alone and not self._arrivals else Wait.ROOM
        if self._is_much(len(missing)):
            self._queued[request] = len(missing)
            return Wait.COMES
        self._count(request, found.tokens)
        self._begin(request, source, held, missing, found.tokens)
        return Wait.COMES

    def _source(self, request: Request) -> Source:
        """Where its pages may come from: this engine's own places, then another engine that began with it."""
        beside = self._found.get(request, ())
        ours = Source(
            lambda digest: self.connector.has(self._root + digest) or digest in beside,
            lambda digests: self.connector.load([self._root + digest for digest in digests]),
        )
        other = None if self.transfer is None else self.transfer.source(request)
        return ours if other is None else either(ours, other)

    def _looked_up(self, request: Request) -> bool:
        """Whether it is known which of its pages are there; if not, the next meeting of the ranks says it, or a
        look-up."""
        council = self.council if self.connector.private else None
        if (council is None and not self.connector.late) or request in self._found:
            return True
        if request in self._lookups:
            return self._answered(request)
        digests = self._tables.pages_of(request)
        missing = [each for each in digests if not self._pool.has(each)]
        if not missing:
            return True
        if council is not None:
            council.look_up(request, lambda: [self.connector.lies(self._root + digest) for digest in digests])
            return False
        with Uninterrupted():
            self._lookups[request] = self.connector.look_up([self._root + digest for digest in missing]), missing
        return self._answered(request)

    def _answered(self, request: Request) -> bool:
        """Whether its look-up has an answer by now."""
        lookup, digests = self._lookups[request]
        there = lookup.there
        if there is None:
            return False
        del self._lookups[request]
        self._found[request] = {digest for digest, lies in zip(digests, there, strict=True) if lies}
        return True

    def _meet(self, council: Council) -> None:
        for request, there in council.meet(self._at_once).items():
            digests = self._tables.pages_of(request)
            self._found[request] = {digest for digest, lies in zip(digests, there, strict=True) if lies}

    def _is_much(self, more: int) -> bool:
        """Whether so many pages had better come when others have: half of the pool is for those who run."""
        return bool(self._arrivals) and sum(map(len, self.held)) + more > self._pool.num_pages // 2

    def _count(self, request: Request, here: int) -> None:
        request.asked = True
        self._queued.pop(request, None)
        self._found.pop(request, None)
        if request.num_preemptions == 0:
            self.counts.asked += request.num_prompt - here

    def _begin(self, request: Request, source: Source, held: list[int], missing: list[bytes], here: int) -> None:
        with Uninterrupted():
            self._pool.hold(held)
            pages = self._pool.take(len(missing))
            self._arrivals[request] = Arrival(source.load(missing), held, pages, missing, here)

    def bring_in(self) -> list[tuple[Request, str]]:
        """Writes what has come into the cache -> requests that have to end, and why."""
        self.connector.changed.clear()
        if self.council is not None and self.council.due:
            self._meet(self.council)
        ended = []
        for request, arrival in list(self._arrivals.items()):
            self._write(request, arrival)
            late = time.monotonic() - arrival.heard > self._patience
            if late and not arrival.load.done:
                self._fail(arrival, 1, f"nothing more came within {self._patience:g} s")
                arrival.load.cancel()
            if arrival.load.done:
                self._end(request)
                if arrival.failed:
                    logger.warning("of %d pages some did not come: %s", len(arrival.pages), arrival.failed)
                there = self._tables.find(request).tokens
                request.num_fetched = min(there, request.num_fetched + there - arrival.here)
                request.num_there = 0 if arrival.failed else there
                if arrival.failed and self._fails:
                    ended.append((request, f"pages of its prompt could not be loaded: {arrival.failed}"))
        return ended

    def _write(self, request: Request, arrival: Arrival) -> None:
        """Some of what has come; a page can be found as soon as the device was told to write it."""
        arrived = arrival.load.take(self._at_once)
        if arrived.failed:
            self._fail(arrival, len(arrived.failed), next(iter(arrived.failed.values())))
        if not arrived.places:
            return
        arrival.heard = time.monotonic()
        pages = [arrival.pages[place] for place in arrived.places]
        if not self._copied(partial(self.copies.write, pages, arrived.rows), by_all=True):
            self._fail(arrival, len(pages), "they could not be copied to the device")
            return
        self.counts.loaded += len(pages)
        for page, place in zip(pages, arrived.places, strict=True):
            if self._pool.commit(page, arrival.digests[place]) and self._pool.journal is not None:
                note(self._pool.journal, request, arrival.digests[place], self._tables.page_size)

    def _fail(self, arrival: Arrival, count: int, why: str) -> None:
        self.counts.failures += count
        arrival.failed = arrival.failed or why

    def wait(self) -> None:
        """A moment, or until something has come."""
        self.connector.changed.wait(WAIT)

    def give_way(self) -> bool:
        """Somebody who runs needs pages: the request that came last lets go of its, and asks again when there is room.
        Whether there was one."""
        if not self._arrivals:
            return False
        last = next(reversed(self._arrivals))
        self.leave(last)
        last.asked = False
        if last.handoff is not None:
            last.handoff.taken = False
        return True

    def leave(self, request: Request) -> None:
        """It has ended, or does not wait any more."""
        self._queued.pop(request, None)
        self._found.pop(request, None)
        if request in self._lookups:
            self._lookups.pop(request)[0].cancel()
        if self.council is not None:
            self.council.forget(request)
        if request in self._arrivals:
            self._arrivals[request].load.cancel()
            self._end(request)

    def _end(self, request: Request) -> None:
        arrival = self._arrivals.pop(request)
        self._pool.release(arrival.held + arrival.pages)
        request.found = None  # it was looked up before

    # -------------------------------------------------------------------------------------------------------- leaving

    def offer(self, entered: Iterable[Entered]) -> None:
        """A step that has landed computed these pages: they are copied piece by piece, the last while the next step
        runs. Nobody need hold them: who takes one from now on writes to it behind the copy."""
        self.settle()
        new = [each for each in entered if self._is_new(*each)] if self.connector.keeps else []
        for first in range(0, len(new), self._at_once):
            self.settle()
            pages, digests = zip(*new[first : first + self._at_once], strict=True)
            self._copied(partial(self._copy, pages, [self._root + digest for digest in digests]))

    def _is_new(self, page: int, digest: bytes) -> bool:
        """Whether the page still holds this, and the connector does not."""
        return self._pool.digest(page) == digest and not self.connector.has(self._root + digest)

    def settle(self) -> None:
        """Hands over what was being copied."""
        if self.transfer is not None:
            self._copied(self.transfer.settle)
        if self._copying is not None:
            (keys, wait), self._copying = self._copying, None
            self._copied(partial(self._store, keys, wait), by_all=True)

    def lend(self, request: Request) -> dict[str, Any] | None:
        """It is about to end: what its answer says of its pages, if another engine goes on with its prompt."""
        answer: list[dict[str, Any] | None] = [None]
        transfer = self.transfer
        if transfer is not None:
            self._copied(lambda: answer.__setitem__(0, transfer.lend(request)))
        return answer[0]

    def _copy(self, pages: Sequence[int], keys: list[bytes]) -> None:
        self._copying = keys, self.copies.read(pages)

    def _store(self, keys: list[bytes], wait: Callable[[], Rows]) -> None:
        rows = wait()
        with Uninterrupted():
            self.connector.store(keys, rows)
        self.counts.stored += len(keys)

    def _copied(self, copy: Callable[[], None], by_all: bool = False) -> bool:
        """Whether it went well. What is wrong with a copy costs no request; what is wrong with the device does, or with
        what all ranks do: the others would know of pages that this one does not."""
        try:
            copy()
        except (CacheLost, DeviceLost):
            raise
        except Exception as error:
            if by_all and self.council is not None:
                raise DeviceLost(f"pages were not copied on one of several ranks: {error}") from error
            logger.exception("pages were not copied")
            return False
        return True

    # --------------------------------------------------------------------------------------------------- starting over

    def forget(self) -> None:
        """The pool's books were written anew: nothing is held, and what comes is for nobody."""
        for arrival in self._arrivals.values():
            arrival.load.cancel()
        for lookup, _ in self._lookups.values():
            lookup.cancel()
        for each in (self._arrivals, self._lookups, self._queued, self._found):
            each.clear()
        if self.council is not None:
            self.council.forget()
        self._copying = None
        if self.transfer is not None:
            self.transfer.forget()

    def reset(self) -> None:
        """Nothing of today is found from now on, here or by a later start: what is computed from now on may have
        other weights."""
        for request in [*self._arrivals, *self._lookups, *self._found]:
            self.leave(request)
        if self.council is not None:
            self.council.forget()
        self._copying = None
        self._root = _root(self._identity, os.urandom(16))
        with Uninterrupted():
            self.connector.clear()

    def reweigh(self, weights: Weights | Path | None) -> None:
        """The weights are others now, to other engines, too."""
        if self.transfer is not None:
            self.transfer.reweigh(Weights(weights) if isinstance(weights, Path) else weights)

    def close(self) -> None:
        self._close()


def _close_both(connector: Connector, transfer: Transfer) -> None:
    connector.close()
    transfer.close()


def _root(identity: bytes, epoch: bytes) -> bytes:
    """What stands before every page's hash."""
    return hashlib.blake2b(identity + epoch, digest_size=16, person=b"quintet-pages").digest()
