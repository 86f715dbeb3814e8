"""Rows of several draws, joined to one batch, and lists of places that have one shape."""

import numpy as np
import pytest
import torch

from quintet.engine.executor.model_runner import _to_token_logprobs
from quintet.engine.sampling.logits_edits import CHUNK, _chunk_of
from quintet.engine.sampling.sampler import LogprobTensors, Sampled, Sampler, _concat
from tests.helpers.platforms.sampling import HOST, HostDevice, bound


def test_rows_that_ask_for_fewer_logprobs_keep_theirs_and_have_zeros_behind_them() -> None:
    def drawn(token: int, count: int) -> Sampled:
        ids = torch.arange(token, token + count, dtype=torch.int32)[None]
        return Sampled(ids[:, 0], LogprobTensors(ids, -ids.float(), torch.tensor([token], dtype=torch.int32)))

    tokens, logprobs = _concat([drawn(5, 3), drawn(8, 1), Sampled(torch.tensor([9], dtype=torch.int32), None)])
    assert tokens.tolist() == [5, 8, 9]
    assert logprobs is not None
    assert logprobs.token_ids.tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
    assert logprobs.logprobs.tolist() == [[-5, -6, -7], [-8, 0, 0], [0, 0, 0]]
    assert logprobs.ranks.tolist() == [5, 8, 0]


def test_the_last_chunk_has_the_shape_of_the_others_and_repeats_its_last_place() -> None:
    column = np.arange(CHUNK + 3, dtype=np.int32)
    first, last = _chunk_of(column, 0), _chunk_of(column, CHUNK)
    assert first.tolist() == column[:CHUNK].tolist()
    assert last.tolist() == [CHUNK, CHUNK + 1, *[CHUNK + 2] * (CHUNK - 2)]


@pytest.mark.parametrize(("num", "columns"), [(None, 4), (-1, 4), (0, 1), (1, 2), (3, 4)])
def test_a_request_gets_the_columns_that_it_asked_for_beside_one_that_asks_for_more(
    num: int | None, columns: int
) -> None:
    ids = torch.arange(8, dtype=torch.int32).view(2, 4)
    rows = _to_token_logprobs(LogprobTensors(ids, ids / 2, torch.tensor([1, 6])), slice(1, 2), num)
    assert [(row.ids, row.values, row.rank) for row in rows] == [
        ([4, 5, 6, 7][:columns], [2, 2.5, 3, 3.5][:columns], 6)
    ]


def test_a_prompt_may_have_more_tokens_than_the_vocabulary() -> None:
    logits, tokens = torch.randn(7, 3), np.array([0, 1, 2, 0, 1, 2, 0], np.int32)
    found = Sampler(bound(HOST), HostDevice(), 3, (), "raw_logits").prompt_logprobs(logits, tokens, tokens * 0 + 1, 0)
    assert found.token_ids[:, 0].tolist() == tokens.tolist()
    assert torch.equal(found.logprobs, logits.gather(1, torch.from_numpy(tokens).long()[:, None]))
