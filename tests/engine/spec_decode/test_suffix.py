"""Suffix decoding: the index against a search of all texts, the extension against Python, tenants, bounds, outputs."""

import random
from collections import Counter
from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from quintet.chat.prompts import Prompt
from quintet.config import SpeculativeConfig
from quintet.engine.spec_decode import suffix, suffix_index
from quintet.engine.spec_decode.suffix import PastOutputs, SuffixProposer
from quintet.engine.spec_decode.suffix_index import (
    Draft,
    NativeSuffixIndex,
    PythonSuffixIndex,
    SuffixIndex,
    make_suffix_index,
)  # fmt: skip
from quintet.interface.types import IntArray
from tests.engine.spec_decode.test_ngram import repeating
from tests.engine.test_overlap import ENGINES, Served, again, traffic
from tests.helpers.platforms.null_engine import drain, greedy, null_client

SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 4, "adapt_num_tokens": False}
HOW = (8, 1.5, 0.2, 12)  # most, factor, share, depth


def ids_of(tokens: list[int]) -> IntArray:
    return np.array(tokens, np.int32)


def indexes(capacity: int) -> list[SuffixIndex]:
    pytest.importorskip("quintet._cpu")
    return [PythonSuffixIndex(capacity), NativeSuffixIndex(capacity)]


def searched(texts: list[list[int]], query: list[int]) -> Draft:
    """What the docstring of lookup() says, of all places in all texts: there must be few."""
    most, factor, share, depth = HOW
    query = query[-(depth - 1) :]
    places = [(number, end) for number, text in enumerate(texts) for end in range(len(text))]
    lengths: dict[tuple[int, int], int] = {}
    for number, end in places:
        pairs = zip(reversed(texts[number][: end + 1]), reversed(query), strict=False)
        lengths[number, end] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    best: Draft = [], 0.0, 0
    for length in range(max(lengths.values()), 0, -1):
        level = sorted((place for place, n in lengths.items() if n >= length), reverse=True)
        # the newest first, of those that share the last 5 tokens before the others, and of the last 2 of these
        level.sort(key=lambda place: (lengths[place] < 5, lengths[place] < 2))
        tails = [texts[number][end + 1 :] for number, end in level]
        draft, score, probability = list[int](), 0.0, 1.0
        while len(draft) < min(most, int(length * factor + 1e-6), depth - length):
            counts = Counter(tail[len(draft)] for tail in tails if len(tail) > len(draft))
            if not counts:
                break
            (token, count) = counts.most_common(1)[0]
            probability *= count / len(tails)
            if probability < share:
                break
            draft.append(token)
            score += probability
            tails = [tail for tail in tails if tail[: len(draft)] == draft]
        if score > best[1]:
            best = draft, score, min(n for n in lengths.values() if n >= length)
    return best


def test_a_draft_is_that_of_a_search_of_all_texts() -> None:
    rng, found = random.Random(0), 0
    for _ in range(150):
        both = indexes(600)
        texts = [[rng.randrange(12) for _ in range(rng.randrange(1, 30))] for _ in range(rng.randrange(1, 6))]
        for text in texts:
            for index in both:
                index.append(ids_of(text), 3, ends=True)
        for _ in range(6):
            query = [rng.randrange(12) for _ in range(rng.randrange(2))] + rng.choice(texts)[: rng.randrange(1, 30)]
            wanted = searched(texts, query)
            for index in both:
                assert index.lookup(ids_of(query), 3, *HOW) == wanted, (texts, query)
            found += len(wanted[0])
    assert found > 1000


def test_the_extension_gives_what_python_gives() -> None:
    """With texts of several owners, open and ended ones, rings that are overwritten, and texts that are forgotten."""
    rng, found = random.Random(1), 0
    for capacity in (16, 50, 333):
        both = indexes(capacity)
        text: list[int] = []
        for _ in range(400):
            new = [rng.randrange(4) for _ in range(rng.choice([0, 1, 3, 40]))]
            owner, ends = rng.randrange(3), rng.random() < 0.4
            text = (text + new)[-40:]
            for index in both:
                index.append(ids_of(new), owner, ends)
            if rng.random() < 0.05:
                for index in both:
                    index.forget_before(index.position - 20)
            factor, share = rng.choice([0.0, 0.7, 1.0, 3.0, 1e300]), rng.choice([0.0, 0.3, 1.0])
            how = rng.randrange(9), factor, share, rng.randrange(2, 30)
            ours, theirs = (index.lookup(ids_of(text), owner, *how) for index in both)
            assert ours == theirs
            found += len(ours[0])
            assert both[0].position == both[1].position and both[0].num_bytes == both[1].num_bytes
    assert found > 500


