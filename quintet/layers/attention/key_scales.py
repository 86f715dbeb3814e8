"""Factors and offsets between K as a layer computes it and as an int8 or int4 cache holds it, for biases of Qwen2.5.

An int8 cache has one scale for all channels of a token's head, an int4 cache one for each 32 of them. Where the key
projection's bias makes a few channels a hundred times as large as the others, these lose their digits. Such channels
are divided by a power of two before they are cached, and the queries' are multiplied by it: products stay the same,
exactly.

Rotary turns some channels so slowly that their bias is nearly the same at every position. An int4 cache keeps their
keys without it: the same number is missing from all scores of a query, and its softmax does not change.
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

SLOW = 1.0  # rad: up to it a bias that is left out costs less than one that is kept; 4 is no clear gain (kv-int4.json)


@dataclass(frozen=True)
class BiasScales(FactorReader):
    """Reads the bias of K as a factor for each channel of the layer's keys, or of its queries.

    `pairs`: the channel that rotary turns each channel of a head with; its own where it is not turned.
    """

    pairs: tuple[int, ...]
    kv_heads: int
    first: int  # row of the bias tensor at which K's begins
    inverse: bool
    removed: tuple[bool, ...] = ()  # channels of a head whose bias is not in the cache

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        """[channels of the shard, 1] float32, powers of two; heads of queries have those of their KV head."""
        size = len(self.pairs)
        bias = _bias_of_keys(tensors[part.source], self.first, self.kv_heads, size)
        if self.removed:
            bias = bias.masked_fill(torch.tensor(self.removed), 0.0)
        scales = channel_scales(bias, self.pairs)
        whole = scales.repeat_interleave(part.shape[0] // scales.numel(), 0).reshape(-1)[slice(*shard.outputs), None]
        return 1 / whole if self.inverse else whole


@dataclass(frozen=True)
class BiasOffsets(FactorReader):
    """Reads the bias of K as what is added to keys before they are cached: its negative, where `removed`."""

    removed: tuple[bool, ...]  # for each channel of a head
    kv_heads: int
    first: int  # row of the bias tensor at which K's begins
    factor: float  # that rotary multiplies keys with

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        """[channels of the shard, 1] float32."""
        bias = _bias_of_keys(tensors[part.source], self.first, self.kv_heads, len(self.removed))
        offsets = torch.where(torch.tensor(self.removed), -self.factor * bias, 0.0)
        return offsets.reshape(-1)[slice(*shard.outputs), None]


def _bias_of_keys(tensor: Tensor, first: int, kv_heads: int, size: int) -> Tensor:
    """[Hkv, D] float32."""
    return tensor.float().reshape(-1)[first:][: kv_heads * size].reshape(kv_heads, size)


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


def slow_channels(head_dim: int, rotary: Rotary | None) -> tuple[tuple[bool, ...], float]:
    """Returns which channels of a head turn by less than SLOW within the longest request, and what rotary multiplies
    them with; none where channels that turn together do not stay where they are."""
    if rotary is None:
        return (True,) * head_dim, 1.0
    if rotary.interleaved:
        return (False,) * head_dim, 1.0
    angles, factor = rotary.longest_angles()
    slow = tuple((angles < SLOW).tolist())
    return (*slow, *slow, *(True,) * (head_dim - rotary.dim)), factor


class KeyScales(Layer):
    """q [T, H, D] and k [T, Hkv, D] -> both with K's large channels moved to q. For a projection that has biases."""

    def __init__(
        self,
        build: BuildContext,
        projection: ColumnParallelLinear,
        heads: tuple[Shards, Shards],
        head_dim: int,
        rotary: Rotary | None,
        remove_bias: bool = False,
    ) -> None:
        """`heads`: of the queries and of the keys. `remove_bias`: where rotary turns it slowly; for layers whose scores
        go to a softmax as they are."""
        super().__init__(build, "scale_heads", *(("add_row",) if remove_bias else ()))
        self._rank, self._dtype, self._projection, self._heads = build.rank, build.dtype, (projection,), heads
        self._pairs = rotary_pairs(head_dim, rotary)
        self.key_offsets: Tensor
        self._removed, self._factor = slow_channels(head_dim, rotary) if remove_bias else ((), 1.0)

    def weights(self, path: str) -> list[Weight]:
        (projection,), size = self._projection, len(self._pairs)
        bias = projection.bias_slice(path, 1)

        def weight(name: str, heads: Shards, inverse: bool) -> Weight:
            rows = heads.times(size)
            part = CheckpointSlice(bias.source, (rows.total, 1), rows.ranges)
            reader = BiasScales(self._pairs, self._heads[1].total, bias.offset, inverse, self._removed)
            return Weight(name, (part,), 0, self._rank, torch.float32, "vector", reader=reader)

        weights = [weight("queries", self._heads[0], False), weight("keys_inverse", self._heads[1], True)]
        if self._removed:
            rows = self._heads[1].times(size)
            part = CheckpointSlice(bias.source, (rows.total, 1), rows.ranges)
            offsets = BiasOffsets(self._removed, self._heads[1].total, bias.offset, self._factor)
            weights.append(Weight("key_offsets", (part,), 0, self._rank, self._dtype, "vector", reader=offsets))
        return weights

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        held = self._parameters
        if self._removed:
            k = self.ops.add_row(k.reshape(len(k), -1), self.key_offsets.reshape(-1)).reshape(k.shape)
        pairs = ((q, held["queries"]), (k, held["keys_inverse"]))
        # each channel is a head of one number to the op
        scaled, turned = (self.ops.scale_heads(x.reshape(len(x), -1, 1), s).reshape(x.shape) for x, s in pairs)
        return scaled, turned
