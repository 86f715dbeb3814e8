"""Engine side of page transfers: the pages that a request's prompt leaves for another engine, or takes from one.

Engines name a page differently than the prefix cache here: by the hash of its tokens and the cache's salt alone. A hash
in the prefix cache also depends on the last reset of the cache.
"""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from quintet.engine.kv_cache.manager import HASH_BYTES, KVCacheManager, extend_page_hashes, group_hash
from quintet.engine.kv_cache.page_pool import NULL_PAGE
from quintet.engine.kv_transfer.connector import Load, LoadedPages, PageRows
from quintet.engine.kv_transfer.multi_source import PageSource
from quintet.engine.kv_transfer.p2p.consumer import PageOrigin
from quintet.engine.kv_transfer.p2p.send_buffer import SendBuffer
from quintet.engine.kv_transfer.rank_agreement import RankAgreement
from quintet.engine.kv_transfer_params import LeasePeer, TransferParams, response_params
from quintet.engine.observability.stats import PageTransferStats
from quintet.engine.request import Request

logger = logging.getLogger(__name__)

OWNER_LENGTH = 64  # bytes at the beginning of a salt: its owner at a server with several keys

ReadPages = Callable[[Sequence[int]], Callable[[], PageRows]]


class PageConsumer(Protocol):
    """Interface of a Taker (consumer), for the engine."""

    def load(self, sources: Sequence[PageOrigin], keys: Sequence[bytes], ends: bool, caller: bytes) -> Load: ...

    def counts(self) -> Mapping[str, float]: ...


class PageProducer(Protocol):
    """Interface of a Giver (producer), for the engine."""

    def counts(self) -> Mapping[str, int]: ...

    def close(self) -> None: ...


class Outgoing(NamedTuple):
    """Pages that are being copied to a loan."""

    lease: str
    keys: list[bytes]
    wait: Callable[[], PageRows]


class FailedLoad(Load):
    """Load of pages that all fail, for one reason."""

    def __init__(self, count: int, why: str) -> None:
        self._failed = dict.fromkeys(range(count), why)

    @property
    def done(self) -> bool:
        return not self._failed

    def take(self, most: int) -> LoadedPages:
        failed, self._failed = self._failed, {}
        return LoadedPages([], np.zeros((0, 0), np.int32), failed)

    def cancel(self) -> None:
        self._failed = {}


