"""Disentangled attention (DeBERTa, He et al. 2021): products with learned vectors of distances join the scores."""

import math

import torch
from torch import Tensor

from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, Layer, split_heads
from quintet.layers.layer_state import StepState


class DistanceColumns(Layer):
    """One for all layers of a model: the column of each distance, as the op disentangled_attention takes it."""

    def __init__(self, build: BuildContext, columns: Tensor) -> None:
        super().__init__(build)
        self._computed = columns
        self.columns: Tensor

    def constants(self) -> dict[str, Tensor]:
        return {"columns": self._computed}


class DistanceVectors(Layer):
    """Vectors of distances [H, width, D], which a head multiplies with its queries or its keys."""

    def __init__(self, build: BuildContext, shape: AttentionSizes, width: int) -> None:
        super().__init__(build, "by_heads")
        self._build, self._shape, self._width = build, shape, width
        self._ranges = split_heads(shape.heads, shape.kv_heads, build.size)[0].ranges[build.rank]
        self.table: Tensor

    def weights(self, path: str) -> list[Weight]:
        build, width = self._build, self._width
        size, whole = (width, self._shape.head_dim), ((0, width),) * build.size
        parts = tuple(
            CheckpointSlice(f"{path}.table", size, whole, head * width, total=self._shape.heads * width)
            for head in range(*self._ranges)
        )
        return [Weight("table", parts, 0, build.rank, build.dtype, "heads", stack=len(parts))]

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H, D] -> products [T, H, width]."""
        out: Tensor = self.ops.by_heads(x, self.table, self._width, False)
        return out


class DisentangledAttention(SelfAttention):
    """Attention without a KV cache. With `kinds` "c2p", queries are multiplied with vectors of distances, with "p2c"
    keys."""

    def __init__(
        self, build: BuildContext, shape: AttentionSizes, distances: DistanceColumns, width: int, kinds: list[str]
    ) -> None:
        assert not shape.uses_kv_cache, "the op is one over a step's own K and V"
        super().__init__(build, shape, None)
        self._ops = build.ops.take("disentangled_attention")
        self._distances = (distances,)  # not a part of this module
        self.of_queries = DistanceVectors(build, shape, width) if "c2p" in kinds else None
        self.of_keys = DistanceVectors(build, shape, width) if "p2c" in kinds else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: StepState) -> Tensor:
        (distances,) = self._distances
        mine = None if self.of_queries is None else self.of_queries(q)
        theirs = None if self.of_keys is None else self.of_keys(k)
        out: Tensor = self._ops.disentangled_attention(q, k, v, cache.batch, self.spec, mine, theirs, distances.columns)
        return out.reshape(q.shape[0], -1)


def plain_columns(reach: int) -> Tensor:
    """Returns a column for each distance up to `reach`: int32 [2 * reach + 1]; column `reach` is of distance 0."""
    return torch.arange(reach, -reach - 1, -1).add(reach).clamp(0, 2 * reach - 1).to(torch.int32)


def bucketed_columns(reach: int, buckets: int) -> Tensor:
    """As plain_columns(), of `buckets` to each side: a half of them for one distance each, then ever wider ones.

    Computed in float32, as transformers computes it: which side of a bucket's end a distance is on depends on that.
    """
    behind, half = torch.arange(reach, -reach - 1, -1), buckets // 2
    far = behind.abs().clamp(min=half)
    steps = torch.log(far / half) / torch.log(torch.tensor((reach - 1) / half)) * (half - 1)
    wide = (steps.ceil().long() + half) * behind.sign()
    return torch.where(far <= half, behind, wide).add(buckets).clamp(0, 2 * buckets - 1).to(torch.int32)


def distance_table(
    projection: Tensor, vectors: Tensor, bias: Tensor | None, norm: tuple[Tensor, Tensor, float] | None, heads: int
) -> Tensor:
    """Learned `vectors` [width, hidden], normed where `norm` has weight, bias and epsilon, through a projection [H * D,
    hidden]: [H * width, D] in float32."""
    x = vectors.float()
    if norm is not None:
        x = torch.nn.functional.layer_norm(x, x.shape[1:], norm[0].float(), norm[1].float(), norm[2])
    out = torch.nn.functional.linear(x, projection.float(), None if bias is None else bias.float())
    return out.reshape(len(x), heads, -1).transpose(0, 1).reshape(heads * len(x), -1)


def disentangled_scale(head_dim: int, terms: int) -> float:
    """Returns the scale of scores that are sums of so many products."""
    return 1.0 / math.sqrt(head_dim * terms)
