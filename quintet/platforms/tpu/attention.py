"""Attention on TPU: plans the work list, shares out the heads over a mesh, and the providers of the paged ops."""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from torch import Tensor

from quintet.interface.platform import Mixer, State
from quintet.interface.types import AttentionSpec, HostBatch, HostGroup, Layout, StepContext
from quintet.interface.types import IntArray as HostArray
from quintet.ops.attention import PlainAttention, paged_attention, write_kv
from quintet.ops.registry import Ops
from quintet.platforms.tpu.device import AXIS
from quintet.platforms.tpu.kernels.blocks import AttentionWork, plan_work
from quintet.platforms.tpu.kernels.plain_attention import attend_plain
from quintet.platforms.tpu.kernels.ragged_attention import attend_paged
from quintet.platforms.tpu.kernels.write_kv import write_paged, write_plain
from quintet.platforms.tpu.torchax_bridge import jax_view, torch_view

LANES = 128  # of a TPU's registers


def mixer(spec: AttentionSpec, ops: Ops, mesh: Mesh | None = None) -> Mixer:
    """Returns the mixer of a layer that keeps K and V, reads an encoder's, or sees its step alone."""
    if spec.source == "cross":
        return CrossAttention(spec, ops, mesh)
    return PlainAttention(spec, ops) if spec.source == "none" else RaggedAttention(spec, ops, mesh)


