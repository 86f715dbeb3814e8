"""Pages of an encoder's rows: each request reads its own media's, whatever was taken, dropped or forgotten before."""

import random

import pytest

from quintet.engine.encoder.cache import EncoderCache
from quintet.engine.kv_cache.page_pool import PagePool
from quintet.engine.request import CoreRequest, Request
from quintet.engine.row_store.items import RowWrite
from quintet.media.items import AUDIO, MediaItem
from quintet.sampling_params import SamplingParams

PAGE, ROWS, GROUP = 4, 10, 1
PAGES = 3  # of an item


def request(media: int, order: int = 0) -> Request:
    item = MediaItem(AUDIO, media.to_bytes(16, "little"))
    facts = CoreRequest(str(order), [1], SamplingParams(), (0, 0), 1, salt=item.digest, encoder=item)
    return Request(facts, order)


def run(writes: dict[bytes, RowWrite], content: dict[int, bytes]) -> None:
    """The passes of a step."""
    for write in writes.values():
        for slot in write.places.tolist():
            content[slot] = write.item.key
    writes.clear()


def slots_of(held: Request) -> list[int]:
    assert held.encoded is not None
    return [page * PAGE + at for page in held.encoded.pages for at in range(PAGE)][:ROWS]


@pytest.mark.parametrize("seed", range(20))
def test_each_request_reads_its_own_media(seed: int) -> None:
    """Others take pages of the same pool; steps are dropped before they run, and the cache is forgotten."""
    drawn, content = random.Random(seed), dict[int, bytes]()
    pool = PagePool(5 * PAGES + 2)
    cache = EncoderCache(pool, GROUP, ROWS, PAGE)
    running: list[Request] = []
    others: list[list[int]] = []
    writes: dict[bytes, RowWrite] = {}
    for turn in range(300):
        writes = {}
        cache.begin_plan(writes)
        for _ in range(drawn.randrange(3)):
            new = request(drawn.randrange(4), turn)
            free, need = pool.num_free, cache.needed_pages(new)
            if need <= free:
                cache.hold(new)
                assert free - pool.num_free == need and cache.needed_pages(new) == 0
                running.append(new)
        for held in [each for each in running if drawn.random() < 0.3]:  # ends, or is dropped from this plan
            cache.release(held)
            running.remove(held)
        if drawn.random() < 0.3 and pool.num_free > 1:
            others.append(pool.allocate(drawn.randrange(1, pool.num_free)))
        if others and drawn.random() < 0.5:
            pool.release(others.pop())
        if drawn.random() < 0.05:
            pool.reset_cache()
        if drawn.random() < 0.8:  # the step is started
            run(writes, content)
            for held in running:
                assert held.encoded is not None
                assert {content[slot] for slot in slots_of(held)} == {held.encoded.item.key}
        cache.check_integrity(running)
        pool.check_integrity([*cache.held_pages, *others])
    assert cache.num_passes > 4 and cache.num_hits > 4


def test_what_is_kept_is_found_until_its_pages_are_taken() -> None:
    pool = PagePool(1 + 2 * PAGES)
    cache, writes = EncoderCache(pool, GROUP, ROWS, PAGE), dict[bytes, RowWrite]()
    cache.begin_plan(writes)
    first, again, another = request(1), request(1, 1), request(2, 2)
    cache.hold(first)
    cache.hold(again)
    assert len(writes) == 1 and first.encoded is not None and again.encoded is not None
    assert first.encoded.pages == again.encoded.pages and pool.num_used == PAGES
    writes.clear()
    for each in (first, again):
        cache.release(each)
    assert pool.num_used == 0 and cache.needed_pages(first) == PAGES
    cache.hold(first)
    assert not writes, "it was there"
    cache.release(first)
    pool.release(pool.allocate(2 * PAGES - 1))  # one page of it goes
    cache.hold(another)
    cache.hold(first)
    assert len(writes) == 2 and (cache.num_passes, cache.num_hits) == (3, 2)
    cache.clear()
    assert first.encoded is None
