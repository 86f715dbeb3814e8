"""Tokens that are guessed: what is said never depends on them, whatever is asked for; only the number of steps does."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quintet.chat.prompts import Prompt
from quintet.engine.sampling.logits_processors import (
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessor,
    RowFunction,
    apply_batch_update,
)
from quintet.engine.spec_decode import ngram
from quintet.engine.spec_decode.ngram import find_continuation
from quintet.interface.platform import CacheLost
from quintet.interface.types import IntArray
from quintet.sampling_params import SamplingParams
from tests.engine.test_overlap import ENGINES, Ask, Served, again, ahead, plain, traffic
from tests.helpers.platforms.null_engine import CtrlC, drain, greedy, null_client

GUESS: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def test_a_proposal_is_what_followed_the_longest_end_when_it_first_stood_there() -> None:
    """By definition, and vLLM's: the longest first, the first of several, up to `count` tokens."""

    def wanted(ids: list[int], least: int, most: int, count: int) -> list[int]:
        for n in range(min(most, len(ids) - 1), least - 1, -1):
            for start in range(len(ids) - n):
                if ids[start : start + n] == ids[-n:]:
                    return ids[start + n : start + n + count]
        return []

    rng, found = random.Random(0), 0
    for _ in range(3000):
        ids = [rng.randrange(rng.choice([2, 3, 9])) for _ in range(rng.randrange(1, 40))]
        least = rng.randrange(1, 4)
        most, count = rng.randrange(least, 6), rng.randrange(1, 6)
        proposed = find_continuation(np.array(ids, np.int32), least, most, count)
        assert proposed == wanted(ids, least, most, count), (ids, least, most, count)
        found += bool(proposed)
    assert found > 500