class P2PTransfer:
    """Page transfers of one engine; only its thread calls this."""

    def __init__(self, tables: KVCacheManager, read: ReadPages, at_once: int) -> None:
        """read: starts to copy pages, as Copies.read does. at_once: pages that are copied in one piece."""
        self._tables, self._read, self._at_once = tables, read, at_once
        self.consumer: PageConsumer | None = None  # None: this engine receives no pages
        self.send_buffer: SendBuffer | None = None  # None: it sends none
        self.producer: PageProducer | None = None  # the producer that sends them
        self.engine, self.host, self.port = "", "", 0  # as others know it
        self.ports: tuple[int, ...] = ()  # of each rank, where they are processes
        self.hosts: tuple[str, ...] = ()  # of each rank, where they are on several machines
        self.stage_size = self.stages = 1  # ranks that share each layer, and stages that share the layers
        self.rank_agreement: RankAgreement | None = None  # of these
        self.origins: Callable[[LeasePeer], list[PageOrigin]] = lambda peer: [
            PageOrigin(peer)
        ]  # ValueError: no process has the part
        self.make_lease_name: Callable[[], str] = lambda: secrets.token_hex(16)  # the same on every rank
        self._copying: Outgoing | None = None
        self.close: Callable[[], None] = lambda: None
        self.update_weights: Callable[[Any], None] = lambda weights: None  # called when the weights have changed
        self.num_leases = self.num_full = 0  # prompts with pages that wait or waited, and those that found no room

    def stats(self) -> PageTransferStats:
        """Returns the counters."""
        taken = {} if self.consumer is None else self.consumer.counts()
        given = {} if self.producer is None else self.producer.counts()
        return PageTransferStats(
            pages_taken=int(taken.get("pages", 0)),
            bytes_taken=int(taken.get("bytes", 0)),
            seconds_taken=taken.get("seconds", 0.0),
            pages_given=given.get("pages", 0),
            bytes_given=given.get("bytes", 0),
            peers_refused=given.get("refused", 0),
            loans_refused=self.num_full,
        )

    # ---------------------------------------------------------------------------------------------------------- taking

    def page_source(self, request: Request) -> PageSource | None:
        """Returns the source of the request's pages, at the engine that has begun it; None: it has none, or has asked
        it already."""
        handoff, taker = request.transfer_params, self.consumer
        if handoff is None or handoff.peer is None or handoff.requested or taker is None:
            return None
        peer, names = handoff.peer, self._names(request, handoff)

        def load(digests: Sequence[bytes]) -> Load:
            handoff.requested = True
            keys = [names[digest[:HASH_BYTES]] + digest[HASH_BYTES:] for digest in digests]
            try:
                caller = request.core_request.salt[:OWNER_LENGTH]
                load = taker.load(self.origins(peer), keys, request.params.n == 1, caller)
            except ValueError as error:
                return FailedLoad(len(keys), str(error))
            return load if self.rank_agreement is None else self.rank_agreement.agreed_load(load, len(keys))

        return PageSource(lambda digest: digest[:HASH_BYTES] in names, load)

    def _names(self, request: Request, handoff: TransferParams) -> dict[bytes, bytes]:
        """Returns the names that the peer has for the pages that it holds, by their hashes here."""
        assert handoff.peer is not None
        if handoff.generation != self._tables.generation or not handoff.peer_names:
            chain, held = self._chain(request, handoff), handoff.peer.tokens
            count = len(chain) if held is None else held // self._tables.page_size
            ours = self._tables.prefix_hashes(request)
            handoff.peer_names = dict(zip(ours[:count], chain[:count], strict=False))
            handoff.generation = self._tables.generation
        return handoff.peer_names

    def _chain(self, request: Request, handoff: TransferParams) -> list[bytes]:
        """Returns the names among engines of the full pages of its prompt."""
        admitted = request.core_request
        if not handoff.peer_hashes:
            size = self._tables.page_size
            extend_page_hashes(
                handoff.peer_hashes, admitted.prompt_ids, size, b"prompt" + admitted.salt, admitted.beside_tokens
            )
        return handoff.peer_hashes

    # ---------------------------------------------------------------------------------------------------------- giving

    def offer_pages(self, request: Request) -> dict[str, Any] | None:
        """Copies the prompt pages of a request that is about to end, and holds them still, for the engine that
        continues it -> the kv_transfer_params of its answer."""
        handoff, loans = request.transfer_params, self.send_buffer
        if handoff is None or not handoff.offers_pages or loans is None or request.num_computed < request.num_prompt:
            return None
        pages, keys = self._prompt(request, handoff)
        if not pages:
            return None
        loan = self.make_lease_name()
        if not loans.reserve(loan, keys):
            self.num_full += 1
            logger.warning(
                "%d pages of a prompt do not fit: kv_buffer_size has room for %d; raise it", len(pages), loans.num_free
            )
            return None
        self.num_leases += 1
        for first in range(0, len(pages), self._at_once):
            self.finish_copy()
            try:
                wait = self._read(pages[first : first + self._at_once])
            except BaseException:
                loans.fail(loan, "it could not be copied")
                raise
            self._copying = Outgoing(loan, keys[first : first + self._at_once], wait)
        tokens = request.num_prompt // self._tables.page_size * self._tables.page_size
        there = LeasePeer(self.host, self.port, loan, tokens, self.ports, self.stage_size, self.stages, self.hosts)
        return response_params(self.engine, there)

    def _prompt(self, request: Request, handoff: TransferParams) -> tuple[list[int], list[bytes]]:
        """Returns the full pages of its prompt that the token after them sees, in every group, and their names."""
        size, chain = self._tables.page_size, self._chain(request, handoff)
        whole = (request.num_prompt - 1) // size * size  # another engine computes the last token at least
        pages, keys = [], []
        for index, (kept, held) in enumerate(zip(self._tables.groups, request.pages, strict=True)):
            for at in range(kept.first_visible(whole) // size, len(chain)):
                if held[at] != NULL_PAGE:
                    pages.append(held[at])
                    keys.append(group_hash(chain[at], index))
        return pages, keys

    def finish_copy(self) -> None:
        """Waits for the copy in progress, and puts its pages into the loan."""
        if self._copying is None or self.send_buffer is None:
            return
        copying, self._copying = self._copying, None
        try:
            rows = copying.wait()
        except BaseException:
            self.send_buffer.fail(copying.lease, "it could not be copied")
            raise
        self.send_buffer.fill(copying.lease, copying.keys, rows)

    def drop_copy(self) -> None:
        """Marks the loan that is being copied as failed."""
        if self._copying is not None and self.send_buffer is not None:
            self.send_buffer.fail(self._copying.lease, "the engine began again while it was copied")
        self._copying = None
