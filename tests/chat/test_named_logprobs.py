"""logprob_token_ids: log-probabilities of the tokens that a request names, beside any other's likeliest."""

import random
from typing import Any

import pytest

from quintet.chat.prompts import Prompt
from quintet.outputs import RequestOutput
from quintet.sampling_params import ParameterError, SamplingParams
from tests.engine.spec_decode.test_ngram import GUESS, Counting
from tests.helpers.platforms.null_engine import VOCAB, complete, drain, greedy, null_client

MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


def values(output: RequestOutput) -> list[dict[int, float]]:
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return [{token: each.logprob for token, each in at.items()} for at in logprobs]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", [{}, {"speculative_config": GUESS}])
def test_they_are_those_that_all_of_the_vocabulary_has(mode: str, settings: dict[str, Any]) -> None:
    client = null_client(logprobs_mode=mode, max_logprobs=-1, **settings)
    fields: dict[str, Any] = {"temperature": 0.8, "seed": 3, "top_k": 40, "max_tokens": 12}
    whole = values(complete(client, [1, 2, 1, 2], greedy(**fields, logprobs=-1)))
    output = complete(client, [1, 2, 1, 2], greedy(**fields, logprob_token_ids=[90, 3, 17, 3]))
    found = values(output)
    for at, told, token in zip(whole, found, output.outputs[0].token_ids, strict=True):
        assert list(told) == list(dict.fromkeys([token, 90, 3, 17]))
        assert told == {each: at[each] for each in told}
    assert output.outputs[0].cumulative_logprob == pytest.approx(
        sum(told[token] for told, token in zip(found, output.outputs[0].token_ids, strict=True))
    )


def test_the_drawn_token_has_a_rank_and_the_named_ones_have_none() -> None:
    output = complete(null_client(), [1], greedy(logprob_token_ids=[90]))
    for at, token in zip(output.outputs[0].logprobs or (), output.outputs[0].token_ids, strict=True):
        assert {each: found.rank for each, found in at.items()} == {90: None, token: 1}


def test_batched_equals_alone_whatever_the_others_ask_for() -> None:
    rng = random.Random(1)
    wishes: list[dict[str, Any]] = [
        {"logprob_token_ids": [4]}, {"logprobs": 3}, {}, {"logprob_token_ids": list(range(60))}, {"logprobs": 0},
        {"logprob_token_ids": [9, 8], "logprobs": 2}, {"prompt_logprobs": 2, "logprob_token_ids": [1]},
    ]  # fmt: skip
    prompts = [[rng.randrange(VOCAB) for _ in range(5)] for _ in wishes]
    alone = [complete(null_client(), each, greedy(**wish)) for each, wish in zip(prompts, wishes, strict=True)]
    client = null_client()
    for number, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
        client.add(str(number), Prompt(prompt), greedy(**wish))
    together = drain(client)
    for number, each in enumerate(alone):
        ours = together[str(number)]
        assert ours.outputs[0].logprobs == each.outputs[0].logprobs
        assert ours.prompt_logprobs == each.prompt_logprobs


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "at least one"),
        ([-1], "from 0"),
        ([1.5], "whole number"),
        (list(range(129)), "may hold 128"),
        (5, "a list"),
    ],
)
def test_what_names_no_tokens_is_refused(ids: Any, says: str) -> None:
    with pytest.raises(ParameterError, match=f"logprob_token_ids.*{says}"):
        SamplingParams(logprob_token_ids=ids)


def test_a_token_past_the_vocabulary_is_refused() -> None:
    with pytest.raises(ParameterError, match="logprob_token_ids names token 97"):
        complete(null_client(), [1], greedy(logprob_token_ids=[VOCAB]))


def test_processors_that_see_a_row_at_a_time_change_nothing() -> None:
    """With drafts, their batches are joined again: rows after a draft come from others than those before."""
    fields: dict[str, Any] = {"allowed_token_ids": [1, 2], "max_tokens": 20, "temperature": 0.5, "seed": 1}
    wishes = [{"logprob_token_ids": [9, 1]}, {"logprobs": 2}, {}]
    told = []
    for settings in ({}, {"logits_processors": [Counting], "speculative_config": GUESS}):
        client = null_client(**settings)
        for number, wish in enumerate(wishes):
            client.add(str(number), Prompt([1, 2] * 4), greedy(**fields, **wish))
        told.append({name: output.outputs[0].logprobs for name, output in drain(client).items()})
    assert told[0] == told[1]
