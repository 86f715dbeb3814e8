"""Pooling parameters that are copied."""

from quintet.pooling_params import PoolingParams


def test_a_clone_shares_nothing() -> None:
    params = PoolingParams(task="reward", returned_token_ids=[1, 2], normalize=True)
    clone = params.clone()
    assert clone == params
    clone.task, clone.normalize = "embed", False
    assert clone.returned_token_ids is not None
    clone.returned_token_ids.append(3)
    assert (params.task, params.returned_token_ids, params.normalize) == ("reward", [1, 2], True)
