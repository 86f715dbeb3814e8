"""Pages between engines that share a model out differently: every process finds each of its heads, once, somewhere."""

import random
import socket
import threading
from typing import Any

import numpy as np
import pytest

from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.head_slices import PageGrid, SliceSpec, heads_of, producer_shares, row_offsets
from quintet.engine.kv_transfer.p2p import remote_memory as memory
from quintet.engine.kv_transfer.p2p.consumer import PageClient, PageOrigin, Route
from quintet.engine.kv_transfer.p2p.producer import PageServer
from quintet.engine.kv_transfer.p2p.protocol import PageFormat, PagePart, PageRequest, PeerChannel, ProtocolError
from quintet.engine.kv_transfer.p2p.rdma import ExposedRegion, ReceiveBufferPool, RemoteReads
from quintet.engine.kv_transfer.p2p.send_buffer import NOT_IN_BUFFER, SendBuffer
from quintet.engine.kv_transfer.rank_shares import parts_of
from quintet.engine.kv_transfer_params import LeasePeer
from tests.engine.kv_transfer.test_transfers import FACTS, KEY, _until
from tests.helpers.servers.mover import Copying

PAGES = 5
SIZES = [(1, 1), (1, 2), (1, 4), (2, 2), (3, 3), (4, 4), (2, 4), (6, 6)]  # processes, and ranks of them all


def grid(rng: random.Random) -> PageGrid:
    """Layers of pages; most models have one kind of them."""
    kinds = [SliceSpec(rng.choice([1, 2]), rng.choice([1, 2, 3, 4, 8]), rng.choice([4, 12, 36, 100])) for _ in range(2)]
    return tuple(rng.choice(kinds) for _ in range(rng.randint(1, 4)))


def rows(grid: PageGrid, part: PagePart) -> PageRows:
    """Of all pages: a number for each head's numbers, wherever it lies."""
    pieces, words = row_offsets(grid, part)
    found = np.zeros((PAGES, words), np.int32)
    for page in range(PAGES):
        for piece, places in pieces.items():
            nbytes = grid[piece[0]].nbytes
            content = random.Random(repr((page, piece))).randbytes(nbytes)
            for place in places:
                found[page].view(np.uint8)[place : place + nbytes] = np.frombuffer(content, np.uint8)
    return found


class Givers:
    """The processes of an engine that has lent a prompt, each with a thread for whoever connects."""

    def __init__(self, grid: PageGrid, parts: tuple[PagePart, ...], way: str) -> None:
        self.way, self.mover, self.gone = way, Copying(), set[int]()
        self.loans, self.givers = [], []
        for part in parts:
            each, (_, words) = rows(grid, part), row_offsets(grid, part)
            loans = SendBuffer(4 * words * PAGES, words, 60.0, way == "mapped")
            assert loans.reserve("loan", KEYS)
            loans.fill("loan", KEYS, each)
            giver = PageServer(loans, lambda part=part: facts(part), KEY, 5.0)  # type: ignore[misc]
            giver.transport = way
            if way == "mapped":
                giver.share_memory = lambda channel, loans=loans: memory.send_memory(channel, loans.descriptor)  # type: ignore[misc]
            elif way:
                giver.share_memory = ExposedRegion(self.mover, loans.rows)
            self.loans.append(loans)
            self.givers.append(giver)

    def connect(self, address: Any) -> PeerChannel:
        if address.port in self.gone:
            raise ProtocolError("the peer does not answer")
        ours, theirs = socket.socketpair()
        threading.Thread(target=self.givers[address.port].serve, args=(theirs, "a test"), daemon=True).start()
        return PeerChannel(ours, 5.0, 10**6)

    def opening(self) -> Any:
        if self.way == "mapped":
            return memory.MappedRegion
        stagings = ReceiveBufferPool(self.mover)
        return (lambda channel, words: RemoteReads(channel, words, self.mover, stagings, 5.0)) if self.way else None

    def taken(self, words: int, sources: list[PageOrigin]) -> PageRows:
        taker = PageClient(
            Route(self.connect, lambda: facts(PagePart()), KEY, words, self.opening(), self.way), threading.Event()
        )
        load, found = taker.load(sources, KEYS, True), np.zeros((PAGES, words), np.int32)
        left = set(range(PAGES))
        while left:
            came = load.take(2)
            assert not came.failed
            for place, row in zip(came.indices, came.rows, strict=True):
                found[place] = row
                left.remove(place)
        taker.close()
        return found


def sources(grid: PageGrid, givers: tuple[PagePart, ...], takers: tuple[PagePart, ...], taker: int) -> list[PageOrigin]:
    """Whom one asks; a port is a giver's number."""
    found = producer_shares(grid, givers, takers, taker)
    return [PageOrigin(LeasePeer("here", each.producer, "loan"), givers[each.producer], each) for each in found]


KEYS = [bytes([page]) for page in range(PAGES)]


def facts(part: PagePart) -> PageFormat:
    return PageFormat(FACTS.checkpoint, FACTS.dtype, FACTS.page_size, FACTS.shapes, part)


@pytest.mark.parametrize("way", ["", "mapped", "fetched"])
@pytest.mark.parametrize("seed", range(8))
def test_each_process_gets_what_it_would_have_computed_and_nothing_waits_on(seed: int, way: str) -> None:
    rng = random.Random(seed)
    kinds, (givers, of), (takers, to) = grid(rng), rng.choice(SIZES), rng.choice(SIZES)
    here, there = parts_of(takers, to, (0, 0)), parts_of(givers, of, (0, 0))
    lent = Givers(kinds, there, way)
    for at, part in enumerate(here):
        assert any(loans.num_free < loans.capacity for loans in lent.loans), "not all have read"
        assert np.array_equal(
            lent.taken(row_offsets(kinds, part)[1], sources(kinds, there, here, at)), rows(kinds, part)
        )
    for loans in lent.loans:
        _until(lambda loans=loans: loans.num_free == loans.capacity)  # type: ignore[misc]


