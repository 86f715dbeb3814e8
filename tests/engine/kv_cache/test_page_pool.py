"""The page pool: counting, sharing, and finding pages again by the hash chain."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.engine.kv_cache.manager import extend_page_hashes
from quintet.engine.kv_cache.page_pool import PagePool


def chain(tokens: list[int], size: int = 4, salt: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    extend_page_hashes(hashes, tokens, size, salt)
    return hashes


def test_a_chain_covers_full_pages_only_and_depends_on_all_before() -> None:
    assert len(chain([1, 2, 3])) == 0
    assert len(chain([1, 2, 3, 4, 5])) == 1
    first, second = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert first[1] != second[1]


def test_salts_never_meet() -> None:
    assert not set(chain([1] * 16, salt=b"a")) & set(chain([1] * 16, salt=b"b"))


def test_a_chain_that_grows_equals_one_made_at_once() -> None:
    grown: list[bytes] = []
    tokens = list(range(23))
    for end in range(len(tokens) + 1):
        extend_page_hashes(grown, tokens[:end], 4, b"s")
    assert grown == chain(tokens, salt=b"s")


def test_a_released_page_is_found_until_it_is_taken() -> None:
    pool, hashes = PagePool(4), chain([1, 2, 3, 4])
    (page,) = pool.allocate(1)
    assert pool.commit(page, hashes[0])
    pool.release([page])
    assert [pool.page(digest) for digest in hashes] == [page] and pool.num_free == 3
    pool.retain([page])
    assert pool.num_free == 2
    pool.release([page])
    pool.allocate(3)
    assert not any(pool.has(digest) for digest in hashes)


def test_pages_with_nothing_to_lose_are_taken_first() -> None:
    pool = PagePool(4)
    cached, plain = pool.allocate(2)
    pool.commit(cached, b"x")
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate(1) == [plain]
    pool.allocate(1)
    assert [pool.page(digest) for digest in [b"x"]] == [cached]


def test_of_two_pages_for_the_same_tokens_the_first_stands() -> None:
    pool = PagePool(4)
    first, second = pool.allocate(2)
    assert pool.commit(first, b"x") and not pool.commit(second, b"x")
    assert [pool.page(digest) for digest in [b"x"]] == [first]
    pool.check_integrity([[first], [second]])


def test_page_0_is_never_given_out() -> None:
    pool = PagePool(3)
    assert 0 not in pool.allocate(2)
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(1)


def test_integrity_notices_a_lost_page() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="other holders"):
        pool.check_integrity([pages[:1]])


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("take release share commit reset".split()), st.integers(0, 9)), max_size=60))
def test_the_books_balance_after_any_sequence(moves: list[tuple[str, int]]) -> None:
    pool, held = PagePool(8), []
    for step, (move, n) in enumerate(moves):
        if move == "take" and pool.num_free >= n % 4:
            held.append(pool.allocate(n % 4))
        elif move == "release" and held:
            pool.release(held.pop(n % len(held)))
        elif move == "commit" and held and held[n % len(held)]:
            pool.commit(held[n % len(held)][0], bytes([step]))
        elif move == "share":
            found = [pool.page(bytes([n]))] if pool.has(bytes([n])) else []
            pool.retain(found)
            held.append(found)
        elif move == "reset":
            pool.reset_cache()
        pool.check_integrity(held)
    for pages in held:
        pool.release(pages)
    pool.check_integrity([])
    assert pool.num_free == 7
