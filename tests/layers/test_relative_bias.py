"""Numbers for distances: T5's buckets, spread out."""

import pytest
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from quintet.interface.types import AttentionSpec, Batch
from quintet.layers.attention.relative_bias import MAX_DISTANCE, bias_by_distance
from quintet.ops.attention import biased_attention


@pytest.mark.parametrize("buckets", [32, 16])
def test_each_distance_has_the_number_of_its_bucket(buckets: int) -> None:
    learned = torch.randn(buckets, 3)
    table = bias_by_distance(learned)
    distances = torch.arange(-1000, 1001)  # a key's position, less the query's
    wanted = learned[MPNetEncoder.relative_position_bucket(distances, num_buckets=buckets)].T
    assert torch.equal(table[:, distances.clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE], wanted)


def test_specification_adds_what_torch_adds_as_a_mask() -> None:
    torch.manual_seed(0)
    lengths, reach = (5, 40), 9
    of = AttentionSpec(4, 2, 16, 0.25, torch.float32, 16, causal=False, source="none")
    q, k, v = (torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2))
    bias = torch.randn(4, 2 * reach + 1)
    ends = [0, 5, 45]
    starts, none = torch.tensor(ends, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    owners = torch.repeat_interleave(torch.arange(2, dtype=torch.int32), torch.tensor(lengths))
    out = biased_attention(q, k, v, Batch(positions, positions, owners, starts, none, ()), of, bias)
    for first, last in zip(ends[:-1], ends[1:], strict=True):
        places = torch.arange(last - first)
        apart = (places[None, :] - places[:, None]).clamp(-reach, reach)
        own = (x[first:last].transpose(0, 1)[None] for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        mask = bias[:, apart + reach][None]
        wanted = torch.nn.functional.scaled_dot_product_attention(*own, attn_mask=mask, scale=0.25)
        torch.testing.assert_close(out[first:last], wanted[0].transpose(0, 1), atol=3e-6, rtol=1e-5)
