"""Plain data that crosses the layers of the engine: a step's batch, a cache's layout, a weight's place."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.int32]]
Numbers = np.ndarray[Any, np.dtype[np.float32]]
PAGE_AXES = 4  # of a page: K and V, heads, tokens, numbers


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
    """Tensors of a step that the layers of one group share: where each token goes, and what each request keeps.

    The layers of a group keep alike: all positions, or those in a window. The pages of a request that no later token
    can see are 0 in its row of the table, from the left.

    Layers that keep one state per request make the last group. Its table is [R, 2]: the unit that holds the state
    before the step (0: the request begins, from zeros), and the one that takes the state after it (0: padding). The two
    are never the same, and no unit is written twice in a step or read where it is written, but for 0: a step may be
    run again. Its slots are 0.
    """

    slots: Tensor  # [T]       where each token's K and V go: page * page_size + offset (field: slot_mapping)
    table: Tensor  # [R, N]    pages of each request in order, 0 past its end (field: block_table)
    lengths: Tensor  # [R]       positions kept once this step has run (field: seq_lens)
    plan: tuple[Tensor, ...] = ()  # what Mixer.plan added, for the mixers of this group alone


class Inputs(NamedTuple):
    """Inputs of a step besides token ids; None where its variant has none."""

    embeds: Tensor | None = None  # [M, H] float32
    places: Tensor | None = None  # [T]    the row of embeds that stands in a token's place; -1: its id does
    angles: Tensor | None = None  # [3, T] rotary positions, where they are not the tokens' positions
    adapters: Tensor | None = None  # [T]    the adapter's slot, 0: none
    types: Tensor | None = None  # [T]    segment ids
    # [N, T, H] bytes that the previous pipeline stage sent: the input of the first layer here
    handed: Tensor | None = None
    beside: Tensor | None = None  # bytes that it sent for layers that read more than that


class Batch(NamedTuple):
    """One step, on the device. T tokens of R requests; L rows of outputs. Whole numbers are int32.

    A padded token writes to page 0, which holds nothing; a padded request has length 0.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]       place of each token in its request
    owners: Tensor  # [T]       the row of each token's request (field: token_to_seq)
    starts: Tensor  # [R + 1]   row r owns the tokens starts[r]:starts[r + 1] (field: cu_seqlens, query_start_loc)
    rows: Tensor  # [L]       tokens that outputs are computed for (field: logits_indices)
    groups: tuple[Group, ...] = ()  # one for each group of layers that keep alike
    inputs: Inputs = Inputs()

    @property
    def rows_are_tokens(self) -> bool:
        """True if rows are 0, 1, ... T - 1: each request brings one token, and rows are the same tensor as owners."""
        return self.rows is self.owners and self.starts.shape[0] - 1 == self.token_ids.shape[0]


class Books(NamedTuple):
    """Metadata of a step that a mixer gets (field: attention metadata): the whole batch, and its own group's part."""

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
        """Its arrays, flat, in the order of the fields; what is None is left out. As the function, and faster."""
        token_ids, positions, owners, starts, rows, groups, inputs = self
        found: list[Any] = [token_ids, positions, owners, starts, rows]
        for slots, table, lengths, plan in groups:
            found += (slots, table, lengths, *plan)
        return found if inputs is _NO_INPUTS else found + [each for each in inputs if each is not None]

    def on(self, tensors: Iterable[Tensor]) -> Batch:
        """The Batch of these tensors, which stand for leaves()."""
        tensors = tuple(tensors)
        token_ids, positions, owners, starts, rows = tensors[:5]
        groups, at = [], 5
        for group in self.groups:
            slots, table, lengths = tensors[at : at + 3]
            at += 3 + len(group.plan)
            groups.append(Group(slots, table, lengths, tensors[at - len(group.plan) : at]))
        if self.inputs is _NO_INPUTS:
            return Batch(token_ids, positions, owners, starts, rows, tuple(groups))
        left = iter(tensors[at:])
        inputs = Inputs(*[None if each is None else next(left) for each in self.inputs])
        return Batch(token_ids, positions, owners, starts, rows, tuple(groups), inputs)


_NO_INPUTS = HostBatch._field_defaults["inputs"]  # the same object wherever none were given


def leaves(batch: Any) -> list[Any]:
    """The arrays or tensors of a HostBatch, a Batch or a part of one, flat, in the order of the fields."""
    found = []
    for each in batch if isinstance(batch, tuple) else (batch,):
        if isinstance(each, tuple):
            found += leaves(each)
        elif each is not None:
            found.append(each)
    return found


