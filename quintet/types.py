"""Plain data that crosses the layers of the engine: a step's batch, a cache's layout, a weight's place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.int32]]


class Bucket(NamedTuple):
    """The sizes that a step is padded to where shapes are fixed. The number of tokens settles the others."""

    tokens: int  # T
    requests: int  # R
    rows: int  # L, of logits
    pages: int  # N, of a row of the page table


class Batch(NamedTuple):
    """One step, on the device. T tokens of R requests; N pages at most per request; L rows of logits. All int32.

    A padded token writes to page 0, which holds nothing; a padded request has length 0.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]       place of each token in its request
    slots: Tensor  # [T]       where each token's K and V go: page * page_size + offset
    owners: Tensor  # [T]       the row of each token's request
    starts: Tensor  # [R + 1]   row r owns the tokens starts[r]:starts[r + 1]
    lengths: Tensor  # [R]       tokens in the cache once this step has run
    page_table: Tensor  # [R, N]    pages of each request in order, 0 past its end
    logit_rows: Tensor  # [L]       tokens whose logits are wanted
    extra: tuple[Tensor, ...] = ()  # what Attention.plan added, for that attention alone


class HostBatch(NamedTuple):
    """The same step on the host, built by the engine and completed by Attention.plan."""

    token_ids: Array
    positions: Array
    slots: Array
    owners: Array
    starts: Array
    lengths: Array
    page_table: Array
    logit_rows: Array
    extra: tuple[Array, ...] = ()

    @classmethod
    def empty(cls, bucket: Bucket) -> "HostBatch":
        """A step of nothing but padding."""
        tokens, requests, rows, pages = bucket
        nothing = np.zeros(tokens, np.int32)
        return cls(
            token_ids=nothing,
            positions=nothing,
            slots=nothing,
            owners=np.full(tokens, requests - 1, np.int32),
            starts=np.zeros(requests + 1, np.int32),
            lengths=np.zeros(requests, np.int32),
            page_table=np.zeros((requests, pages), np.int32),
            logit_rows=np.zeros(rows, np.int32),
        )

    @classmethod
    def decoding(cls, bucket: Bucket) -> "HostBatch":
        """A step in which each request brings one token, on page 0."""
        of = np.arange(bucket.requests + 1, dtype=np.int32)
        nothing = np.zeros(bucket.requests, np.int32)
        return cls(
            token_ids=nothing,
            positions=nothing,
            slots=nothing,
            owners=of[:-1],
            starts=of,
            lengths=nothing + 1,
            page_table=np.zeros((bucket.requests, bucket.pages), np.int32),
            logit_rows=of[:-1],
        )


@dataclass(frozen=True)
class KVLayout:
    """What one attention layer stores per page. The engine only counts pages."""

    dtype: torch.dtype
    page_size: int  # tokens
    page_shape: tuple[int, ...]  # of one page, page_size included
    shares: int = 1  # devices of an SPMD platform that each keep one equal part

    @property
    def page_bytes(self) -> int:
        """On one device."""
        return int(np.prod(self.page_shape)) * self.dtype.itemsize // self.shares


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer as this rank sees it: heads are local, and heads % kv_heads == 0."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    page_size: int
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: bool = False  # one learned logit per head joins the softmax
    alibi: tuple[float, ...] | None = None  # a slope per head: times (key's position - query's), added to the score
    kv_dtype: torch.dtype | None = None  # of the cache; None: dtype. int8 has a scale in each row

    def __post_init__(self) -> None:
        assert self.alibi is None or len(self.alibi) == self.heads, "a slope for each head of this rank"

    @property
    def cached(self) -> torch.dtype:
        return self.kv_dtype or self.dtype


class Memory(NamedTuple):
    """Bytes on a device: what an allocation could take now, what there is, and the most that was in use."""

    free: int
    total: int
    peak: int


@dataclass(frozen=True)
class Scheme:
    """How a product's weights, and perhaps its activations, are quantized."""

    name: str  # int8, int4, w8a8 or w4a8: the op that multiplies is linear_<name>
    bits: int  # of a weight
    activations: int  # bits: 16 for as they are, 8
    group: int  # inputs that share a scale; 0: all of an output's


@dataclass(frozen=True)
class Part:
    """A slice of one checkpoint tensor, and which stretch of it each rank keeps.

    `ranges[rank]` counts from `offset` along the weight's shard axis. A range may run past the end of the
    tensor: the rest is zeros (a padded vocabulary).
    """

    source: str  # the tensor's name in the checkpoint
    shape: tuple[int, ...]  # of this part, whole, as the layer sees it (after a transposition)
    ranges: tuple[tuple[int, int], ...]
    offset: int = 0
    transposed: bool = False  # stored [in, out]
    total: int | None = None  # the checkpoint tensor's size along the shard axis; None: the part is all of it


@dataclass(frozen=True)
class Weight:
    """One parameter of a layer: parts of checkpoint tensors, sliced by rank and joined along the shard axis.

    With `stack`, of so many matrices of equal shape, [stack, ...]: each has as many of the parts, in order.
    """

    name: str  # the attribute of the layer that it becomes
    parts: tuple[Part, ...]
    axis: int  # the shard axis, of each matrix of a stack; an SPMD platform shards along it and ignores the ranges
    rank: int
    dtype: torch.dtype
    use: str  # "linear", "experts", "embedding" or "vector": what place() may repack it for
    scheme: Scheme | None = None
    shared: bool = False  # another layer wants the same tensors in this form: a tied head. Set by the loader
    stack: int = 0  # matrices, one per expert; 0: it is no stack

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what this rank keeps."""
        shape, each = list(self.parts[0].shape), self.parts[: len(self.parts) // (self.stack or 1)]
        shape[self.axis] = sum(stop - start for start, stop in (part.ranges[self.rank] for part in each))
        return (self.stack, *shape) if self.stack else tuple(shape)

    def local(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's tensor from the checkpoint's, in the checkpoint's dtype; a view where that is possible."""
        slices = self.pieces(tensors)
        if not self.stack:
            return slices[0] if len(slices) == 1 else torch.cat(slices, self.axis)
        stacked, count = slices[0].new_empty(self.shape), len(slices) // self.stack
        for index, matrix in enumerate(stacked):
            torch.cat(slices[index * count : (index + 1) * count], self.axis, out=matrix)
        return stacked

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's slice of each part, in order."""
        return [self._slice(part, tensors[part.source]) for part in self.parts]

    def _slice(self, part: Part, tensor: Tensor) -> Tensor:
        if part.transposed:
            tensor = tensor.t()
        start, stop = part.ranges[self.rank]
        end = part.shape[self.axis]
        kept = tensor.narrow(self.axis, part.offset + min(start, end), max(0, min(stop, end) - start))
        if stop <= end:
            return kept
        shape = list(kept.shape)
        shape[self.axis] = stop - max(start, min(start, end)) - kept.shape[self.axis]
        return torch.cat([kept, kept.new_zeros(shape)], self.axis)
