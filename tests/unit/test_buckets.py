"""Sizes for a device with fixed shapes, and the rows of logits that a step may have."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.engine.batch import pad
from quintet.engine.buckets import LEAST, describe, plan_buckets, waste
from quintet.engine.prompts import Prompt
from quintet.types import Bucket, HostBatch
from tests.helpers.null_engine import drain, greedy, null_client


@settings(derandomize=True, deadline=None)  # a busy machine is no fault of the plan
@given(tokens=st.integers(1, 5000), requests=st.integers(1, 600), rows=st.integers(1, 900))
def test_every_step_within_the_limits_has_a_bucket(tokens: int, requests: int, rows: int) -> None:
    buckets = plan_buckets(Bucket(tokens, requests, rows, 9))
    sizes = [bucket.tokens for bucket in buckets]
    assert sizes == sorted(set(sizes)) and sizes[-1] == tokens
    for bucket in buckets:
        assert min(bucket.tokens, requests) <= bucket.requests <= requests
        assert min(bucket.tokens, rows) <= bucket.rows <= rows
        assert bucket.pages == 9
    assert len({bucket.rows for bucket in buckets}) <= len(buckets) / 2 + 2
    average, worst = waste(buckets)
    assert 0 <= average <= worst < 1
    assert all(2 * small >= large for small, large in zip(sizes, sizes[1:], strict=False))


def test_the_plan_is_told_with_its_price() -> None:
    said = describe(plan_buckets(Bucket(128, 32, 64, 8)))
    assert said.startswith("4 compilations, for steps of 16, 32, 64, 128 tokens (at most 32 requests, 64 rows")
    assert "padding 27% of a step on average, 94% at worst" in said


def test_padding_is_nobodys() -> None:
    two = np.array([4, 5], np.int32)
    host = HostBatch(two, two, two, np.zeros(2, np.int32), np.array([0, 2], np.int32), two[1:], two[None], two[:1] - 3)
    padded = pad(host, plan_buckets(Bucket(40, 3, 20, 6)))
    assert [len(field) for field in padded[:6]] == [16, 16, 16, 16, 4, 3]
    assert padded.slots.tolist() == [4, 5] + [0] * 14, "page 0"
    assert set(padded.owners[2:].tolist()) == {2} and padded.lengths.tolist() == [5, 0, 0]
    assert padded.starts.tolist() == [0, 2, 2, 2]
    assert padded.page_table.shape == (3, 6) and padded.logit_rows.shape == (16,)


def test_an_empty_step_is_padding_throughout() -> None:
    empty = HostBatch.empty(Bucket(LEAST, 2, 4, 3))
    assert not any(field.any() for field in empty[:3]) and not empty.lengths.any() and not empty.page_table.any()
    assert empty.starts.shape == (3,) and empty.owners.tolist() == [1] * LEAST


@pytest.mark.parametrize("chunked", [True, False])
def test_a_step_never_has_more_rows_of_logits_than_it_may(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt log-probabilities of long prompts come in chunks; every other request goes on meanwhile."""
    client = null_client(
        max_num_seqs=4, max_num_batched_tokens=512, max_model_len=500, num_pages=200, enable_chunked_prefill=chunked
    )
    limit = client.engine.scheduler.limits.max_logit_rows
    assert limit == 256
    rows = []
    ranks = client.prepared.ranks
    run = ranks.run
    monkeypatch.setattr(ranks, "run", lambda host, *more: rows.append(len(host.logit_rows)) or run(host, *more))
    prompts = {str(i): [(7 * i + j) % 97 for j in range(length)] for i, length in enumerate((400, 450, 30))}
    for name, prompt in prompts.items():
        scores = 0 if name != "2" else None
        client.add(name, Prompt(prompt), greedy(max_tokens=5, prompt_logprobs=scores))
    outputs = drain(client)
    assert max(rows) <= limit and (max(rows) > 200)
    for name in "01":
        assert len(outputs[name].prompt_logprobs or ()) == len(prompts[name])
    assert all(len(outputs[name].outputs[0].token_ids) == 5 for name in prompts)
