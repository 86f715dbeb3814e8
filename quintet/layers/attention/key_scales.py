"""Powers of two between K as a layer computes it and as an int8 or int4 cache holds it, for keys with large biases
(Qwen2.5).

An int8 cache has one scale for all channels of a token's head, an int4 cache one for each 32 of them. Where the key
projection's bias makes a few channels a hundred times as large as the others, these lose their digits. Such channels
are divided by a power of two before they are cached, and the queries' are multiplied by it: products stay the same,
exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.weights import CheckpointSlice, ShardRange, Weight
from quintet.layers.attention.kv_scales import FactorReader
from quintet.layers.build import BuildContext, Layer, Shards
from quintet.layers.linear import ColumnParallelLinear
from quintet.layers.rope import Rotary

ORDINARY = 8.0  # what channels without a large bias reach: 4 to 16 are alike (benchmarks/results/kv-int8-bias.json)


@dataclass(frozen=True)
class BiasScales(FactorReader):
    """Reads the bias of K as a factor for each channel of the layer's keys, or of its queries.

    `pairs`: the channel that rotary turns each channel of a head with; its own where it is not turned.
    """

    pairs: tuple[int, ...]
    kv_heads: int
    first: int  # row of the bias tensor at which K's begins
    inverse: bool

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        """[channels of the shard, 1] float32, powers of two; heads of queries have those of their KV head."""
        size = len(self.pairs)
        bias = tensors[part.source].float().reshape(-1)[self.first :][: self.kv_heads * size]
        scales = channel_scales(bias.reshape(self.kv_heads, size), self.pairs)
        whole = scales.repeat_interleave(part.shape[0] // scales.numel(), 0).reshape(-1)[slice(*shard.outputs), None]
        return 1 / whole if self.inverse else whole


def channel_scales(bias: Tensor, pairs: tuple[int, ...]) -> Tensor:
    """bias [Hkv, D] -> powers of two [Hkv, D] that bring the largest value which rotary makes of it to ORDINARY."""
    turned = torch.tensor(pairs)
    partner = torch.where(turned == torch.arange(len(pairs)), 0.0, bias[:, turned])
    reach = (bias.square() + partner.square()).sqrt()
    return torch.exp2((reach / ORDINARY).clamp(min=1).log2().round())


def rotary_pairs(head_dim: int, rotary: Rotary | None) -> tuple[int, ...]:
    """Returns the channel that each channel of a head is turned with, or its own."""
    if rotary is None:
        return tuple(range(head_dim))
    half, size = rotary.dim // 2, rotary.dim
    turned = [i ^ 1 for i in range(size)] if rotary.interleaved else [(i + half) % size for i in range(size)]
    return (*turned, *range(size, head_dim))


class KeyScales(Layer):
    """q [T, H, D] and k [T, Hkv, D] -> both with K's large channels moved to q. For a projection that has biases."""

    def __init__(
        self,
        build: BuildContext,
        projection: ColumnParallelLinear,
        heads: tuple[Shards, Shards],
        pairs: tuple[int, ...],
    ) -> None:
        """`heads`: of the queries and of the keys."""
        super().__init__(build, "scale_heads")
        self._rank, self._projection, self._heads, self._pairs = build.rank, (projection,), heads, pairs

    def weights(self, path: str) -> list[Weight]:
        (projection,), size = self._projection, len(self._pairs)
        bias = projection.bias_slice(path, 1)

        def weight(name: str, heads: Shards, inverse: bool) -> Weight:
            rows = heads.times(size)
            part = CheckpointSlice(bias.source, (rows.total, 1), rows.ranges)
            reader = BiasScales(self._pairs, self._heads[1].total, bias.offset, inverse)
            return Weight(name, (part,), 0, self._rank, torch.float32, "vector", reader=reader)

        return [weight("queries", self._heads[0], False), weight("keys_inverse", self._heads[1], True)]

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        held = self._parameters
        pairs = ((q, held["queries"]), (k, held["keys_inverse"]))
        # each channel is a head of one number to the op
        scaled, turned = (self.ops.scale_heads(x.reshape(len(x), -1, 1), s).reshape(x.shape) for x, s in pairs)
        return scaled, turned
