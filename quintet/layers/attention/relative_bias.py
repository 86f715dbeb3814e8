"""Attention with a bias added to its scores for each head and distance (T5, Raffel et al. 2020), in encoders."""

import math

import torch
from torch import Tensor, nn

from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, Layer, split_heads
from quintet.layers.layer_state import StepState

MAX_DISTANCE = 128  # keys that are as far have a bucket with all that are further


class RelativeBias(Layer):
    """One for all layers of a model: by_distance() of what it learned, [H, 2 * MAX_DISTANCE + 1], under its own
    name."""

    def __init__(self, build: BuildContext, shape: AttentionSizes) -> None:
        super().__init__(build)
        self._build, self._heads = build, split_heads(shape.heads, shape.kv_heads, build.size)[0]
        self.table: Tensor

    def weights(self, path: str) -> list[Weight]:
        part = CheckpointSlice(f"{path}.table", (self._heads.total, 2 * MAX_DISTANCE + 1), self._heads.ranges)
        return [Weight("table", (part,), 0, self._build.rank, torch.float32, "channels")]


class RelativeAttention(SelfAttention):
    """Attention without a KV cache that adds the learned `bias` to scores."""

    def __init__(self, build: BuildContext, shape: AttentionSizes, bias: RelativeBias) -> None:
        assert not shape.uses_kv_cache, "the op is one over a step's own K and V"
        super().__init__(build, shape, None)
        self._ops = build.ops.take("biased_attention")
        self._bias = (bias,)  # not a part of this module

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: StepState) -> Tensor:
        (bias,) = self._bias
        out: Tensor = self._ops.biased_attention(q, k, v, cache.batch, self.spec, bias.table)
        return out.reshape(q.shape[0], -1)


def bias_by_distance(learned: Tensor) -> Tensor:
    """Spreads the learned bias of each bucket [buckets, H] over distances: [H, 2 * MAX_DISTANCE + 1] in float32."""
    distances = torch.arange(-MAX_DISTANCE, MAX_DISTANCE + 1)
    return nn.functional.embedding(
        _relative_position_buckets(distances, learned.shape[0]), learned.float()
    ).T.contiguous()


def _relative_position_buckets(distances: Tensor, count: int) -> Tensor:
    """Half of the buckets for keys behind the query: a half of those for a distance each, then ever wider ones."""
    half, exact = count // 2, count // 4
    far = distances.abs()
    wide = torch.log(far.clamp(min=1).float() / exact) / math.log(MAX_DISTANCE / exact) * (half - exact)
    within = torch.where(far < exact, far, (exact + wide.long()).clamp(max=half - 1))
    return within + half * (distances > 0)
