"""Plain data that crosses the layers of the engine: a step's batch, a cache's layout, a weight's place."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.int32]]
Numbers = np.ndarray[Any, np.dtype[np.float32]]


class Variant(NamedTuple):
    """Everything that settles a step's shapes: what a step is padded to, captured at or compiled for."""

    tokens: int  # T
    requests: int  # R
    rows: int  # L, of outputs
    pages: tuple[int, ...]  # N of each group's table
    decode: bool = False  # each request brings one token: tokens and requests alone are padded, and that is captured
    inputs: tuple[str, ...] = ()  # which fields of Inputs are there
    width: int = 0  # H, of embeds

    @property
    def batch(self) -> "HostBatch":
        """A step of this size that does nothing: padding alone or, for `decode`, a token of each request on page 0."""
        nothing, lengths = np.zeros(self.tokens, np.int32), np.full(self.requests, int(self.decode), np.int32)
        count = np.arange(self.requests + 1, dtype=np.int32)
        inputs: dict[str, Any] = dict.fromkeys(self.inputs, nothing)
        if "embeds" in inputs:
            inputs |= {"embeds": np.zeros((self.tokens, self.width), np.float32), "places": nothing - 1}
        if "angles" in inputs:
            inputs["angles"] = np.zeros((3, self.tokens), np.int32)
        return HostBatch(
            token_ids=nothing,
            positions=nothing,
            owners=count[:-1] if self.decode else np.full(self.tokens, self.requests - 1, np.int32),
            starts=count if self.decode else np.zeros(self.requests + 1, np.int32),
            rows=count[:-1] if self.decode else np.zeros(self.rows, np.int32),
            groups=tuple(HostGroup(nothing, np.zeros((self.requests, n), np.int32), lengths) for n in self.pages),
            inputs=HostInputs(**inputs),
        )


class Group(NamedTuple):
    """What the layers of one group read and write in a step: where each token goes, and what each request keeps.

    The layers of a group keep alike: all positions, or those in a window. The pages of a request that no later token
    can see are 0 in its row of the table, from the left.
    """

    slots: Tensor  # [T]       where each token's K and V go: page * page_size + offset (field: slot_mapping)
    table: Tensor  # [R, N]    pages of each request in order, 0 past its end (field: block_table)
    lengths: Tensor  # [R]       positions kept once this step has run (field: seq_lens)
    plan: tuple[Tensor, ...] = ()  # what Mixer.plan added, for the mixers of this group alone


class Inputs(NamedTuple):
    """What a step brings beside ids; None where its variant has none."""

    embeds: Tensor | None = None  # [M, H] float32
    places: Tensor | None = None  # [T]    the row of embeds that stands in a token's place; -1: its id does
    angles: Tensor | None = None  # [3, T] rotary positions, where they are not the tokens' positions
    adapters: Tensor | None = None  # [T]    the adapter's slot, 0: none
    types: Tensor | None = None  # [T]    segment ids


class Batch(NamedTuple):
    """One step, on the device. T tokens of R requests; L rows of outputs. Whole numbers are int32.

    A padded token writes to page 0, which holds nothing; a padded request has length 0.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]       place of each token in its request
    owners: Tensor  # [T]       the row of each token's request (field: token_to_seq)
    starts: Tensor  # [R + 1]   row r owns the tokens starts[r]:starts[r + 1] (field: cu_seqlens, query_start_loc)
    rows: Tensor  # [L]       tokens whose outputs are wanted (field: logits_indices)
    groups: tuple[Group, ...] = ()  # one for each group of layers that keep alike
    inputs: Inputs = Inputs()


class Books(NamedTuple):
    """What a mixer is told of a step: all of it, and what is its own group's."""

    batch: Batch
    group: Group


class HostGroup(NamedTuple):
    """A Group on the host."""

    slots: Array
    table: Array
    lengths: Array
    plan: tuple[Array, ...] = ()


class HostInputs(NamedTuple):
    """Inputs on the host."""

    embeds: Numbers | None = None
    places: Array | None = None
    angles: Array | None = None
    adapters: Array | None = None
    types: Array | None = None


class HostBatch(NamedTuple):
    """The same step on the host, built by the engine."""

    token_ids: Array
    positions: Array
    owners: Array
    starts: Array
    rows: Array
    groups: tuple[HostGroup, ...] = ()
    inputs: HostInputs = HostInputs()

    def leaves(self) -> list[Any]:
        """Its arrays, flat, in the order of the fields; what is None is left out."""
        return leaves(self)

    def on(self, tensors: Iterable[Tensor]) -> Batch:
        """The Batch of these tensors, which stand for leaves()."""
        left = iter(tensors)
        token_ids, positions, owners, starts, rows = (next(left) for _ in range(5))
        groups = []
        for group in self.groups:
            slots, table, lengths = next(left), next(left), next(left)
            groups.append(Group(slots, table, lengths, tuple(next(left) for _ in group.plan)))
        inputs = Inputs(*(None if each is None else next(left) for each in self.inputs))
        return Batch(token_ids, positions, owners, starts, rows, tuple(groups), inputs)


