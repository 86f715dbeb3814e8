"""Columns of distances: DeBERTa's buckets, as transformers has them."""

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from quintet.layers.attention.disentangled import bucketed_columns, plain_columns


@pytest.mark.parametrize(("reach", "buckets"), [(512, 256), (72, 8), (2048, 128), (512, 512)])
def test_each_distance_has_the_column_of_its_bucket(reach: int, buckets: int) -> None:
    behind = torch.arange(3000, -3001, -1)  # a query's position, less the key's
    wanted = (make_log_bucket_position(behind, buckets, reach).long() + buckets).clamp(0, 2 * buckets - 1)
    columns = bucketed_columns(reach, buckets)
    assert columns.dtype == torch.int32
    assert torch.equal(columns[(-behind).clamp(-reach, reach) + reach].long(), wanted)


def test_without_buckets_each_distance_has_a_column() -> None:
    columns = plain_columns(3)
    assert columns.tolist() == [5, 5, 4, 3, 2, 1, 0]  # of keys three before the query to three behind it
