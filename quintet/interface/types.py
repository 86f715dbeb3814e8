"""Plain data that crosses the layers of the engine: a step's batch, a cache's layout, a rank's place."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quintet.interface.choices import BlockChoiceSpec as BlockChoiceSpec
from quintet.interface.choices import TokenChoiceSpec as TokenChoiceSpec

IntArray = np.ndarray[Any, np.dtype[np.int32]]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]
PAGE_AXES = 4  # of a page: K and V, heads, tokens, numbers
# inputs with an entry for each token, which is their last axis -> the entry of a padded token
TOKEN_INPUTS = {
    "embed_indices": -1, "rotary_positions": 0, "adapters": 0, "adapter_extras": 0, "token_type_ids": 0, "until": -1,
}  # fmt: skip


class ShapeBucket(NamedTuple):
    """Sizes that settle the shapes of a step: a step is padded to them, captured at them or compiled for them."""

    tokens: int  # T
    requests: int  # R
    rows: int  # L, of logits
    pages: tuple[int, ...]  # N of each group's block_table
    decode: bool = False  # each request brings one token: tokens and requests alone are padded, and that is captured
    inputs: tuple[str, ...] = ()  # which fields of Inputs are there
    width: int = 0  # H, of embeds
    embed_rows: int = 0  # M, of embeds; 0: one for each token

    @property
    def batch(self) -> "HostBatch":
        """A step of this size that does nothing: padding alone or, for `decode`, a token of each request on page 0."""
        nothing, lengths = np.zeros(self.tokens, np.int32), np.full(self.requests, int(self.decode), np.int32)
        count = np.arange(self.requests + 1, dtype=np.int32)
        inputs: dict[str, Any] = {name: nothing + TOKEN_INPUTS.get(name, 0) for name in self.inputs}
        if "embeds" in inputs:
            inputs["embeds"] = np.zeros((self.embed_rows or self.tokens, self.width), np.float32)
        if "rotary_positions" in inputs:
            inputs["rotary_positions"] = np.zeros((3, self.tokens), np.int32)
        return HostBatch(
            token_ids=nothing,
            positions=nothing,
            token_to_seq=count[:-1] if self.decode else np.full(self.tokens, self.requests - 1, np.int32),
            query_start_loc=count if self.decode else np.zeros(self.requests + 1, np.int32),
            logits_indices=count[:-1] if self.decode else np.zeros(self.rows, np.int32),
            groups=tuple(HostGroup(nothing, np.zeros((self.requests, n), np.int32), lengths) for n in self.pages),
            inputs=HostInputs(**inputs),
        )


class Group(NamedTuple):
    """Tensors of a step that the layers of one group share: where each token goes, and what each request keeps.

    The layers of a group keep alike: all positions, or those in a window. The pages of a request that no later token
    can see are 0 in its row of block_table, from the left.

    Layers that read an encoder's rows make a group of their own, behind those of tokens: its seq_lens are numbers of
    rows, and a decoder's step writes nothing there (slot_mapping is 0). In the encoder's pass slot_mapping has a place
    for each row, and the group's other fields are not read.

    Layers that keep one state per request make the last group. Its block_table is [R, 2]: the unit that holds the state
    before the step (0: the request begins, from zeros), and the one that takes the state after it (0: padding). The two
    are never the same, and no unit is written twice in a step or read where it is written, but for 0: a step may be
    run again. Its slot_mapping is 0.

    Where layers have StateSpec.max_drafts, it is [R, 4]. The third number counts drafts of the request's last step that
    were accepted: the first unit keeps what they do, and they come before this step's tokens. The last one counts
    drafts at the end of this step's tokens: the second unit keeps what they do, and its state does not hold them.
    """

    slot_mapping: Tensor  # [T]       where each token's K and V go: page * page_size + offset
    block_table: Tensor  # [R, N]    pages of each request in order, 0 past its end
    seq_lens: Tensor  # [R]       positions kept once this step has run
    plan: tuple[Tensor, ...] = ()  # what Mixer.plan added, for the mixers of this group alone


class Inputs(NamedTuple):
    """Inputs of a step besides token ids; None where its bucket has none."""

    embeds: Tensor | None = None  # [M, H] float32 rows that a step brings itself; no decoder's step has them
    embed_indices: Tensor | None = None  # [T]    the row of the row store in the place of a token's embedding; -1: none
    rotary_positions: Tensor | None = None  # [3, T] rotary positions, where they are not the tokens' positions
    adapters: Tensor | None = None  # [T]    1 + the place of a token's adapter (LoRA) in the pools, 0: none
    # [T]    the same of adapters that have more than A and B of products (magnitudes, biases, an embedding); else 0
    adapter_extras: Tensor | None = None
    token_type_ids: Tensor | None = None  # [T]    segment ids
    # [T]    the last position that a token sees, where it sees some after its own; -1: none. Only where "until" is in
    # Platform.optional_spec_fields; no token sees further ahead than the narrowest window is wide
    until: Tensor | None = None
    # [N, T, H] bytes that the previous pipeline stage sent: the input of the first layer here
    intermediate_tensors: Tensor | None = None
    shared_tensors: Tensor | None = None  # bytes that it sent for layers that read more than that


class Batch(NamedTuple):
    """One step, on the device. T tokens of R requests; L rows of outputs. Whole numbers are int32.

    A padded token writes to page 0, which holds nothing; a padded request has length 0.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]       place of each token in its request
    token_to_seq: Tensor  # [T]       the row of each token's request
    query_start_loc: Tensor  # [R + 1]   request r has the tokens query_start_loc[r] : query_start_loc[r + 1]
    logits_indices: Tensor  # [L]       tokens that logits are computed for
    groups: tuple[Group, ...] = ()  # one for each group of layers that keep alike
    inputs: Inputs = Inputs()

    @property
    def one_token_per_request(self) -> bool:
        """True if each request brings one token; logits_indices is then the same tensor as token_to_seq."""
        return self.logits_indices is self.token_to_seq and self.query_start_loc.shape[0] - 1 == self.token_ids.shape[0]