class RaggedAttention(Mixer):
    """write_kv, then paged_attention, on pages of [2, Hkv, page_size, D]; on a TPU, of full lanes. [1, ...] where V is
    part of K.

    With a mesh, each device sees its own heads, and so do the ops. Heads that do not divide are on every device.
    """

    def __init__(self, spec: AttentionSpec, ops: Ops, mesh: Mesh | None = None) -> None:
        _refuse_unsupported(spec)
        self._ops, self._mesh, self._page_size = ops, mesh, spec.page_size
        device = _device(mesh)
        size = 1 if mesh is None else mesh.shape[AXIS]
        self._cut = spec.heads % size == 0 and spec.kv_heads % size == 0
        size = size if self._cut else 1
        self._heads, self._sinks = (P(None, AXIS, None), P(AXIS)) if self._cut else (P(), P())
        local = replace(spec, heads=spec.heads // size, kv_heads=spec.kv_heads // size)
        self._lanes = HeadLanes.of(local, LANES if device == "tpu" else 1)
        self._spec = self._lanes.spec(local)
        shape = (1 if spec.shared else 2, self._spec.kv_heads * size, spec.page_size, self._spec.head_dim)
        keeps, chunked = spec.window or spec.chunk, spec.chunk is not None
        self.layouts = (Layout(cache_dtype(spec.dtype, device), shape, window=keeps, chunked=chunked, shards=size),)

    @property
    def sharding(self) -> P:
        """Sharding of a cache [P, 2 or 1, Hkv, page_size, D] on the mesh."""
        return P(None, None, AXIS, None, None) if self._cut else P()

    def plan(self, batch: HostBatch, group: HostGroup) -> tuple[HostArray, ...]:
        return tuple(plan_work(batch, group, self._page_size))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor | None, state: State, context: StepContext, sinks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        heads, kv = self._heads, self.sharding
        given = (q, k, v, state[0], context, sinks), (heads, heads, heads, kv, P(), self._sinks)
        out, written = self._per_device(self._attend, *given, (heads, kv))
        return out, (written,)

    def _per_device(self, function: Callable[..., Any], given: tuple[Any, ...], placed: tuple[P, ...], out: Any) -> Any:
        """Calls a function of JAX arrays on each device, with what lies there of those given."""
        if self._mesh is not None:
            function = jax.shard_map(
                function,
                mesh=self._mesh,
                in_specs=placed,
                out_specs=out,
                check_vma=False,  # nothing is communicated, and kernels say nothing about it
            )
        return torch_view(function(*jax_view(given)))

    def _attend(
        self, q: Array, k: Array, v: Array | None, kv: Array, context: Any, sinks: Array | None
    ) -> tuple[Array, Array]:
        """Writes K and V and attends, on one device."""
        written = self._write(k, v, kv, context)
        return self._read(q, written, context, sinks), written

    def _write(self, k: Array, v: Array | None, kv: Array, context: Any) -> Array:
        rows = self._lanes.keys(k), None if v is None else self._lanes.keys(v)
        keys, values, pages, work = torch_view((*rows, kv, context))
        written: Array = jax_view(self._ops.write_kv(pages, keys, values, work))
        return written

    def _read(self, q: Array, kv: Array, context: Any, sinks: Array | None) -> Array:
        wide, pages, work, logits = torch_view((self._lanes.queries(q), kv, context, sinks))
        return self._lanes.outputs(jax_view(self._ops.paged_attention(wide, pages, work, self._spec, logits)))


class CrossAttention(RaggedAttention):
    """paged_attention over an encoder's rows, which keep() has written."""

    def __init__(self, spec: AttentionSpec, ops: Ops, mesh: Mesh | None = None) -> None:
        super().__init__(spec, ops, mesh)
        self.layouts = (replace(self.layouts[0], cross=True),)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor | None, state: State, context: StepContext, sinks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        given = (q, state[0], context, sinks), (self._heads, self.sharding, P(), self._sinks)
        return self._per_device(self._read, *given, self._heads), state

    def keep(self, k: Tensor, v: Tensor, state: State, context: StepContext) -> State:
        given = (k, v, state[0], context), (self._heads, self._heads, self.sharding, P())
        return (self._per_device(self._write, *given, self.sharding),)


def _refuse_unsupported(spec: AttentionSpec) -> None:
    reasons = []
    if spec.cache_dtype != spec.dtype:
        reasons.append(f"a KV cache in {spec.cache_name} is not read by its kernels; set kv_cache_dtype to auto")
    if spec.alibi is not None:
        reasons.append("its kernels add no slopes (ALiBi) to scores; run this model on another platform")
    if reasons:
        raise ValueError(f"attention on this platform: {'; '.join(reasons)}")


@dataclass(frozen=True)
class HeadLanes:
    """Layout of KV heads in a TPU's lanes: so many side by side, then zeros. A TPU gives a narrow row 128 lanes anyway.

    A query is zero in the lanes of the KV heads that are not its own, so attention over wide heads gives the results of
    the narrow ones, and reads the cache once, as it is. Heads with V as a part of K stand alone: V has to come first.
    """

    dim: int  # of a narrow head
    value_dim: int  # of its V
    group: int  # query heads per narrow KV head
    heads: int = 1  # side by side
    padding: int = 0  # lanes of zeros
    shared: int = 0  # lanes of K that are V

    @classmethod
    def of(cls, spec: AttentionSpec, lanes: int) -> "HeadLanes":
        """Heads as wide as a multiple of `lanes`."""
        dim = spec.head_dim
        heads = math.gcd(spec.kv_heads, lanes // dim) if lanes % dim == 0 and not spec.shared else 1
        shared = spec.shared + -spec.shared % lanes
        return cls(dim, spec.value_dim, spec.heads // spec.kv_heads, heads, -dim * heads % lanes, shared)

    def spec(self, narrow: AttentionSpec) -> AttentionSpec:
        """Returns the spec of the wide heads."""
        wide = self.dim * self.heads + self.padding
        return replace(narrow, kv_heads=narrow.kv_heads // self.heads, head_dim=wide, shared=self.shared)

    def keys(self, k: Array) -> Array:
        """[T, Hkv, D] -> [T, Hkv / heads, wide]; values go the same way."""
        return self._pad(k.reshape(k.shape[0], -1, self.heads * self.dim))

    def queries(self, q: Array) -> Array:
        """[T, H, D] -> [T, H, wide]."""
        grouped = q.reshape(q.shape[0], -1, self.heads, self.group, 1, self.dim)
        return self._pad(jnp.where(self._own(), grouped, 0).reshape(*q.shape[:2], -1))

    def outputs(self, out: Array) -> Array:
        """[T, H, wide] -> [T, H, value_dim]."""
        tokens, heads, _ = out.shape
        each = out[..., : self.heads * self.value_dim]
        each = each.reshape(tokens, -1, self.heads, self.group, self.heads, self.value_dim)
        return jnp.where(self._own(), each, 0).sum(-2).reshape(tokens, heads, self.value_dim)

    def _own(self) -> Array:
        """[heads, 1, heads, 1]: which part of a wide head is the query's own."""
        return jnp.eye(self.heads, dtype=bool)[:, None, :, None]

    def _pad(self, x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.padding)))


def _device(mesh: Mesh | None) -> str:
    return jax.default_backend() if mesh is None else str(mesh.devices.flat[0].platform)


def cache_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """The cache's type: the layer's, but int16 with bfloat16's bits in it on JAX's CPU devices.

    XLA moves bfloat16 as float32 there, and would turn the whole cache into it and back to write a single token.
    """
    return torch.int16 if dtype == torch.bfloat16 and device == "cpu" else dtype


_described: ContextVar[bool] = ContextVar("described", default=False)


@contextlib.contextmanager
def for_described_tpu() -> Iterator[None]:
    """Inside, ops are bound and traced for a TPU that need not be here: to lower and compile, not to run."""
    token = _described.set(True)
    try:
        yield
    finally:
        _described.reset(token)


def interpreted() -> bool:
    """True if Pallas kernels run as JAX operations here, because there is no TPU."""
    return jax.default_backend() != "tpu" and not _described.get()


def _no_tpu() -> str | None:
    return "no TPU here: Pallas would run interpreted" if interpreted() else None


def _work(context: StepContext, page_size: int) -> AttentionWork:
    """Returns what RaggedAttention planned; for a batch without a plan, plans it here."""
    if context.group.plan:
        return AttentionWork(*jax_view(context.group.plan))
    batch, group = jax.tree.map(np.asarray, jax_view(context))
    return plan_work(batch, group, page_size)


def _options() -> dict[str, Any]:
    """Returns the options of a Pallas kernel. Read at each call, and compiled in."""
    return {"interpret": interpreted()}


def _writer(
    write: Callable[..., Array], options: Callable[[], dict[str, Any]] = dict
) -> Callable[[Tensor, Tensor, Tensor | None, StepContext], Tensor]:
    def as_kept(x: Array, dtype: Any) -> Array:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype) if dtype == jnp.int16 else x.astype(dtype)

    @partial(jax.jit, static_argnames=("interpret",))
    def update(kv: Array, k: Array, v: Array | None, runs: Array, **options: Any) -> Array:
        return write(kv, as_kept(k, kv.dtype), None if v is None else as_kept(v, kv.dtype), runs, **options)

    def provider(kv: Tensor, k: Tensor, v: Tensor | None, context: StepContext) -> Tensor:
        work = _work(context, kv.shape[3])
        written: Tensor = torch_view(update(*jax_view((kv, k, v)), work.runs, **options()))
        return written

    return provider


def _attender(
    attend: Callable[..., Array], options: Callable[[], dict[str, Any]] = dict
) -> Callable[[Tensor, Tensor, StepContext, AttentionSpec, Tensor | None], Tensor]:
    @partial(jax.jit, static_argnames=("spec", "interpret"))
    def compiled(*arrays: Any, **options: Any) -> Array:
        return attend(*arrays, **options)

    def provider(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        work = _work(context, spec.page_size)
        arrays = jax_view((q, kv, context.group.block_table, work.pieces, sinks))
        attended: Tensor = torch_view(compiled(*arrays, spec=spec, **options()))
        return attended

    return provider


write_kv.provide("jax")(_writer(write_plain))
write_kv.provide("pallas", _no_tpu)(_writer(write_paged, _options))
paged_attention.provide("jax")(_attender(attend_plain))
paged_attention.provide("pallas", _no_tpu)(_attender(attend_paged, _options))