def test_no_text_is_searched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the scheduler, which asks whether there are drafts before it adds them."""
    searched = []

    def counted(ids: IntArray, *sizes: int) -> list[int]:
        searched.append(tuple(ids.tolist()))
        return find_continuation(ids, *sizes)

    monkeypatch.setattr(ngram, "find_continuation", counted)
    served = Served(speculative_config=GUESS)
    served.run(*repeating([Ask("a", list(range(12)), plain(20))]))
    assert len(set(searched)) == len(searched) > 5


def repeating(asks: list[Ask]) -> list[Ask]:
    """The same with prompts of few different tokens; every other says few, so that guesses come true now and then."""
    said = []
    for number, ask in enumerate(asks):
        params = ask.params
        if number % 2:
            params = replace(params, allowed_token_ids=[1, 2])
        said.append(replace(ask, prompt=[token % 3 for token in ask.prompt], params=params))
    return said


@pytest.mark.parametrize(
    ("how", "overlap", "static"),
    [*((how, False, False) for how in ENGINES), ("plenty of pages", True, False), ("few pages, chunks", True, True)],
)
def test_random_traffic_says_what_it_says_without_drafts(how: str, overlap: bool, static: bool) -> None:
    ours = Served(overlap, static, **ENGINES[how], speculative_config=GUESS)
    theirs = Served(False, static, **ENGINES[how])
    for seed in range(4):
        asks = repeating(traffic(seed))
        wanted = theirs.run(*asks)
        assert ours.run(*asks) == wanted, f"traffic {seed}"
        assert ours.run(*again(asks, wanted)) == theirs.run(*again(asks, wanted)), f"traffic {seed}, second turn"
    stats = ours.engine.stats()
    assert 0 < stats.spec_decode.num_accepted_tokens < stats.spec_decode.num_draft_tokens
    assert stats.steps.num_generation_tokens == theirs.engine.stats().steps.num_generation_tokens
    assert how != "plenty of pages" or stats.steps.num_steps < theirs.engine.stats().steps.num_steps
    assert not static or ours.work.calls <= ours.warm, "a program of a shape that was not compiled at the start"


def test_prefixes_of_what_was_guessed_right_are_found() -> None:
    """A page that drafts fill is cached once they are known, and never with what was guessed wrong."""
    found = []
    for config in (None, GUESS):
        served = Served(False, speculative_config=config)
        asks = repeating(traffic(3))
        said = served.run(*asks)
        hits = served.engine.stats().scheduler.prefix_hits
        served.run(*again(asks, said))
        found.append(served.engine.stats().scheduler.prefix_hits - hits)
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("where", ["launch", "run", "wait"])
@pytest.mark.parametrize("error", [RuntimeError("on fire"), CacheLost("gone"), KeyboardInterrupt()], ids=str)
def test_what_fails_ends_those_in_it_and_nobody_else_hears_anything_wrong(where: str, error: BaseException) -> None:
    if where == "run" and isinstance(error, KeyboardInterrupt):
        pytest.skip("a device is not interrupted")
    theirs = Served(False)
    for seed in range(3):
        ours, asks = Served(seed % 2 == 0, speculative_config=GUESS), repeating(traffic(seed))
        wanted = theirs.run(*asks)
        ours.work.fails = [(where, step, error) for step in (seed + 1, 5 + seed)]
        for name, said in ours.run(*asks).items():
            if said.reason == "error":
                assert said.tokens == wanted[name].tokens[: len(said.tokens)] and "on fire" in (said.error or ""), name
            else:
                assert said == wanted[name], f"traffic {seed}, {name}"


def test_after_ctrl_c_at_any_line_the_same_is_said() -> None:
    """In the midst of a draw, too: what was counted of drafts is not taken for what was said."""
    params = plain(10, frequency_penalty=0.6, allowed_token_ids=[1, 2, 3], min_tokens=4, temperature=0.8, seed=4)
    served, ask = Served(False, speculative_config=GUESS), Ask("a", [1, 2, 1, 2, 3, 1, 2], params, frozenset([3]))
    wanted = served.run(ask)
    assert served.engine.stats().spec_decode.num_drafts > 0
    for at in range(0, 100_000, 31):
        with CtrlC(at) as ctrl_c:
            served.run(ask)
        if not ctrl_c.came:
            break
        tokens = [token for delta in _rest(served) for token in delta]
        assert wanted["a"].tokens[-len(tokens) :] == tokens if tokens else True, at
        assert served.run(ask) == wanted, at
    assert at > 600


def _rest(served: Served) -> list[list[int]]:
    """What an interrupted engine still says."""
    said = []
    while served.engine.busy:
        said += [delta.token_ids for delta in served.engine.step()]
        served.engine.check_integrity()
    return said


class Cycle(RequestLogitsProcessor):
    """What comes next is settled by the output so far: 5, 5, 6, 5, 5, 6, ..., and by a prompt's first token."""

    def for_request(self, params: SamplingParams) -> RowFunction | None:
        if params.extra_args is None:
            return None

        def function(prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            assert min(output, default=0) >= 0
            if len(output) == params.extra_args["fails"]:
                raise ValueError("no more")
            logits[prompt[0] + (6 if list(output[-2:]) == [prompt[0] + 5] * 2 else 5)] = 99
            return logits

        return function


class Counting(LogitsProcessor):
    """A batch's processor that keeps its own count of every row's tokens by update() alone, as the contract says."""

    def is_argmax_invariant(self) -> bool:
        return False

    def __init__(self, vocab_size: int, device: Any) -> None:
        super().__init__(vocab_size, device)
        self._rows: dict[int, list[Any]] = {}  # row -> [its request's tokens, how many there should be]

    def update(self, update: BatchUpdate | None) -> None:
        for row in self._rows.values():
            row[1] += 1
        if update is not None:
            self._rows = apply_batch_update(self._rows, update, lambda added: [added.token_ids, len(added.token_ids)])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for tokens, count in self._rows.values():
            assert len(tokens) == count
        return logits


@pytest.mark.parametrize(("processors", "fails"), [([Cycle, Counting], -1), ([Cycle], 11)])
def test_logits_processors_see_the_tokens_up_to_each_row(processors: list[type[LogitsProcessor]], fails: int) -> None:
    """A failing one ends its request alone, at the same place."""
    said = []
    for config in (None, GUESS):
        client = null_client(logits_processors=processors, speculative_config=config)
        for name in range(6):
            asked = {"fails": fails if name == 4 else -1} if name % 2 == 0 else None
            params = greedy(max_tokens=9 + name, extra_args=asked, logprobs=name % 3, temperature=[0, 0.7][name % 2])
            client.add(str(name), Prompt([name, 1, 2, 1, 2]), replace(params, seed=name))
        outputs = drain(client)
        said.append({name: vars_of(output) for name, output in outputs.items()})
    assert said[0] == said[1]
    assert said[0]["0"][1] == "length" and said[0]["4"][1] == ("length" if fails < 0 else "error")
    stats = client.engine.stats()
    assert 0 < stats.spec_decode.num_accepted_tokens < stats.spec_decode.num_draft_tokens


def vars_of(output: Any) -> tuple[Any, ...]:
    (one,) = output.outputs
    return list(one.token_ids), one.finish_reason, one.error, one.logprobs


def test_guesses_that_come_true_save_steps() -> None:
    client = null_client(logits_processors=[Cycle], speculative_config={**GUESS, "prompt_lookup_min": 3})
    client.add("a", Prompt([0, 1]), greedy(max_tokens=40, extra_args={"fails": -1}))
    (output,) = drain(client).values()
    assert list(output.outputs[0].token_ids) == [5, 5, 6] * 13 + [5]
    stats = client.engine.stats()
    assert stats.steps.num_steps <= 6 + 36 / 3 and stats.spec_decode.num_accepted_tokens == 40 - stats.steps.num_steps
    accepted = stats.spec_decode.accepted_at
    assert sum(accepted) == stats.spec_decode.num_accepted_tokens
    assert stats.spec_decode.num_drafts >= accepted[0] >= accepted[1] >= accepted[2] > 0
    assert len(accepted) == GUESS["num_speculative_tokens"]


def test_guesses_take_no_page_no_row_and_no_token_from_others() -> None:
    """Five pages of four tokens and no more: two requests that need them all are not preempted for guesses."""
    client = null_client(page_size=4, num_pages=6, max_model_len=12, max_num_seqs=2, speculative_config=GUESS)
    for name in "ab":
        client.add(name, Prompt([1, 1, 1, 1, 1]), greedy(max_tokens=3))
    drain(client)
    stats = client.engine.stats()
    assert stats.scheduler.num_preemptions == 0 and stats.steps.num_steps == 3
    few = null_client(max_num_batched_tokens=4, max_num_seqs=4, speculative_config=GUESS)
    for name in "abcd":
        few.add(name, Prompt([1]), greedy(max_tokens=20, allowed_token_ids=[1]))
    while few.busy:
        few.step()
        assert few.engine.stats().steps.step_tokens <= 4


def test_nobody_says_more_than_was_asked_for() -> None:
    client = null_client(speculative_config=GUESS)
    for most in (1, 2, 3, 7):
        client.add(str(most), Prompt([1, 1, 1]), greedy(max_tokens=most, allowed_token_ids=[1]))
    assert {name: len(each.outputs[0].token_ids) for name, each in drain(client).items()} == {
        str(most): most for most in (1, 2, 3, 7)
    }


def test_in_a_crowd_nothing_is_guessed() -> None:
    client = null_client(speculative_config={**GUESS, "disable_by_batch_size": 2})
    params = greedy(max_tokens=6, allowed_token_ids=[1])
    for name in "abc":
        client.add(name, Prompt([1, 1, 1]), params)
    drain(client)
    assert client.engine.stats().spec_decode.num_drafts == 0
    client.add("a", Prompt([1, 1, 1]), params)
    drain(client)
    assert client.engine.stats().spec_decode.num_drafts > 0


def test_steps_go_ahead_while_nothing_can_be_guessed() -> None:
    """On a device behind the host: only who repeats its text waits for its tokens."""
    served = Served(True, speculative_config={**GUESS, "prompt_lookup_min": 3})
    served.run(Ask("a", list(range(20)), plain(9)))
    assert set(ahead(served.work)[:-1]) == {1} and served.engine.stats().spec_decode.num_drafts == 0
    served.work.begin()
    served.run(Ask("b", [7, 7, 7, 7], plain(9, allowed_token_ids=[7])))
    assert set(ahead(served.work)) == {0} and served.engine.stats().spec_decode.num_accepted_tokens >= 5


def test_places_of_guesses_are_there_before_the_first() -> None:
    """A counter that begins at 0 is one whose first growth Prometheus sees."""
    stats = null_client(speculative_config=GUESS).engine.stats()
    assert stats.spec_decode.accepted_at == (0,) * GUESS["num_speculative_tokens"]
    assert null_client().engine.stats().spec_decode.accepted_at == ()