def leaves(batch: Any) -> list[Any]:
    """The arrays or tensors of a HostBatch, a Batch or a part of one, flat, in the order of the fields."""
    if batch is None:
        return []
    return [leaf for each in batch for leaf in leaves(each)] if isinstance(batch, tuple) else [batch]


def mapped(batch: Any, call: Callable[[Any], Any]) -> Any:
    """The same with other arrays or tensors in the places of its leaves."""
    if isinstance(batch, tuple):
        parts = [mapped(each, call) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return None if batch is None else call(batch)


class Outputs(NamedTuple):
    """What a step gives, as the model was built for; the tensors hold until the next step."""

    logits: Tensor | None  # [L, V]
    hidden: Tensor | None = None  # [L, H], normalised
    taps: tuple[Tensor, ...] = ()  # [T, H] each: what comes out of the layers that were asked for


@dataclass(frozen=True)
class Layout:
    """One tensor of what a layer keeps, per unit. The engine only counts units."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of one page (page_size included), or of one request's state
    unit: str = "page"  # or "request": a state of fixed size
    keeps: int | None = None  # positions that later tokens can see; None: all
    shares: int = 1  # devices of an SPMD platform that each keep one equal part

    @property
    def nbytes(self) -> int:
        """Of one unit, on one device."""
        return int(np.prod(self.shape)) * self.dtype.itemsize // self.shares


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
    causal: bool = True  # a token sees those before it; False: all of its request's
    source: Literal["self", "cross", "none"] = "self"  # whose K and V are kept; none: nothing is (BERT, ViT)
    shared: int = 0  # V is the first so many numbers of K, and is not kept (MLA, absorbed); 0: V is its own

    def __post_init__(self) -> None:
        assert self.alibi is None or len(self.alibi) == self.heads, "a slope for each head of this rank"
        assert 0 <= self.shared <= self.head_dim, "V is part of K"

    @property
    def cached(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def value_dim(self) -> int:
        """Of a head of V, and of what comes out."""
        return self.shared or self.head_dim


class Place(NamedTuple):
    """Which rank this is of how many, and where they meet."""

    rank: int = 0
    size: int = 1
    endpoint: str = ""


class Extent(NamedTuple):
    """How large steps get."""

    most: Variant  # no step is larger in any of these
    hidden: int  # H, of the model
    vocab: int  # V

    @property
    def workspace(self) -> int:
        """A guess at the bytes that the largest step takes beside weights and state."""
        row = 12 * 4 * self.hidden  # a dozen float32 rows of the hidden size live at once
        return self.most.tokens * row + self.most.rows * self.vocab * 4 * 3  # logits: raw, processed, and a sort


class Estimate(NamedTuple):
    """What a model takes on one device, in bytes, and which steps are worth running ahead where shapes are free."""

    weights: int
    workspace: int  # of the largest step
    captured: int = 0  # what captured steps take beside it
    variants: tuple[Variant, ...] = ()  # in the order in which they are run ahead; decode steps are padded to them


class Memory(NamedTuple):
    """Bytes on a device: what an allocation could take now, what there is, and the most that was in use."""

    free: int
    total: int
    peak: int


@dataclass(frozen=True)
class Form:
    """How a matrix is held, and how a product takes its inputs; plain floats if nothing is said. Known when a model is
    built: what is compiled is compiled for it.

    What is held stands for (value - zero) * scale. Providers of products are registered for kinds: plain, int8, int4
    and fp8, and w8a8, w4a8 and fp8a8 whose activations have 8 bits too.
    """

    kind: str = "plain"
    bits: int = 16  # of a value
    activations: int = 16  # bits: 16 for as they are, 8 for values of the weight's sort
    group: int = 0  # inputs in a row that share a scale; 0: all of an output's
    zeros: bool = False  # there are zero points; without them 4 bits stand for -8..7
    ordered: bool = False  # groups are of inputs in another order than they come in
    dtype: torch.dtype | None = None  # of values that are floats; None: whole numbers

    @property
    def plain(self) -> bool:
        return self.kind == "plain"

    def groups(self, inputs: int) -> int:
        """Scales of an output. What is left at the end is a group too."""
        return -(-inputs // (self.group or inputs))

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Of a canonical matrix [N, K]; not of a plain one, whose type is the weight's."""
        outputs, inputs = shape
        scales = outputs * self.groups(inputs) * (5 if self.zeros else 4)
        return outputs * inputs * self.bits // 8 + scales + 4 * inputs * self.ordered


PLAIN = Form()


class Matrix(NamedTuple):
    """A weight [N, K] as products take it: canonical, as said here, or as place() packed it for their provider.

    8 bits: int8, float8_e4m3fn or float8_e5m2 [N, K]. 4 bits: uint8 [N, K / 2], byte i holds the inputs 2 i (low bits)
    and 2 i + 1 (high bits), each 0..15.
    """

    values: Tensor
    scales: Tensor | None = None  # float32 [N, G], one for each group of inputs
    zeros: Tensor | None = None  # [N, G] uint8 or floats; for whole numbers of 4 bits
    order: Tensor | None = None  # int32 [K]: column i of the values is of input order[i]
    form: Form = PLAIN


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

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the whole checkpoint tensor as it stands in the file, where that holds floats."""
        shape = self.shape if self.total is None else (self.total, *self.shape[1:])
        return shape[::-1] if self.transposed else shape


class OnFile(NamedTuple):
    """A tensor as it stands in a checkpoint."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]  # that it may have


FLOATS = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


class Cut(NamedTuple):
    """A rank's share of a part, as first and last + 1."""

    outputs: tuple[int, int]
    inputs: tuple[int, int]


class Reader(Protocol):
    """How a quantized checkpoint keeps a matrix: its tensors' names, shapes and bits. Hashable; knows no device."""

    def stored(self, part: Part) -> dict[str, OnFile]:
        """The tensors that the part is in, by name."""

    def form(self, cut: Cut) -> Form:
        """What matrix() finds; ValueError where a share cuts what cannot be cut."""

    def matrix(self, part: Part, cut: Cut, tensors: Mapping[str, Tensor]) -> Matrix:
        """The share of it, canonical; nothing else is unpacked."""

    def floats(self, part: Part, cut: Cut, tensors: Mapping[str, Tensor]) -> Tensor:
        """The share of it, dequantized: float32 [N, K]."""


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
    form: Form = PLAIN  # what place() makes of it
    reader: Reader | None = None  # of a quantized checkpoint; None: it holds floats
    shared: bool = False  # another layer wants the same tensors in this form: a tied head. Set by the loader
    stack: int = 0  # matrices, one per expert; 0: it is no stack

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what this rank keeps."""
        shape, each = list(self.parts[0].shape), self.parts[: len(self.parts) // (self.stack or 1)]
        shape[self.axis] = sum(stop - start for start, stop in (part.ranges[self.rank] for part in each))
        return (self.stack, *shape) if self.stack else tuple(shape)

    @property
    def nbytes(self) -> int:
        """Of what this rank keeps, in its form."""
        return math.prod(self.shape) * self.dtype.itemsize if self.form.plain else self.form.num_bytes(self.shape)

    @property
    def stored(self) -> dict[str, OnFile]:
        """The checkpoint tensors that it is made of, by name."""
        if self.reader is None:
            return {part.source: OnFile(part.stored_shape, FLOATS) for part in self.parts}
        return {name: each for part in self.parts for name, each in self.reader.stored(part).items()}

    def local(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's floats, in the checkpoint's type where it holds floats; a view where that is possible."""
        slices = self.pieces(tensors)
        if not self.stack:
            return slices[0] if len(slices) == 1 else torch.cat(slices, self.axis)
        stacked, count = slices[0].new_empty(self.shape), len(slices) // self.stack
        for index, matrix in enumerate(stacked):
            torch.cat(slices[index * count : (index + 1) * count], self.axis, out=matrix)
        return stacked

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's slice of each part, in order, in floats."""
        if self.reader is not None:
            return [self.reader.floats(part, cut, tensors).to(self.dtype) for part, cut in self._whole()]
        return [self._slice(part, tensors[part.source]) for part in self.parts]

    def matrices(self, tensors: Mapping[str, Tensor]) -> list[Matrix]:
        """This rank's slice of each part of a quantized checkpoint, canonical, in order."""
        assert self.reader is not None, "floats are quantized by ops.quantize.canonical()"
        return [self.reader.matrix(part, cut, tensors) for part, cut in self._whole()]

    def cut(self, part: Part) -> Cut:
        """This rank's share of the part, within the tensor that it is stored in."""
        start, stop = (part.offset + each for each in part.ranges[self.rank])
        outputs, inputs = part.shape
        return Cut((0, outputs), (start, stop)) if self.axis else Cut((start, stop), (0, inputs))

    def _whole(self) -> list[tuple[Part, Cut]]:
        """Each part with its cut, which ends within it."""
        assert all(part.ranges[self.rank][1] <= part.shape[self.axis] for part in self.parts), "it has no padding"
        return [(part, self.cut(part)) for part in self.parts]

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
