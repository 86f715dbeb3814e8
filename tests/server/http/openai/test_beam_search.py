"""Beam search of the server over a fake engine: what a client that leaves, or a failure, leaves behind."""

import asyncio
from typing import Any

import httpx
import pytest

from quintet.beam_search import BeamSearch
from quintet.outputs import Logprob
from quintet.sampling_params import BeamSearchParams
from tests.server.fakes import FakeBackend
from tests.server.http.serving import client, serving

BODY: dict[str, Any] = {"prompt": "Hi", "n": 2, "max_tokens": 4, "use_beam_search": True}
END = 9


def search(**fields: Any) -> BeamSearch:
    return BeamSearch([1, 2], BeamSearchParams(beam_width=2, **fields), {END})


def test_a_search_ends_when_no_other_output_can_be_better() -> None:
    found = search(max_tokens=50, length_penalty=0.0)
    found.grow([{END: Logprob(-0.1), 3: Logprob(-3.0), 4: Logprob(-4.0)}])
    assert [beam.tokens for beam in found.beams] == [[1, 2, 3], [1, 2, 4]]
    found.grow([{END: Logprob(-0.2), 5: Logprob(-2.0)}, {END: Logprob(-0.3), 5: Logprob(-2.0)}])
    assert found.beams == []  # the worst that is kept has -3.2, and the others begin with -5
    assert [beam.tokens for beam in found.best()] == [[1, 2, END], [1, 2, 3, END]]


def test_a_longer_output_may_still_be_better_by_its_length() -> None:
    found = search(max_tokens=50, length_penalty=1.0)
    found.grow([{END: Logprob(-0.1), 3: Logprob(-0.2), 4: Logprob(-0.3)}])
    found.grow([{END: Logprob(-0.5), 5: Logprob(-0.01)}, {END: Logprob(-0.5), 5: Logprob(-0.01)}])
    assert [beam.tokens for beam in found.beams] == [[1, 2, 3, 5], [1, 2, 4, 5]]


def test_ended_candidates_are_no_more_than_are_kept() -> None:
    found = search(max_tokens=1000, length_penalty=2.0)
    for _ in range(100):
        found.grow([{3: Logprob(-0.01), 4: Logprob(-0.02), END: Logprob(-1.0)} for _ in found.beams])
    assert len(found._ended) == 2 and len(found.beams) == 2


async def test_a_step_that_fails_is_the_calls_error_and_nothing_runs_on() -> None:
    backend = FakeBackend(fail_at=0)
    async with client(backend) as http:
        answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 500, answer.text
    assert not backend.running


async def test_a_chat_says_how_many_tokens_are_searched() -> None:
    async with client() as http:
        body = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "use_beam_search": True}
        answer = await http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


async def test_a_client_that_leaves_ends_the_search() -> None:
    backend = FakeBackend(hang=0)
    with serving(backend) as server:
        async with httpx.AsyncClient(base_url=server.url) as http:
            asked = asyncio.ensure_future(http.post("/v1/completions", json=BODY))
            while not backend.submitted:
                await asyncio.sleep(0.01)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        while not backend.aborted:
            await asyncio.sleep(0.01)
    assert len(backend.submitted) == 1