class StepContext(NamedTuple):
    """Attention metadata of a step, as a mixer gets it: the whole batch, and the part of the mixer's own group."""

    batch: Batch
    group: Group


class HostGroup(NamedTuple):
    """A Group on the host."""

    slot_mapping: IntArray
    block_table: IntArray
    seq_lens: IntArray
    plan: tuple[IntArray, ...] = ()


class HostInputs(NamedTuple):
    """Inputs on the host."""

    embeds: FloatArray | None = None
    embed_indices: IntArray | None = None
    rotary_positions: IntArray | None = None
    adapters: IntArray | None = None
    adapter_extras: IntArray | None = None
    token_type_ids: IntArray | None = None
    until: IntArray | None = None


class HostBatch(NamedTuple):
    """The same step on the host, built by the engine."""

    token_ids: IntArray
    positions: IntArray
    token_to_seq: IntArray
    query_start_loc: IntArray
    logits_indices: IntArray
    groups: tuple[HostGroup, ...] = ()
    inputs: HostInputs = HostInputs()

    def leaves(self) -> list[Any]:
        """Its arrays, flat, in the order of the fields; what is None is left out. As the function, and faster."""
        token_ids, positions, token_to_seq, query_start_loc, logits_indices, groups, inputs = self
        found: list[Any] = [token_ids, positions, token_to_seq, query_start_loc, logits_indices]
        for slot_mapping, block_table, seq_lens, plan in groups:
            found += (slot_mapping, block_table, seq_lens, *plan)
        return found if inputs is _NO_INPUTS else found + [each for each in inputs if each is not None]

    def on(self, tensors: Iterable[Tensor]) -> Batch:
        """The Batch of these tensors, which stand for leaves()."""
        tensors = tuple(tensors)
        token_ids, positions, token_to_seq, query_start_loc, logits_indices = tensors[:5]
        groups, at = [], 5
        for group in self.groups:
            slot_mapping, block_table, seq_lens = tensors[at : at + 3]
            at += 3 + len(group.plan)
            groups.append(Group(slot_mapping, block_table, seq_lens, tensors[at - len(group.plan) : at]))
        if self.inputs is _NO_INPUTS:
            return Batch(token_ids, positions, token_to_seq, query_start_loc, logits_indices, tuple(groups))
        left = iter(tensors[at:])
        inputs = Inputs(*[None if each is None else next(left) for each in self.inputs])
        return Batch(token_ids, positions, token_to_seq, query_start_loc, logits_indices, tuple(groups), inputs)


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


