"""Outputs that go in circles end where the last of so many copies of a pattern does, however they are computed."""

import random
from typing import Any

import pytest

from quintet.engine.repetition_detection import RepetitionDetector
from quintet.sampling_params import ParameterError, RepetitionDetectionParams, SamplingParams
from tests.engine.spec_decode.test_ngram import GUESS
from tests.helpers.platforms.null_engine import complete, drain, greedy, null_client

THREE = {"max_pattern_size": 4, "min_count": 3}


def in_circles(ids: list[int], params: RepetitionDetectionParams) -> bool:
    """By definition."""
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        end = ids[-size * params.min_count :]
        if len(end) == size * params.min_count and end == end[-size:] * params.min_count:
            return True
    return False


def test_it_is_noticed_at_every_token_as_it_is_defined() -> None:
    rng, found = random.Random(0), 0
    for _ in range(400):
        most = rng.randrange(1, 7)
        params = RepetitionDetectionParams(most, rng.randrange(0, most + 1), rng.randrange(2, 5))
        repetition, ids = RepetitionDetector(params), list[int]()
        for _ in range(rng.randrange(1, 90)):
            ids.append(rng.randrange(rng.choice([1, 2, 3])))
            circles = repetition.add(ids[-1])
            assert circles == in_circles(ids, params), (ids, params)
            found += circles
    assert found > 1000


@pytest.mark.parametrize("settings", [{}, {"speculative_config": GUESS}, {"max_num_batched_tokens": 8}])
def test_an_output_ends_when_it_goes_in_circles(settings: dict[str, Any]) -> None:
    client = null_client(**settings)
    params = greedy(allowed_token_ids=[5], max_tokens=60, repetition_detection=dict(THREE))
    one = complete(client, [1, 5, 5, 5, 5], params).outputs[0]  # what the prompt repeats does not count
    assert (list(one.token_ids), one.finish_reason, one.stop_reason) == ([5] * 3, "repetition", "repetition_detected")
    later = complete(client, [1, 2], SamplingParams(**{**_fields(params), "min_tokens": 7})).outputs[0]
    assert (list(later.token_ids), later.finish_reason) == ([5] * 7, "repetition")


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def test_drafts_change_nothing_of_where_it_ends() -> None:
    """Many tokens may come in one step, past the end."""
    rng = random.Random(3)
    plain, guessing = null_client(), null_client(speculative_config=GUESS)
    for number in range(12):
        prompt = [rng.randrange(3) + 3 for _ in range(8)]
        detection = {"max_pattern_size": rng.randrange(1, 5), "min_count": rng.randrange(2, 5)}
        fields = {"allowed_token_ids": [5, 6], "temperature": 0.4, "seed": number, "max_tokens": 50}
        told = []
        for client in (plain, guessing):
            [output] = complete(client, prompt, greedy(**fields, repetition_detection=detection)).outputs
            told.append((list(output.token_ids), output.finish_reason, output.stop_reason))
        assert told[0] == told[1]
        ids = told[0][0]
        wanted = RepetitionDetectionParams(**detection)
        ends = [in_circles(ids[:end], wanted) for end in range(1, len(ids) + 1)]
        assert not any(ends[:-1]) and ends[-1] == (told[0][1] == "repetition")


def test_the_most_tokens_and_stop_tokens_come_first_as_in_vllm() -> None:
    client = null_client()
    two = {"max_pattern_size": 1, "min_count": 2}
    asked = greedy(allowed_token_ids=[5], max_tokens=2, repetition_detection=two)
    assert complete(client, [1], asked).outputs[0].finish_reason == "length"
    asked = greedy(allowed_token_ids=[5], stop_token_ids=[5], repetition_detection=two)
    assert complete(client, [1], asked).outputs[0].finish_reason == "stop"
    off = greedy(allowed_token_ids=[5], max_tokens=9, repetition_detection=RepetitionDetectionParams())
    assert complete(client, [1], off).outputs[0].finish_reason == "length"
    assert not drain(client)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_pattern_size": 3}, "min_count must be at least 2"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size must be at most"),
        ({"max_pattern_size": 10**6, "min_count": 2}, "from 0 to 1024"),
        ({"max_pattern": 3}, "did you mean 'max_pattern_size'"),
        ("x", "must be a RepetitionDetectionParams or a dict"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: Any, says: str) -> None:
    with pytest.raises(ParameterError, match="repetition_detection") as refused:
        SamplingParams(repetition_detection=fields)
    assert says in str(refused.value)
