"""Scheduler side of a KV connector: tracks pages that are being loaded and pages that are being stored.

A connector holds pages of the pool, as a request does. A request with a prefix in a KV connector waits while its pages
are loaded, and other requests go ahead of it: free pages are taken for the missing ones, written between steps as they
arrive, and entered into the prefix cache. Once all have arrived or failed, the pages are released, and the request
finds them in the prefix cache as usual. A page that failed is computed as if it had never been stored.

Pages that a step has computed are stored after that step has finished. A device works in order of submission: once the
copy of a page is submitted, the next owner of the page writes to it after the copy.
"""

import enum
import hashlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.common.interrupts import DeferredSigint
from quintet.engine.kv_cache.manager import HASH_BYTES, KVCacheManager, log_stored
from quintet.engine.kv_transfer.connector import KVConnector, Load, Lookup, PageRows
from quintet.engine.kv_transfer.multi_source import PageSource, first_of
from quintet.engine.kv_transfer.p2p.transfers import P2PTransfer
from quintet.engine.kv_transfer.rank_agreement import RankAgreement
from quintet.engine.observability.stats import KVConnectorStats, PageTransferStats, Stats
from quintet.engine.request import Request
from quintet.engine.step_hook import Fail, StepHook
from quintet.engine.step_plan import StepPlan
from quintet.interface.platform import CacheLost, DeviceLost
from quintet.model_loader.weight_files import WeightFiles

if TYPE_CHECKING:  # the copier uses the runner's workers, the runner knows the scheduler, and that this manager
    from quintet.engine.kv_transfer.page_copier import PageCopier
    from quintet.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

IDLE_WAIT = 0.02  # seconds that an idle engine waits


class LoadState(enum.Enum):
    """Reason why a request waits."""

    READY = 0  # it does not wait
    LOADING = 1  # for its pages, or its turn to load them: other requests go ahead of it
    NEEDS_PAGES = 2  # for room for them: no request goes ahead of it
    NEEDS_SLOT = 3  # for a slot for its adapter: a bounded number of requests with others go ahead of it


@dataclass(eq=False)
class PendingLoad:
    """Pages that are being loaded for a request."""

    load: Load
    cached_pages: list[int]  # pages of its prefix that were in the cache
    pages: list[int]  # taken for the loaded pages, by place in the load
    digests: list[bytes]  # of these
    num_cached: int  # tokens that were in the cache
    last_arrival: float = field(default_factory=time.monotonic)  # when a page last arrived, or the load started
    error: str = ""  # why some pages did not arrive