def map_leaves(batch: Any, call: Callable[[Any], Any]) -> Any:
    """The same with other arrays or tensors in the places of its leaves."""
    if isinstance(batch, tuple):
        parts = [map_leaves(each, call) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return None if batch is None else call(batch)


class Outputs(NamedTuple):
    """Outputs of a step, those that the model was built for; the tensors hold until the next step."""

    logits: Tensor | None  # [L, V]
    hidden_states: Tensor | None = None  # [L, H], normalised
    aux_hidden_states: tuple[Tensor, ...] = ()  # [T, H] each: outputs of the requested layers
    # of a stage that is not the last, for the next: x, perhaps the residual [T, H], and what later layers read besides
    intermediate_tensors: tuple[Tensor, ...] = ()
    routed_experts: tuple[Tensor, ...] = ()  # [T, k] int32 each: experts that each layer's router chose


@dataclass(frozen=True)
class Layout:
    """One tensor of what a layer keeps, per unit. The engine only counts units."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of one page (page_size included), or of one request's state
    unit: str = "page"  # or "request": a state of fixed size, in units of their own
    window: int | None = None  # positions that later tokens can see; None: all
    chunked: bool = False  # those from the last multiple of `window` on, and not the last `window`
    shards: int = 1  # devices of an SPMD platform that each keep one equal part
    cross: bool = False  # of an encoder's rows: written once, by its pass, and seen by each token of the request

    @property
    def nbytes(self) -> int:
        """Bytes of one unit, on one device."""
        return int(np.prod(self.shape)) * self.dtype.itemsize // self.shards


INT4 = torch.uint8  # AttentionSpec.kv_dtype of a cache in groups of 4-bit codes, which torch has no type for


def cache_dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a cache's type: "int4", "int8", "bfloat16"."""
    return "int4" if dtype == INT4 else str(dtype).removeprefix("torch.")


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
    # of the cache; None: dtype. int8 has a scale in each row; INT4 has codes, and a scale and a minimum for each group
    kv_dtype: torch.dtype | None = None
    causal: bool = True  # a token sees those before it; False: all of its request's
    # origin of the kept K and V: the layer's own tokens, or an encoder's rows ("cross": a platform is asked for it only
    # if Platform.optional_spec_fields names it); none: nothing is kept (BERT, ViT)
    source: Literal["self", "cross", "none"] = "self"
    shared: int = 0  # V is the first so many numbers of K, and is not kept (MLA, absorbed); 0: V is its own
    # a token sees itself and those before it from the last multiple of this on (Llama 4); a platform is
    # asked for it only if Platform.optional_spec_fields names it
    chunk: int | None = None
    # a token sees so many tokens at most, which a TokenChoiceSpec's layer has chosen (DeepSeek sparse attention); a
    # platform is asked for it only if Platform.optional_spec_fields names it
    chosen: int = 0
    # a query has a number for each of so many distances, which is added to its scores (Inkling); a platform is asked
    # for it, by Mixer.attend_distances(), only if Platform.optional_spec_fields names it
    distances: int = 0
    # with `chosen`: it counts blocks of so many tokens, of each KV head's own or the same for all, which a
    # BlockChoiceSpec's layer has chosen; a platform is asked for it only if optional_spec_fields has "chosen_blocks"
    chosen_block: int = 0
    ahead: bool = True  # with Inputs.until, its tokens see some after them (Gemma 4: in windowed layers alone)
    # beside its window a token sees entries made of so many tokens each, and K is V (DeepSeek-V4); 0: the window alone;
    # None: layers of any other kind. A platform's mixer() is not asked for it: see Platform.optional_spec_fields
    rate: int | None = None

    def __post_init__(self) -> None:
        latents = bool(self.shared) and self.kv_heads == 1
        assert not self.chosen or self.chosen_block or latents, "tokens are chosen among latents, and blocks"
        assert not self.chosen_block or (self.chosen and not self.shared), "blocks are chosen of K and V"
        assert not self.distances or (self.causal and not self.shared and self.chunk is None), "distances are behind"
        assert self.alibi is None or len(self.alibi) == self.heads, "a slope for each head of this rank"
        assert 0 <= self.shared <= self.head_dim, "V is part of K"
        assert self.chunk is None or (self.causal and self.window is None), "chunks are causal, without windows"

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def cache_name(self) -> str:
        """Name of the cache's type in messages."""
        return "int4" if self.cache_dtype == INT4 else str(self.cache_dtype)

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
    # draft tokens of a request in a step that the op keeps apart from the state (see quintet/ops/states.py); not 0 only
    # if Platform.optional_spec_fields names it
    max_drafts: int = 0

    def __post_init__(self) -> None:
        assert len(self.shape) != PAGE_AXES, "a state has other axes than a page"


LayerSpec = AttentionSpec | StateSpec | TokenChoiceSpec | BlockChoiceSpec  # of a layer that mixes positions


class HeadNorms(NamedTuple):
    """rms_norm()'s parameters for the heads of q and of k."""

    q: Tensor  # [D]
    k: Tensor  # [D]
    eps: float
    offset: float


class RotaryArgs(NamedTuple):
    """Rotary arguments for q and k: of the op rotary, norm_rotary or pair_rotary, by the step's positions."""

    cos_sin: Tensor
    norms: HeadNorms | None = None
    interleaved: bool = False  # which have no norms


class RankInfo(NamedTuple):
    """Rank, number of ranks, and the endpoint where they meet. All stages have equally many ranks, one stage after the
    other: a model of 2 stages on 4 ranks has ranks 0 and 1 in its first."""

    rank: int = 0
    size: int = 1
    endpoint: str = ""
    stages: int = 1

    @property
    def stage_size(self) -> int:
        """Ranks of one stage: they share each of its layers."""
        return self.size // self.stages

    @property
    def stage(self) -> int:
        """This rank's, from 0."""
        return self.rank // self.stage_size


class MaxShape(NamedTuple):
    """Largest sizes of a step."""

    largest: ShapeBucket  # no step is larger in any of these
    hidden: int  # H, of the model
    vocab: int  # V

    @property
    def workspace(self) -> int:
        """A guess at the bytes that the largest step takes beside weights and state."""
        row = 12 * 4 * self.hidden  # a dozen float32 rows of the hidden size live at once
        return self.largest.tokens * row + self.largest.rows * self.vocab * 4 * 3  # logits: raw, processed, and a sort


class Estimate(NamedTuple):
    """Bytes that a model takes on one device, and the steps worth running ahead where shapes are free."""

    weights: int
    workspace: int  # of the largest step
    captured: int = 0  # what captured steps take beside it
    buckets: tuple[ShapeBucket, ...] = ()  # in the order in which they are run ahead; steps are padded to them
    compiled_on_demand: frozenset[int] = frozenset()  # tokens of those that are not run ahead


class Memory(NamedTuple):
    """Bytes on a device: what an allocation could take now, what there is, and the most that was in use."""

    free: int
    total: int
    peak: int