@pytest.mark.parametrize("kind", [PythonSuffixIndex, NativeSuffixIndex])
def test_what_cannot_be_is_refused(kind: Any) -> None:
    pytest.importorskip("quintet._cpu")
    for capacity in (15, 2**28 + 1, -1):
        with pytest.raises(ValueError, match="capacity must be 16 to"):
            kind(capacity)
    with pytest.raises(ValueError, match="token ids must be 0 or more"):
        kind(20).append(ids_of([3, -1]), 0, True)


def test_without_the_extension_python_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(capacity: int) -> Any:
        raise ImportError("no _cpu")

    monkeypatch.setattr(suffix_index, "NativeSuffixIndex", missing)
    assert isinstance(make_suffix_index(20), PythonSuffixIndex)


def test_texts_of_one_tenant_are_never_found_by_another() -> None:
    past, text = PastOutputs(100, 1000), ids_of([1, 2, 3, 4, 5, 6, 7])
    past.add(b"a", text)
    assert past.lookup(b"a", text[:4], *HOW)[0] == [5, 6, 7]
    assert past.lookup(b"b", text[:4], *HOW)[0] == past.lookup(b"", text[:4], *HOW)[0] == []
    past.add(b"b", ids_of([1, 2, 3, 4, 9, 9]))
    assert past.lookup(b"b", text[:4], *HOW)[0] == [9, 9]
    assert past.lookup(b"a", text[:4], *HOW)[0] == [5, 6, 7]


def test_past_outputs_are_bounded_by_requests_and_tokens() -> None:
    """The oldest go first, and with the last one of a tenant what is known of it."""
    past = PastOutputs(3, 1000)
    for number in range(5):
        past.add(bytes([number]), ids_of([10 * number, 1, 2, 3]))
    assert [bool(past.lookup(bytes([n]), ids_of([10 * n, 1]), *HOW)[0]) for n in range(5)] == [False] * 2 + [True] * 3
    assert len(past._tenants) == 3
    few = PastOutputs(100, 40)
    for number in range(30):
        few.add(bytes([number % 7]), ids_of([number, number + 1] * 4))
    assert len(few._texts) == 5 and len(few._tenants) == 5 and few.num_bytes < 2000
    few.add(b"long", ids_of(list(range(90))))
    assert few.lookup(b"long", ids_of([80, 81]), *HOW)[0] == [82, 83, 84]
    assert few.lookup(b"long", ids_of([60, 61]), *HOW)[0] == []


def test_an_index_without_positions_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_POSITION", 100)
    past = PastOutputs(1000, 50)
    for number in range(30):
        past.add(b"", ids_of([number, 40, 41, 42]))
        assert past.lookup(b"", ids_of([number, 40]), *HOW)[0] == [41, 42]
    assert past._index.position < 100


@pytest.mark.parametrize(
    ("how", "overlap", "static"),
    [("few pages", False, False), ("plenty of pages", True, False), ("few pages, chunks", True, True)],
)
def test_random_traffic_gives_what_it_gives_without_drafts(how: str, overlap: bool, static: bool) -> None:
    ours = Served(overlap, static, **ENGINES[how], speculative_config=SUFFIX)
    theirs = Served(False, static, **ENGINES[how])
    for seed in range(2):
        asks = repeating(traffic(seed))
        wanted = theirs.run(*asks)
        assert ours.run(*asks) == wanted, f"traffic {seed}"
        assert ours.run(*again(asks, wanted)) == theirs.run(*again(asks, wanted)), f"traffic {seed}, second turn"
    stats = ours.engine.stats()
    assert 0 < stats.spec_decode.num_accepted_tokens < stats.spec_decode.num_draft_tokens
    assert stats.spec_decode.num_disabled == 0
    assert not static or ours.work.calls <= ours.warm, "a program of a shape that was not compiled at the start"


def test_a_second_request_is_drafted_from_the_first() -> None:
    client = null_client(speculative_config=SUFFIX)
    steps = []
    for name in "ab":
        before = client.engine.stats().steps.num_steps
        client.add(name, Prompt([3, 1, 4, 1, 5]), greedy(max_tokens=30))
        drain(client)
        steps.append(client.engine.stats().steps.num_steps - before)
    assert steps[1] < steps[0] / 2


def test_a_long_text_is_indexed_as_it_grows() -> None:
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=0)
    proposer = SuffixProposer(config)
    assert proposer.past is None and proposer.num_drafts == config.suffix_decoding_max_tree_depth == 24
    text = suffix.OwnText()
    ids = ids_of([*range(2000), 7, 8, 9])
    for size in (3, 400, 1500, 2003):
        text.append_to(ids[:size])
        assert text.index.position == size
    assert text.index.lookup(ids, 0, *HOW)[0] == [10, 11, 12, 13] and text.capacity == 2048
