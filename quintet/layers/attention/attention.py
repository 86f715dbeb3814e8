"""Self-attention as the families share it: project, normalise, turn, attend, project back."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.types import INT4, AttentionSpec, RotaryArgs
from quintet.interface.weights import Weight
from quintet.layers.attention.key_scales import KeyScales
from quintet.layers.attention.kv_scales import KVScales
from quintet.layers.build import BuildContext, Layer, Shards, replicated, split_heads, vector_weight
from quintet.layers.layer_state import StepState
from quintet.layers.linear import CheckpointLayout, ColumnParallelLinear, column_parallel, row_parallel
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim


@dataclass(frozen=True)
class AttentionSizes:
    """The whole layer's sizes, before it is shared out over ranks, and what a checkpoint calls its tensors."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float | None = None  # None: head_dim ** -0.5
    window: int | None = None
    chunk: int | None = None  # it sees its own chunk of so many tokens alone
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None  # a slope per head, instead of rotary positions
    causal: bool = True
    ahead: bool = True  # tokens of media see one another
    distances: int = 0  # that a query has a number for, which is added to its scores
    uses_kv_cache: bool = True  # K and V, for later steps
    bias: bool = False  # of q, k and v
    output_bias: bool = False
    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    sinks: bool = False  # a logit of each head joins its softmax
    chosen: int = 0  # of so many blocks, which an indexer chooses, a token sees the keys alone; 0: it sees all
    chosen_block: int = 0  # tokens of each
    stored: CheckpointLayout = field(default_factory=CheckpointLayout)
    output_stored: CheckpointLayout = field(default_factory=CheckpointLayout)

    @classmethod
    def from_config(cls, config: Any, **differences: Any) -> "AttentionSizes":
        """The sizes under the names that most configs have, and what a family does otherwise."""
        heads = config.num_attention_heads
        sizes = {"heads": heads, "kv_heads": getattr(config, "num_key_value_heads", None) or heads}
        return cls(hidden=config.hidden_size, head_dim=head_dim(config), **{**sizes, **differences})