def test_equal_engines_give_whole_rows_and_replicated_heads_are_read_where_few_read() -> None:
    pages: PageGrid = (SliceSpec(2, 2, 8),) * 3
    four, two, one = (parts_of(each, each, (0, 0)) for each in (4, 2, 1))
    assert [producer_shares(pages, two, two, at) for at in range(2)] == [[(0, None, 1, 0)], [(1, None, 1, 0)]]
    assert [[each.producer for each in producer_shares(pages, two, four, at)] for at in range(4)] == [
        [0],
        [0],
        [1],
        [1],
    ]
    (first,) = producer_shares(pages, one, two, 1)
    assert first.readers == 2 and first.head_slice is not None
    assert first.head_slice.source_ranges == ((8, 8), (24, 8), (72, 8), (88, 8), (136, 8), (152, 8)), (
        "head 1 of K and V, three layers"
    )
    reads = {each.producer: each.head_slice for each in producer_shares(pages, four, one, 0)}
    assert (
        sorted(reads) == [0, 1, 2, 3] and sum(bool(cut.source_ranges) for cut in reads.values() if cut is not None) == 2
    )


def test_whom_to_ask_is_known_at_once_whatever_a_request_says_of_the_other_engine() -> None:
    """It names up to 256 ranks, and steps wait meanwhile."""
    pages = (SliceSpec(2, 8, 8),) * 80
    heads_of.cache_clear()
    made = heads_of.cache_info().misses
    for count in (255, 256):
        producer_shares(pages, parts_of(count, count, (0, 0)), parts_of(4, 4, (0, 0)), 3)
    assert heads_of.cache_info().misses - made <= 255 + 256 + 4, "each rank's heads are computed once"


def test_a_page_that_one_giver_lacks_fails_whole() -> None:
    pages: PageGrid = (SliceSpec(2, 2, 8),)
    two, one = parts_of(2, 2, (0, 0)), parts_of(1, 1, (0, 0))
    lent = Givers(pages, two, "")
    lent.loans[0]._loans["loan"].rows.pop(KEYS[2])
    taker = PageClient(
        Route(lent.connect, lambda: facts(PagePart()), KEY, row_offsets(pages, one[0])[1]), threading.Event()
    )
    load = taker.load(sources(pages, two, one, 0), KEYS, True)
    found, failed = dict[int, PageRows](), dict[int, str]()
    while not load.done:
        came = load.take(9)
        found |= dict(zip(came.indices, came.rows, strict=True))
        failed |= came.failed
    taker.close()
    assert sorted(found) == [0, 1, 3, 4] and failed == {2: f"here:0: {NOT_IN_BUFFER}"}
    assert all(np.array_equal(row, rows(pages, one[0])[place]) for place, row in found.items())


def test_a_load_that_waits_for_room_ends_with_its_engine() -> None:
    pages: PageGrid = (SliceSpec(2, 2, 8),)
    lent, both = Givers(pages, parts_of(2, 2, (0, 0)), ""), parts_of(1, 1, (0, 0))
    taker = PageClient(
        Route(lent.connect, lambda: facts(PagePart()), KEY, row_offsets(pages, both[0])[1]), threading.Event()
    )
    load = taker.load(sources(pages, parts_of(2, 2, (0, 0)), both, 0), KEYS, True)
    _until(lambda: len(load._came) == PAGES)  # and nobody takes them, so that it cannot say that it is done
    taker.close()
    for thread in taker._threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_giver_that_has_nothing_that_is_wanted_may_be_gone() -> None:
    pages: PageGrid = (SliceSpec(2, 2, 8),)
    four, one = parts_of(4, 4, (0, 0)), parts_of(1, 1, (0, 0))
    lent, asked = Givers(pages, four, ""), sources(pages, four, one, 0)
    first, second = (each.address for each in asked if not each.has_data)
    lent.gone.add(first.port)  # type: ignore[attr-defined]
    assert np.array_equal(lent.taken(row_offsets(pages, one[0])[1], asked), rows(pages, one[0]))
    for at, loans in enumerate(lent.loans):
        if at != first.port:  # type: ignore[attr-defined]
            _until(lambda loans=loans: loans.num_free == loans.capacity)  # type: ignore[misc]
    assert first != second and len(lent.loans[first.port]) == 1, "its lease ends"  # type: ignore[attr-defined]


def test_a_giver_refuses_who_came_for_another_part_and_parts_that_no_row_has() -> None:
    lent = Givers((SliceSpec(2, 2, 8),), parts_of(2, 2, (0, 0)), "")
    with pytest.raises(
        ProtocolError, match=r"another part of pages is given \(rank 1 of 2\) than wanted \(rank 0 of 2\)"
    ):
        lent.connect(LeasePeer("here", 1, "loan")).connect_producer(KEY, facts(PagePart(0, 1, 2)))
    for parts in ([(0, 65)], [(60, 8)], [(0, 40), (0, 40)]):
        channel = lent.connect(LeasePeer("here", 1, "loan"))
        channel.connect_producer(KEY, facts(PagePart(1, 1, 2)))
        channel.send(PageRequest("loan", KEYS, parts))
        with pytest.raises(ProtocolError, match="closed"):
            channel.receive(_NOTHING)


_NOTHING: Any = None
