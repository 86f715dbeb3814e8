"""Sizes for a device with fixed shapes, and the rows of logits that a step may have."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.chat.prompts import Prompt
from quintet.engine.executor.batch_builder import CaptureSizes, pad
from quintet.engine.executor.shape_buckets import MIN_TOKENS, describe, padding_waste, plan_buckets
from quintet.interface.types import HostBatch, HostGroup, ShapeBucket
from tests.helpers.platforms.null_engine import drain, greedy, null_client


def test_a_step_is_made_of_any_iterable_of_its_leaves() -> None:
    """Platforms map them one by one."""
    host = ShapeBucket(4, 2, 3, (5,)).batch
    batch = host.on(torch.from_numpy(x) for x in host.leaves())
    assert (batch.token_ids.shape, batch.logits_indices.shape, batch.groups[0].block_table.shape) == (
        (4,),
        (3,),
        (2, 5),
    )


@settings(derandomize=True, deadline=None)  # a busy machine is no fault of the plan
@given(tokens=st.integers(1, 5000), requests=st.integers(1, 600), rows=st.integers(1, 900))
def test_every_step_within_the_limits_has_a_variant(tokens: int, requests: int, rows: int) -> None:
    buckets = plan_buckets(ShapeBucket(tokens, requests, rows, (9, 3)))
    sizes = [bucket.tokens for bucket in buckets]
    assert sizes == sorted(set(sizes)) and sizes[-1] == tokens
    for bucket in buckets:
        assert min(bucket.tokens, requests) <= bucket.requests <= requests
        assert min(bucket.tokens, rows) <= bucket.rows <= rows
        assert bucket.pages == (9, 3)
    assert len({bucket.rows for bucket in buckets}) <= len(buckets) / 2 + 2
    average, worst = padding_waste(buckets)
    assert 0 <= average <= worst < 1
    assert all(2 * small >= large for small, large in zip(sizes, sizes[1:], strict=False))


def test_rows_of_outputs_come_in_fewer_sizes_than_tokens() -> None:
    buckets = plan_buckets(ShapeBucket(1024, 400, 300, (1,)))
    found = {bucket.tokens: (bucket.requests, bucket.rows) for bucket in buckets}
    assert found == {
        16: (16, 16), 32: (32, 64), 64: (64, 64), 128: (128, 256), 256: (256, 256), 512: (400, 300), 1024: (400, 300),
    }  # fmt: skip


def test_the_plan_is_told_with_its_price() -> None:
    said = describe(plan_buckets(ShapeBucket(128, 32, 64, (8,))))
    assert said.startswith("4 compilations, for steps of 16, 32, 64, 128 tokens (at most 32 requests, 64 rows")
    assert "padding 27% of a step on average, 94% at worst" in said


def test_a_plan_of_one_size_is_described() -> None:
    text = describe(plan_buckets(ShapeBucket(MIN_TOKENS, 4, 4, (8,))))
    assert text.startswith(f"1 compilations, for steps of {MIN_TOKENS} tokens (at most 4 requests, 4 rows")


def test_steps_that_all_bring_segments_are_told_alike() -> None:
    plain = plan_buckets(ShapeBucket(128, 32, 64, ()))
    segments = [each._replace(inputs=("token_type_ids",)) for each in plain]
    assert describe(segments) == describe(plain)
    beside = [*plain, *(each._replace(inputs=("embeds",), width=8) for each in plain)]
    assert describe(beside) == describe(plain).replace("4 compilations", "8 compilations")


def two() -> HostBatch:
    """The last tokens of a request of five."""
    place = np.array([4, 5], np.int32)
    group = HostGroup(place, place[None], place[1:])
    return HostBatch(place, place, np.zeros(2, np.int32), np.array([0, 2], np.int32), place[:1] - 3, (group, group))


def test_padding_writes_to_page_0_and_belongs_to_the_last_request() -> None:
    padded = pad(two(), plan_buckets(ShapeBucket(40, 3, 20, (6, 2))))
    assert [len(field) for field in padded[:5]] == [16, 16, 16, 4, 16]
    assert set(padded.token_to_seq[2:].tolist()) == {2} and padded.query_start_loc.tolist() == [0, 2, 2, 2]
    first, second = padded.groups
    assert first.slot_mapping.tolist() == second.slot_mapping.tolist() == [4, 5] + [0] * 14, "page 0"
    assert first.seq_lens.tolist() == [5, 0, 0]
    assert first.block_table.shape == (3, 6) and second.block_table.shape == (3, 2)


def test_a_decode_step_is_padded_with_requests_of_one_token() -> None:
    one = np.array([3], np.int32)
    group = HostGroup(one, np.array([[7, 8]], np.int32), one + 1)
    host = HostBatch(one, one, one - 3, np.array([0, 1], np.int32), one - 3, (group,))
    buckets = [ShapeBucket(size, size, size, (64,), decode=True) for size in (2, 4)]
    padded = CaptureSizes(buckets).pad(host)
    assert [len(field) for field in padded[:5]] == [2, 2, 2, 3, 1]
    assert padded.groups[0].block_table.tolist() == [[7, 8], [0, 0]] and padded.groups[0].seq_lens.tolist() == [4, 1]
    as_it_is = two()
    assert CaptureSizes(buckets).pad(as_it_is) is as_it_is


def test_a_mixed_step_is_padded_with_tokens_of_nobody_and_empty_requests() -> None:
    """To the first size that holds its tokens, its requests and its rows; where none does, it stays as it is."""
    of = np.arange(5, dtype=np.int32)
    group = HostGroup(of + 16, np.array([[1, 2], [3, 0]], np.int32), np.array([20, 3], np.int32))
    host = HostBatch(of, of, np.array([0, 0, 0, 0, 1], np.int32), np.array([0, 4, 5], np.int32), of[3:], (group,))
    held = [
        ShapeBucket(8, 1, 1, (64,)),
        ShapeBucket(8, 3, 2, (64,)),
        ShapeBucket(16, 4, 4, (64,)),
        ShapeBucket(5, 5, 5, (64,), True),
    ]
    padded = CaptureSizes(held).pad(host)
    assert [len(field) for field in padded[:5]] == [8, 8, 8, 4, 2]
    assert padded.query_start_loc.tolist() == [0, 4, 5, 5] and padded.token_to_seq.tolist() == [0, 0, 0, 0, 1, 2, 2, 2]
    (own,) = padded.groups
    assert own.block_table.tolist() == [[1, 2], [3, 0], [0, 0]] and own.seq_lens.tolist() == [20, 3, 0]
    assert own.slot_mapping.tolist() == [16, 17, 18, 19, 20, 0, 0, 0]
    every = host._replace(logits_indices=of[:3])
    assert len(CaptureSizes(held).pad(every).token_ids) == 16, "a row more than the smaller has"
    assert CaptureSizes(held).pad(host._replace(logits_indices=of)).token_ids is host.token_ids


def test_an_empty_step_is_padding_throughout() -> None:
    empty = ShapeBucket(MIN_TOKENS, 2, 4, (3, 5)).batch
    assert not any(field.any() for field in (empty.token_ids, empty.positions, *empty.leaves()[5:]))
    assert empty.query_start_loc.shape == (3,) and empty.token_to_seq.tolist() == [1] * MIN_TOKENS
    assert [group.block_table.shape for group in empty.groups] == [(2, 3), (2, 5)]


def test_a_step_of_every_input_has_them() -> None:
    bucket = ShapeBucket(4, 2, 2, (), inputs=("embeds", "embed_indices", "rotary_positions", "adapters"), width=8)
    embeds = [each.batch.inputs.embeds for each in (bucket, bucket._replace(embed_rows=10))]
    assert [each.shape for each in embeds if each is not None] == [(4, 8), (10, 8)]
    step = bucket.batch
    assert step.inputs.embed_indices is not None and step.inputs.embed_indices.tolist() == [-1] * 4
    assert (
        step.inputs.rotary_positions is not None
        and step.inputs.rotary_positions.shape == (3, 4)
        and step.inputs.token_type_ids is None
    )
    assert len(step.leaves()) == 5 + 4


@pytest.mark.parametrize("chunked", [True, False])
def test_a_step_never_has_more_rows_of_logits_than_it_may(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt log-probabilities of long prompts come in chunks; every other request goes on meanwhile."""
    client = null_client(
        max_num_seqs=4, max_num_batched_tokens=512, max_model_len=500, num_pages=200, enable_chunked_prefill=chunked
    )
    limit = client.engine.scheduler.limits.max_logit_rows
    assert limit == 256
    rows = []
    ranks = client.engine_plan.ranks
    run = ranks.run
    monkeypatch.setattr(ranks, "run", lambda host, *more: rows.append(len(host.logits_indices)) or run(host, *more))
    prompts = {str(i): [(7 * i + j) % 97 for j in range(length)] for i, length in enumerate((400, 450, 30))}
    for name, prompt in prompts.items():
        scores = 0 if name != "2" else None
        client.add(name, Prompt(prompt), greedy(max_tokens=5, prompt_logprobs=scores))
    outputs = drain(client)
    assert max(rows) <= limit and (max(rows) > 200)
    for name in "01":
        assert len(outputs[name].prompt_logprobs or ()) == len(prompts[name])
    assert all(len(outputs[name].outputs[0].token_ids) == 5 for name in prompts)
