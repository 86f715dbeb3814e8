"""Pooling parameters: copies, and the parameters within them."""

from typing import Any

import numpy as np
import pytest

from quintet.engine.pooling import late_interaction
from quintet.engine.pooling.late_interaction import QueryCache
from quintet.pooling_params import LateChunkingParams, LateInteractionParams, PoolingParams
from quintet.sampling_params import ParameterError


def test_a_clone_shares_nothing() -> None:
    params = PoolingParams(task="reward", returned_token_ids=[1, 2], normalize=True)
    clone = params.clone()
    assert clone == params
    clone.task, clone.normalize = "embed", False
    assert clone.returned_token_ids is not None
    clone.returned_token_ids.append(3)
    assert (params.task, params.returned_token_ids, params.normalize) == ("reward", [1, 2], True)


def test_parameters_within_are_objects_or_their_fields() -> None:
    params = PoolingParams(
        late_chunking_params={"chunk_size": 4},  # type: ignore[arg-type]
        late_interaction_params={"mode": "score_doc", "query_key": "q"},  # type: ignore[arg-type]
    )
    assert params.late_chunking_params == LateChunkingParams(4)
    assert params.late_interaction_params == LateInteractionParams("score_doc", "q")
    assert params.clone() == params


def test_a_document_has_the_dimensions_of_its_query() -> None:
    cache = QueryCache()
    assert cache.apply(LateInteractionParams("cache_query", "q", 1), np.ones((2, 4), np.float32)) == [0]
    with pytest.raises(ValueError, match="'q' has vectors of 4 dimensions, and the document of 3; give both the same"):
        cache.apply(LateInteractionParams("score_doc", "q"), np.ones((2, 3), np.float32))


def test_queries_without_tokens_take_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_interaction, "MAX_BYTES", 4000)
    cache = QueryCache()
    for number in range(5):
        cache.apply(LateInteractionParams("cache_query", str(number), 1), np.ones((0, 4), np.float32))
    with pytest.raises(ValueError, match="no query '0' is kept"):
        cache.apply(LateInteractionParams("score_doc", "0"), np.ones((1, 4), np.float32))
    assert cache.apply(LateInteractionParams("score_doc", "4"), np.ones((1, 4), np.float32)) == [0]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"late_chunking_params": 3}, "must be a LateChunkingParams or a dict of its fields, not 3"),
        ({"late_chunking_params": {"chunk_size": 0}}, "cannot be used: chunk_size must be from 1"),
        ({"late_chunking_params": {"chunk": 1}}, "unknown late chunking parameter 'chunk'; did you mean 'chunk_size'"),
        ({"late_interaction_params": {"mode": "score"}}, "mode must be 'cache_query' or 'score_doc'"),
        ({"late_interaction_params": {"mode": "score_doc"}}, "query_key must name the query"),
        ({"late_interaction_params": {"mode": "cache_query", "query_key": "q"}}, "query_uses must be the number of"),
    ],
)
def test_wrong_parameters_within_are_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ParameterError, match=why):
        PoolingParams(**given)