class KVTransferManager(StepHook):
    """Loads and stores of one connector. The scheduler calls `ask()`; as a step hook, it copies pages between steps."""

    def __init__(  # noqa: PLR0913  # the last are for engines with peers, or with rank processes
        self,
        connector: KVConnector,
        copies: "PageCopier",
        tables: KVCacheManager,
        identity: bytes,
        patience: float,
        fails: bool,
        transfer: P2PTransfer | None = None,
        council: RankAgreement | None = None,
    ) -> None:
        """identity: of all that a page's content depends on, besides its tokens. patience: seconds until pages that
        have not arrived count as failed. fails: a request ends where pages failed, instead of computing them. council:
        of rank processes."""
        self.connector, self.page_copier, self._tables, self._pool = connector, copies, tables, tables.pool
        self.p2p_transfer = transfer  # pages from other engines, and for them
        self.rank_agreement = council
        self._found: dict[Request, set[bytes]] = {}  # of waiting requests: pages that a look-up found
        self._lookups: dict[Request, tuple[Lookup, list[bytes]]] = {}  # look-ups in progress, and their pages
        closing = connector.close if transfer is None else partial(_close_all, connector, transfer)
        self._close = weakref.finalize(self, closing)  # threads hold the connector, and nothing of the engine
        self._fingerprint, self._patience, self._fails = identity, patience, fails
        self._root = _key_prefix_of(identity, b"")
        self._pending: dict[Request, PendingLoad] = {}
        self._queued: dict[Request, int] = {}  # requests that will load so many pages when there is room
        self._copying: tuple[list[bytes], Callable[[], PageRows]] | None = None
        self._at_once = copies.pages_per_copy  # pages
        self._num_queried = 0  # tokens of prompts that were looked up in the KV connector
        self._num_loaded = self._num_stored = self._num_failed = 0  # pages

    @property
    def held_pages(self) -> list[list[int]]:
        """Returns the pages that are held for each waiting request."""
        return [arrival.cached_pages + arrival.pages for arrival in self._pending.values()]

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests that wait for pages, or for a look-up."""
        return len(self._pending) + len(self._lookups)

    def add_stats(self, stats: Stats) -> Stats:
        counts = KVConnectorStats(self._num_queried, self._num_stored, self._num_loaded, self._num_failed)
        page_transfer = PageTransferStats() if self.p2p_transfer is None else self.p2p_transfer.stats()
        return replace(stats, kv_connector=counts, page_transfer=page_transfer)

    # ------------------------------------------------------------------------------------------------------- arriving

    def start_load(self, request: Request, alone: bool) -> LoadState:
        """Returns what a request waits for. The first call for a request starts to load its pages, if there is room for
        all of them; if it is alone there will not be more room, and it starts without them."""
        if request in self._pending:
            return LoadState.LOADING
        if request.asked_connector and self._tables.find_prefix(request).tokens >= request.num_available:
            return LoadState.READY  # else other requests took its pages before it could start
        if request in self._queued and self._exceeds_load_share(self._queued[request]):
            return LoadState.LOADING
        if not self._looked_up(request):
            return LoadState.LOADING
        found = self._tables.find_prefix(request)
        source = self._source(request)
        wanted = self._tables.missing_hashes(request, source.has)
        missing = [digest for digest in wanted if not self._pool.has(digest)]
        if not missing:
            self._count(request, found.tokens)
            return LoadState.READY
        held = [self._pool.page(each) for each in wanted if self._pool.has(each)]
        whole, need = len(request.token_ids), len(missing) + sum(map(self._pool.is_free, held))
        if need > self._pool.num_free or not self._tables.fits(request, found, whole, whole):
            return LoadState.READY if alone and not self._pending else LoadState.NEEDS_PAGES
        if self._exceeds_load_share(len(missing)):
            self._queued[request] = len(missing)
            return LoadState.LOADING
        self._count(request, found.tokens)
        self._begin(request, source, held, missing, found.tokens)
        return LoadState.LOADING

    def _source(self, request: Request) -> PageSource:
        """Returns the sources of its pages: this engine's connector, then another engine that has begun the request."""
        beside = self._found.get(request, ())
        ours = PageSource(
            lambda digest: self.connector.has(self._root + digest) or digest in beside,
            lambda digests: self.connector.load([self._root + digest for digest in digests]),
        )
        other = None if self.p2p_transfer is None else self.p2p_transfer.page_source(request)
        return ours if other is None else first_of(ours, other)

    def _looked_up(self, request: Request) -> bool:
        """Returns whether it is known which of its pages are there; if not, the next meeting of the ranks, or a
        look-up, finds out."""
        council = self.rank_agreement if self.connector.per_rank else None
        if (council is None and not self.connector.has_lookup) or request in self._found:
            return True
        if request in self._lookups:
            return self._answered(request)
        digests = self._tables.group_hashes(request)
        missing = [each for each in digests if not self._pool.has(each)]
        if not missing:
            return True
        if council is not None:
            council.look_up(request, lambda: [self.connector.has_locally(self._root + digest) for digest in digests])
            return False
        with DeferredSigint():
            self._lookups[request] = self.connector.look_up([self._root + digest for digest in missing]), missing
        return self._answered(request)

    def _answered(self, request: Request) -> bool:
        """Returns whether its look-up has a result by now."""
        lookup, digests = self._lookups[request]
        there = lookup.found
        if there is None:
            return False
        del self._lookups[request]
        self._found[request] = {digest for digest, lies in zip(digests, there, strict=True) if lies}
        return True

    def _meet(self, council: RankAgreement) -> None:
        for request, there in council.exchange(self._at_once).items():
            digests = self._tables.group_hashes(request)
            self._found[request] = {digest for digest, lies in zip(digests, there, strict=True) if lies}

    def _exceeds_load_share(self, more: int) -> bool:
        """Returns whether so many more pages should wait until other loads have ended: half of the pool is for running
        requests."""
        return bool(self._pending) and sum(map(len, self.held_pages)) + more > self._pool.num_pages // 2

    def _count(self, request: Request, here: int) -> None:
        request.asked_connector = True
        self._queued.pop(request, None)
        self._found.pop(request, None)
        if request.num_preemptions == 0:
            self._num_queried += request.num_prompt - here

    def _begin(self, request: Request, source: PageSource, held: list[int], missing: list[bytes], here: int) -> None:
        with DeferredSigint():
            self._pool.retain(held)
            pages = self._pool.allocate(len(missing))
            self._pending[request] = PendingLoad(source.load(missing), held, pages, missing, here)

    @property
    def waits_for_steps(self) -> bool:
        """True if the ranks have something to agree on."""
        return self.rank_agreement is not None and self.rank_agreement.has_work

    def before_step(self, fail: Fail) -> None:
        """Writes pages that have arrived into the KV cache, and fails requests that cannot go on without theirs."""
        with DeferredSigint():
            self.connector.changed.clear()
            if self.rank_agreement is not None and self.rank_agreement.has_work:
                self._meet(self.rank_agreement)
            for request, arrival in list(self._pending.items()):
                self._write(request, arrival)
                late = time.monotonic() - arrival.last_arrival > self._patience
                if late and not arrival.load.done:
                    self._fail(arrival, 1, f"nothing more came within {self._patience:g} s")
                    arrival.load.cancel()
                if arrival.load.done:
                    self._finish(request, arrival, fail)

    def _finish(self, request: Request, arrival: PendingLoad, fail: Fail) -> None:
        """Ends a load: its request finds the pages in the prefix cache."""
        self._end(request)
        if arrival.error:
            logger.warning("of %d pages some did not come: %s", len(arrival.pages), arrival.error)
        there = self._tables.find_prefix(request).tokens
        request.num_fetched = min(there, request.num_fetched + there - arrival.num_cached)
        request.num_available = 0 if arrival.error else there
        if arrival.error and self._fails:
            fail(request, f"pages of its prompt could not be loaded: {arrival.error}")

    def _write(self, request: Request, arrival: PendingLoad) -> None:
        """Writes some of the arrived pages; a page can be found as soon as its write is submitted to the device."""
        arrived = arrival.load.take(self._at_once)
        if arrived.failed:
            self._fail(arrival, len(arrived.failed), next(iter(arrived.failed.values())))
        if not arrived.indices:
            return
        arrival.last_arrival = time.monotonic()
        pages = [arrival.pages[place] for place in arrived.indices]
        if not self._try_copy(partial(self.page_copier.write, pages, arrived.rows), by_all=True):
            self._fail(arrival, len(pages), "they could not be copied to the device")
            return
        self._num_loaded += len(pages)
        journal = self._pool.event_log
        positions = {} if journal is None else {digest: at for at, digest in enumerate(request.page_hashes)}
        for page, place in zip(pages, arrived.indices, strict=True):
            digest = arrival.digests[place]
            if self._pool.commit(page, digest) and journal is not None:
                log_stored(journal, request, digest, positions[digest[:HASH_BYTES]], self._tables.page_size)

    def _fail(self, arrival: PendingLoad, count: int, why: str) -> None:
        self._num_failed += count
        arrival.error = arrival.error or why

    def cancel_last_load(self) -> bool:
        """Drops the latest load, since a running request needs pages; its request asks again when there is room.
        Returns whether there was one."""
        if not self._pending:
            return False
        last = next(reversed(self._pending))
        self.cancel_request(last)
        last.asked_connector = False
        if last.transfer_params is not None:
            last.transfer_params.requested = False
        return True

    def cancel_request(self, request: Request) -> None:
        """Drops the state of a request that has ended, or does not wait any more."""
        self._queued.pop(request, None)
        self._found.pop(request, None)
        if request in self._lookups:
            self._lookups.pop(request)[0].cancel()
        if self.rank_agreement is not None:
            self.rank_agreement.drop(request)
        if request in self._pending:
            self._pending[request].load.cancel()
            self._end(request)

    def _end(self, request: Request) -> None:
        arrival = self._pending.pop(request)
        self._pool.release(arrival.cached_pages + arrival.pages)
        request.prefix_match = None  # it was looked up before

    # -------------------------------------------------------------------------------------------------------- leaving

    def after_step(self, plan: "StepPlan") -> None:
        """Stores pages that a finished step has computed: they are copied piece by piece, the last while the next step
        runs. They need not be held: the next owner of such a page writes to it after the copy."""
        self._finish_copies()
        new = [each for each in plan.new_cached_pages if self._is_new(*each)] if self.connector.stores else []
        for first in range(0, len(new), self._at_once):
            self._finish_copies()
            pages, digests = zip(*new[first : first + self._at_once], strict=True)
            self._try_copy(partial(self._copy, pages, [self._root + digest for digest in digests]))

    def _is_new(self, page: int, digest: bytes) -> bool:
        """Returns whether the page still has this content, and the connector does not."""
        return self._pool.digest(page) == digest and not self.connector.has(self._root + digest)

    def after_compute(self, scheduler: "Scheduler", running: bool) -> None:
        """Without requests, finishes storing pages. While no step runs, waits a moment for pages of requests."""
        if not (scheduler.running or scheduler.waiting):
            self._finish_copies()
        elif self.num_waiting and not running:
            self.connector.changed.wait(IDLE_WAIT)

    def _finish_copies(self) -> None:
        """Waits for the copies in progress, and hands their pages to the connector, or to the transfer."""
        if self.p2p_transfer is not None:
            self._try_copy(self.p2p_transfer.finish_copy)
        if self._copying is not None:
            (keys, wait), self._copying = self._copying, None
            self._try_copy(partial(self._store, keys, wait), by_all=True)

    def offer_pages(self, request: Request) -> dict[str, Any] | None:
        """Copies the pages of a request that is about to end, if another engine continues its prompt -> the
        kv_transfer_params of its answer."""
        answer: list[dict[str, Any] | None] = [None]
        transfer = self.p2p_transfer
        if transfer is not None:
            self._try_copy(lambda: answer.__setitem__(0, transfer.offer_pages(request)))
        return answer[0]

    def _copy(self, pages: Sequence[int], keys: list[bytes]) -> None:
        self._copying = keys, self.page_copier.read(pages)

    def _store(self, keys: list[bytes], wait: Callable[[], PageRows]) -> None:
        rows = wait()
        with DeferredSigint():
            self.connector.store(keys, rows)
        self._num_stored += len(keys)

    def _try_copy(self, copy: Callable[[], None], by_all: bool = False) -> bool:
        """Runs a copy, and returns whether it succeeded. A failed copy fails no request; a device error does, and so
        does a copy that all ranks make: the others would know of pages that this one does not have."""
        try:
            copy()
        except (CacheLost, DeviceLost):
            raise
        except Exception as error:
            if by_all and self.rank_agreement is not None:
                raise DeviceLost(f"pages were not copied on one of several ranks: {error}") from error
            logger.exception("pages were not copied")
            return False
        return True

    # --------------------------------------------------------------------------------------------------- starting over

    def start_over(self) -> None:
        """Drops all loads and copies after the pool was reset: no page is held, and arriving pages are discarded."""
        for arrival in self._pending.values():
            arrival.load.cancel()
        for lookup, _ in self._lookups.values():
            lookup.cancel()
        for each in (self._pending, self._lookups, self._queued, self._found):
            each.clear()
        if self.rank_agreement is not None:
            self.rank_agreement.drop()
        self._copying = None
        if self.p2p_transfer is not None:
            self.p2p_transfer.drop_copy()

    def reset_prefix_cache(self) -> None:
        """Changes the root of all keys: pages stored before are not found any more, and a later start does not find
        pages stored from now on, which may have other weights."""
        for request in [*self._pending, *self._lookups, *self._found]:
            self.cancel_request(request)
        if self.rank_agreement is not None:
            self.rank_agreement.drop()
        self._copying = None
        self._root = _key_prefix_of(self._fingerprint, os.urandom(16))
        with DeferredSigint():
            self.connector.clear()

    def reload_weights(self, weights: WeightFiles | Path | None) -> None:
        """Passes changed weights to the transfer: to other engines this is another checkpoint now."""
        if self.p2p_transfer is not None:
            self.p2p_transfer.update_weights(WeightFiles(weights) if isinstance(weights, Path) else weights)

    def close(self) -> None:
        self._close()


def _close_all(connector: KVConnector, transfer: P2PTransfer) -> None:
    connector.close()
    transfer.close()


def _key_prefix_of(identity: bytes, epoch: bytes) -> bytes:
    """Returns the prefix of every page's key."""
    return hashlib.blake2b(identity + epoch, digest_size=16, person=b"quintet-pages").digest()