def mapped(batch: Any, call: Callable[[Any], Any]) -> Any:
    """The same with other arrays or tensors in the places of its leaves."""
    if isinstance(batch, tuple):
        parts = [mapped(each, call) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return None if batch is None else call(batch)


class Outputs(NamedTuple):
    """Outputs of a step, those that the model was built for; the tensors hold until the next step."""

    logits: Tensor | None  # [L, V]
    hidden: Tensor | None = None  # [L, H], normalised
    taps: tuple[Tensor, ...] = ()  # [T, H] each: outputs of the requested layers (field: aux hidden states)
    # of a stage that is not the last, for the next: x, perhaps the residual [T, H], and what later layers read besides
    handed_on: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Layout:
    """One tensor of what a layer keeps, per unit. The engine only counts units."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of one page (page_size included), or of one request's state
    unit: str = "page"  # or "request": a state of fixed size, in units of their own
    keeps: int | None = None  # positions that later tokens can see; None: all
    chunked: bool = False  # those from the last multiple of `keeps` on, and not the last so many
    shares: int = 1  # devices of an SPMD platform that each keep one equal part

    @property
    def nbytes(self) -> int:
        """Bytes of one unit, on one device."""
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
    alibi: tuple[float, ...] | None = None  # a slope per head: times how far the key is from the query, off the score
    kv_dtype: torch.dtype | None = None  # of the cache; None: dtype. int8 has a scale in each row
    causal: bool = True  # a token sees those before it; False: all of its request's
    source: Literal["self", "cross", "none"] = "self"  # origin of the kept K and V; none: nothing is (BERT, ViT)
    shared: int = 0  # V is the first so many numbers of K, and is not kept (MLA, absorbed); 0: V is its own
    # a token sees itself and those before it from the last multiple of this on (Llama 4); only what Platform.heeds it
    # is asked for
    chunk: int | None = None

    def __post_init__(self) -> None:
        assert self.alibi is None or len(self.alibi) == self.heads, "a slope for each head of this rank"
        assert 0 <= self.shared <= self.head_dim, "V is part of K"
        assert self.chunk is None or (self.causal and self.window is None), "chunks are causal, without windows"

    @property
    def cached(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def value_dim(self) -> int:
        """Features of a head of V, and of the output."""
        return self.shared or self.head_dim


@dataclass(frozen=True)
class StateSpec:
    """One layer that keeps a state of fixed size per request, as this rank sees it.

    `op` of quintet/ops/states.py says what it computes, and what its mixer is called with.
    """

    op: str
    shape: tuple[int, ...]  # of one request's state, without 4 axes: those are pages'
    dtype: torch.dtype = torch.float32  # of the state

    def __post_init__(self) -> None:
        assert len(self.shape) != PAGE_AXES, "a state has other axes than a page"


class HeadNorms(NamedTuple):
    """rms_norm()'s parameters for the heads of q and of k."""

    q: Tensor  # [D]
    k: Tensor  # [D]
    eps: float
    offset: float


class Turn(NamedTuple):
    """Rotary arguments for q and k: of the op rotary, norm_rotary or pair_rotary, by the step's positions."""

    table: Tensor
    norms: HeadNorms | None = None
    neighbours: bool = False  # which have no norms


class Place(NamedTuple):
    """Rank, number of ranks, and the endpoint where they meet. All stages have equally many ranks, one stage after the
    other: a model of 2 stages on 4 ranks has ranks 0 and 1 in its first."""

    rank: int = 0
    size: int = 1
    endpoint: str = ""
    stages: int = 1

    @property
    def share(self) -> int:
        """Ranks of one stage: they share each of its layers."""
        return self.size // self.stages

    @property
    def stage(self) -> int:
        """This rank's, from 0."""
        return self.rank // self.share


class Extent(NamedTuple):
    """Largest sizes of a step."""

    most: Variant  # no step is larger in any of these
    hidden: int  # H, of the model
    vocab: int  # V

    @property
    def workspace(self) -> int:
        """A guess at the bytes that the largest step takes beside weights and state."""
        row = 12 * 4 * self.hidden  # a dozen float32 rows of the hidden size live at once
        return self.most.tokens * row + self.most.rows * self.vocab * 4 * 3  # logits: raw, processed, and a sort


class Estimate(NamedTuple):
    """Bytes that a model takes on one device, and the steps worth running ahead where shapes are free."""

    weights: int
    workspace: int  # of the largest step
    captured: int = 0  # what captured steps take beside it
    variants: tuple[Variant, ...] = ()  # in the order in which they are run ahead; steps are padded to them
    late: frozenset[int] = frozenset()  # tokens of those that are not run ahead


class Memory(NamedTuple):
    """Bytes on a device: what an allocation could take now, what there is, and the most that was in use."""

    free: int
    total: int
    peak: int