class SelfAttention(nn.Module):
    """x [T, hidden] -> [T, hidden]. `rotary` is the model's; norms on q and k are set by the family that has them."""

    def __init__(self, build: BuildContext, shape: AttentionSizes, rotary: Rotary | None) -> None:
        super().__init__()
        queries, keys = split_heads(shape.heads, shape.kv_heads, build.size)
        q, kv = queries.times(shape.head_dim), keys.times(shape.head_dim)
        self.qkv = column_parallel(
            build, shape.hidden, dict(zip(shape.names, (q, kv, kv), strict=True)), shape.bias, shape.stored
        )
        self.out = row_parallel(build, q, (shape.output, shape.hidden), shape.output_bias, shape.output_stored)
        self._heads, self._kv_heads = queries.local(build.rank), keys.local(build.rank)
        self._head_dim, self.rotary = shape.head_dim, rotary
        self.q_norm: nn.Module | None = None  # [T, H, D] -> [T, H, D]
        self.k_norm: nn.Module | None = None
        self.sinks = Sinks(build, queries) if shape.sinks else None
        self.indexer: nn.Module | None = None  # x [T, hidden], cache -> blocks [T, G, C] that its tokens see
        self.shares_kv = False  # by later layers, which attend to what this one keeps
        self.kv_scales = KVScales(build, keys)
        self.key_scales = None
        if build.kv_dtype in (torch.int8, INT4) and shape.bias and shape.stored.num_strips == 1:
            plain = not shape.sinks and shape.softcap is None
            self.key_scales = KeyScales(
                build, self.qkv, (queries, keys), shape.head_dim, rotary, plain and build.kv_dtype == INT4
            )
        self.spec = AttentionSpec(
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5 if shape.scale is None else shape.scale,
            dtype=build.dtype,
            page_size=build.page_size,
            window=shape.window,
            chunk=shape.chunk,
            softcap=shape.softcap,
            sinks=shape.sinks,
            chosen=shape.chosen,
            chosen_block=shape.chosen_block,
            alibi=None if shape.alibi is None else shape.alibi[slice(*queries.ranges[build.rank])],
            kv_dtype=build.kv_dtype,
            causal=shape.causal and build.causal,
            ahead=shape.ahead,
            distances=shape.distances,
            source="self" if shape.uses_kv_cache and build.causal else "none",
        )
        self.mixing = build.make_mixer(self.spec)
        self.mixing.kv_heads = shape.kv_heads

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        out: Tensor = self.out(self._project_and_mix(x, cache))
        return out

    def _project_and_mix(self, x: Tensor, cache: StepState) -> Tensor:
        """Projects x and attends -> [T, H * D]."""
        self._choose_blocks(x, cache)
        return self.mix(*self.project(x), cache)

    def _choose_blocks(self, x: Tensor, cache: StepState) -> None:
        """Has the indexer choose what the tokens of x see, where there is one."""
        if self.indexer is not None:
            cache.chosen = self.indexer(x, cache)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, cache: StepState) -> Tensor:
        """Applies rotary to the q, k and v of project(), and attends -> [T, H * D]."""
        rows = None if self.rotary is None else cache.multimodal_rows(self.rotary)
        if rows is not None:
            table, places = rows
            q, k = self._turn(q, k, places, table)
        elif (turn := self._fused_rotary_args()) is not None:
            return self.mixing.with_rotary(q, k, v, turn, cache, self._sinks).reshape(q.shape[0], -1)
        else:
            q, k = self._apply_rotary(q, k, cache.batch.positions)
        if self.shares_kv:
            cache.shared_kv[self.mixing] = k, v
        return self.attend(q, k, v, cache)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: StepState) -> Tensor:
        """[T, heads, D] each -> [T, H * D]."""
        if self.key_scales is not None and self.k_norm is None:
            q, k = self.key_scales(q, k)
        if not self.kv_scales.enabled:
            return self._mixed(q, k, v, cache).reshape(q.shape[0], -1)
        mixed = self._mixed(*self.kv_scales.scale_inputs(q, k, v), cache)
        return self.kv_scales.scale_output(mixed.reshape(q.shape)).reshape(q.shape[0], -1)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, cache: StepState) -> Tensor:
        if not self.spec.chosen:
            return self.mixing(q, k, v, cache, self._sinks)
        assert cache.chosen is not None, "a layer of chosen blocks has an indexer"
        return self.mixing.attend_chosen(q, k, cache.chosen, cache, v)

    @property
    def _sinks(self) -> Tensor | None:
        return None if self.sinks is None else self.sinks.logits

    def _fused_rotary_args(self) -> RotaryArgs | None:
        """Returns rotary arguments if the mixer itself does what _turned() does; None if it does not, or more is
        done."""
        apart = self.rotary is None or self.shares_kv or self.kv_scales.enabled or self.key_scales is not None
        if (
            apart
            or self.spec.chosen
            or not self.mixing.mixer.fuses_rotary
            or type(self)._apply_rotary is not SelfAttention._apply_rotary
        ):
            return None
        assert self.rotary is not None
        return self.rotary.rotary_args(self.q_norm, self.k_norm)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] -> q [T, H, D], k and v [T, Hkv, D]."""
        sizes = [self._head_dim * count for count in (self._heads, self._kv_heads, self._kv_heads)]
        # first the split, then the heads: a compiler that shards the product sees what belongs together
        q, k, v = (each.reshape(x.shape[0], -1, self._head_dim) for each in self.qkv(x).split(sizes, dim=-1))
        return q, k, v

    def _apply_rotary(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k normalised and turned, as far as the family does so."""
        return self._turn(q, k, positions)

    def _turn(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """q and k normalised and turned; both at once where an op does. `table`: of angles, in the place of the
        model's own."""
        if self.q_norm is not None and self.k_norm is not None:
            if self.rotary is not None and isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
                return self.rotary.norm_and_rotate(q, k, (self.q_norm, self.k_norm), positions, table)
            q, k = self.q_norm(q), self.k_norm(k)
        return (q, k) if self.rotary is None else self.rotary(q, k, positions, table)


class QueryAttention(nn.Module):
    """x [T, hidden] -> [T, hidden], over what another layer keeps: of its own it has queries alone, and no memory."""

    def __init__(self, build: BuildContext, shape: AttentionSizes, rotary: Rotary, norm: RMSNorm) -> None:
        """`shape` and `rotary` are as the other layer's; `norm` is of each head's queries."""
        super().__init__()
        queries, _ = split_heads(shape.heads, shape.kv_heads, build.size)
        q = queries.times(shape.head_dim)
        self.q = column_parallel(build, shape.hidden, {shape.names[0]: q}, shape.bias)
        self.out = row_parallel(build, q, (shape.output, shape.hidden), shape.output_bias)
        self.rotary, self.q_norm, self._head_dim = rotary, norm, shape.head_dim
        self.heads = queries.local(build.rank)

    def queries(self, x: Tensor, cache: StepState, table: Tensor | None = None) -> Tensor:
        """[T, hidden] -> [T, H, D], normalised and turned. `table`: of angles, in the place of the model's own."""
        q = self.q(x).reshape(x.shape[0], -1, self._head_dim)
        q, _ = self.rotary.norm_and_rotate(q, q[:, :1], (self.q_norm, self.q_norm), cache.batch.positions, table)
        return q


class SharedKVAttention(QueryAttention):
    """Attention over what an earlier layer keeps.

    It attends through that layer's mixing, which writes the step's K and V once more, where they are: it asks no more
    of a platform than any layer. On a stage that has not that layer, they are written to a cache that is the stage's.
    """

    def __init__(
        self, build: BuildContext, shape: AttentionSizes, rotary: Rotary, source: SelfAttention, norm: RMSNorm
    ) -> None:
        super().__init__(build, shape, rotary, norm)
        self._source = (source,)  # not a part of this module: it may be another stage's, and what is used of it is here
        self.mixing, self.kv_scales = source.mixing, source.kv_scales
        source.shares_kv = True

    @property
    def source(self) -> SelfAttention:
        """The layer that has the cache which is read."""
        return self._source[0]

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        out: Tensor = self.out(self.source.attend(self.queries(x, cache), *cache.shared_kv[self.mixing], cache))
        return out


class ClippedAttention(SelfAttention):
    """q, k and v kept within `most` of 0, where the family sets it."""

    clip_qkv: float | None = None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        if not self.clip_qkv:
            return q, k, v
        return (
            q.clamp(-self.clip_qkv, self.clip_qkv),
            k.clamp(-self.clip_qkv, self.clip_qkv),
            v.clamp(-self.clip_qkv, self.clip_qkv),
        )


class Sinks(Layer):
    """A logit for each of this rank's heads: what they may look at instead of tokens."""

    def __init__(self, build: BuildContext, heads: Shards) -> None:
        super().__init__(build)
        self._build, self._heads = build, heads
        self.logits: Tensor

    def weights(self, path: str) -> list[Weight]:
        return [vector_weight(self._build, path, self._heads, torch.float32, name="logits")]


class HeadGate(ColumnParallelLinear):
    """Multiplies each head of what attention gives by the sigmoid of a number, a product of the layer's input."""

    def __init__(self, build: BuildContext, hidden: int, heads: Shards) -> None:
        super().__init__(build, replicated(hidden, build.size), {"g_proj": heads})
        self._gating = build.ops.take("squash", "scale_rows")

    def forward(self, x: Tensor, mixed: Tensor) -> Tensor:  # type: ignore[override]  # what it multiplies, beside x
        """x [T, hidden], mixed [T, H D] -> [T, H D]."""
        gates = self._gating.squash(super().forward(x), "sigmoid").reshape(-1, 1)
        gated: Tensor = self._gating.scale_rows(mixed.reshape(len(gates), -1), gates.float()).reshape(mixed.shape)
        return gated
