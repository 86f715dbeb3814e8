"""FlashInfer's attention on our pages, where it is installed: it plans each step on the host. Unverified on a GPU.

Our page [2, Hkv, page_size, D] is what it calls HND. Decode steps that may be captured go through a planner of their
own size, with inputs that stay where they are; all others through one for prompts.

What a step's plan needs goes up in one copy out of pinned memory: FlashInfer (0.6.4 and 0.7.2.post1 were read) copies
a host's list of pages and waits for the stream, and asks a device for all that lies there. So it is given the pages on
the device, where it copies them onto themselves, and pinned numbers for the rest.
"""

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.interface.platform import Mixer
from quintet.interface.types import AttentionSpec, HostBatch, HostGroup, IntArray, ShapeBucket, StepContext
from quintet.ops.attention import PagedAttention, page_shape
from quintet.ops.registry import Ops
from quintet.platforms.gpu.attention import planned_by
from quintet.platforms.gpu.capture_sizes import table_width

WORKSPACE = 128 * 2**20  # bytes of partial results, what its documentation asks for
PLANS = 8 * 2**20  # bytes of a plan, as its wrappers make room for one each
PINNED = "_pin_memory_int_workspace_buffer"  # of a wrapper: where it writes a plan before that goes up
HEAD_DIMS = (64, 128, 256)
CACHED = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
NEEDED = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")

Empty = Callable[[Sequence[int], torch.dtype], Tensor]  # makes a tensor on the device
Mark = Callable[[], Callable[[], None]]  # marks the end of what is queued; calling the result waits for it


def load() -> Any:
    """The module, or the reason why it does not serve here."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install flashinfer-python)"
    if importlib.util.find_spec("flashinfer_jit_cache") is None and shutil.which("nvcc") is None:
        return "FlashInfer has no compiled kernels (pip install flashinfer-jit-cache), and no nvcc to compile them"
    try:
        module = importlib.import_module("flashinfer")
    except Exception as error:  # a library built for another torch fails in its own ways
        return f"FlashInfer cannot be imported: {type(error).__name__}: {error}"
    missing = [name for name in NEEDED if not hasattr(module, name)]
    return f"this version of FlashInfer lacks {', '.join(missing)}" if missing else module


def refusals(spec: AttentionSpec) -> list[str]:
    """Everything about the layer that its kernels lack."""
    reasons = []
    if spec.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"queries in {_name(spec.dtype)}")
    if spec.cache_dtype not in CACHED:
        reasons.append(f"a cache in {_name(spec.cache_dtype)}")
    if spec.head_dim not in HEAD_DIMS:
        reasons.append(f"heads of {spec.head_dim}")
    if spec.alibi is not None:
        reasons.append("slopes (ALiBi) of our choice")
    if spec.sinks:
        reasons.append("sinks")
    if spec.shared:
        reasons.append("V as a part of K")
    if spec.chunk is not None:
        reasons.append("chunks")
    if not spec.causal:
        reasons.append("layers that are not causal")
    return reasons


def mixer(spec: AttentionSpec, ops: Ops, planner: "FlashInferPlanner") -> Mixer:
    """Returns a mixer that writes by the bound ops; FlashInfer then attends to the pages that the planner listed."""

    def attend(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        return planner.run(planned_by(context.group), q, kv)

    return PagedAttention(spec, ops, attend=attend)


def _nothing() -> None:
    """Waits for nothing."""


@dataclass(frozen=True)
class DeviceFunctions:
    """Memory and stream functions of a rank that FlashInfer works with."""

    empty: Empty
    space: Tensor  # WORKSPACE, of zeros at first; layers run one after the other
    mark: Mark = lambda: _nothing
    pinned: Callable[[int], Tensor] = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
    copy: Callable[[Tensor, Tensor], Any] = Tensor.copy_


class FlashInferPlanner:
    """Planner that equal layers share: a plan for each group that has some of them, known by a number."""

    def __init__(
        self, spec: AttentionSpec, module: Any, device_functions: DeviceFunctions, sizes: Sequence[int]
    ) -> None:
        self._made = lambda: GroupPlanner(spec, module, device_functions, sizes)
        self._groups: dict[int, GroupPlanner] = {}

    def plan(self, number: int, batch: HostBatch, group: HostGroup) -> None:
        if number not in self._groups:
            self._groups[number] = self._made()
        self._groups[number].plan(batch, group)

    def run(self, number: int, q: Tensor, kv: Tensor) -> Tensor:
        assert number in self._groups, "plan() comes before the step"
        return self._groups[number].run(q, kv)


class GroupPlanner:
    """One plan per step, of the layers of one group that are alike."""

    def __init__(self, spec: AttentionSpec, module: Any, means: DeviceFunctions, sizes: Sequence[int]) -> None:
        self._device_functions, self._uploaded = means, _nothing
        self._spec, self._module, self._sizes = spec, module, frozenset(sizes)
        self._most = max(sizes, default=0)
        self._decoders: dict[tuple[int, int], Any] = {}  # (requests, columns of the table), as graphs have them
        self._buffers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._prompts: Any = None
        self._active: Any = None
        # of the plan: only one wrapper's is in use at a time, so all share it; another group's is in use beside it
        self._plans = means.empty((PLANS,), torch.uint8)
        self._staged: Tensor | None = None

    def plan(self, batch: HostBatch, group: HostGroup) -> None:
        """Queues the upload of the step's plan; every step, outside any graph, and waits for nothing but the plan's
        pinned memory: FlashInfer's own must not be written before the last plan has left it."""
        self._uploaded()
        spec, requests = self._spec, len(group.seq_lens)
        decodes = len(batch.token_ids) == requests and requests in self._sizes
        width = table_width(group.block_table.shape[1])
        self._active = self._decoder(requests, width) if decodes else self._prefill()
        (starts, indptr, last, kept), pages = self._sent(batch, group, self._buffers[width][1] if decodes else None)
        shape = spec.heads, spec.kv_heads, spec.head_dim, spec.page_size
        how: dict[str, Any] = {
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.softcap,
            "sm_scale": spec.scale,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.cache_dtype,
            "seq_lens": kept,
        }
        if decodes:
            self._active.plan(indptr, pages, last, *shape, **how)
        else:
            self._active.plan(starts, indptr, pages, last, *shape, causal=True, **how)
        self._uploaded = self._device_functions.mark()

    def _sent(self, batch: HostBatch, group: HostGroup, into: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """Pinned: where tokens begin and where pages do, what is on last pages, and in all that are listed. On the
        device, or into the beginning of `into`: the pages."""
        indptr, pages, last = page_indices(batch, group, self._spec)
        kept = ((np.diff(indptr) - 1) * self._spec.page_size + last).astype(np.int32)
        arrays = batch.query_start_loc, indptr, last, kept, pages
        here = self._device_functions.pinned(4 * sum(map(len, arrays))).view(torch.int32)
        parts = list(here.split([len(each) for each in arrays]))
        for part, each in zip(parts, arrays, strict=True):
            part.copy_(torch.from_numpy(each))
        there = self._device_functions.empty((len(pages),), torch.int32) if into is None else into[: len(pages)]
        self._device_functions.copy(there, parts[-1])
        return parts[:-1], there

    def run(self, q: Tensor, kv: Tensor) -> Tensor:
        out: Tensor = self._active.run(q.contiguous(), kv)
        return out

    def _decoder(self, requests: int, width: int) -> Any:
        """Returns the wrapper of a size, with inputs in memory that stays: a graph reads what plan() writes."""
        key = requests, width
        if key not in self._decoders:
            if width not in self._buffers:
                sizes = (self._most + 1,), (self._most * width,), (self._most,)
                indptr, indices, last = (self._device_functions.empty(size, torch.int32) for size in sizes)
                self._buffers[width] = indptr, indices, last
            indptr, indices, last = self._buffers[width]
            wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
                self._device_functions.space, "HND", use_cuda_graph=True,
                use_tensor_cores=self._spec.heads // self._spec.kv_heads >= 4,  # fewer rows leave tensor cores idle
                paged_kv_indptr_buffer=indptr[: requests + 1], paged_kv_indices_buffer=indices[: requests * width],
                paged_kv_last_page_len_buffer=last[:requests],
            )  # fmt: skip
            self._decoders[key] = self._sharing(wrapper)
        return self._decoders[key]

    def _prefill(self) -> Any:
        if self._prompts is None:
            self._prompts = self._sharing(
                self._module.BatchPrefillWithPagedKVCacheWrapper(self._device_functions.space, "HND")
            )
        return self._prompts

    def _sharing(self, wrapper: Any) -> Any:
        """With the group's room for plans in the place of its own, on the device and in pinned memory."""
        wrapper.reset_workspace_buffer(self._device_functions.space, self._plans)
        if self._staged is None:
            self._staged = getattr(wrapper, PINNED, None)
        elif hasattr(wrapper, PINNED):
            setattr(wrapper, PINNED, self._staged)
        return wrapper


def planned_bytes(buckets: Sequence[ShapeBucket], groups: int) -> int:
    """Returns bytes of one kind of layers in so many groups, beside WORKSPACE: plans, and what captured steps read."""
    decode = [each for each in buckets if each.decode]
    most = max((each.requests for each in decode), default=0)
    widths = {width for each in decode for width in each.pages}
    return groups * (PLANS + sum(4 * (most * width + 2 * most + 1) for width in widths))


def page_indices(batch: HostBatch, group: HostGroup, spec: AttentionSpec) -> tuple[IntArray, IntArray, IntArray]:
    """(where each request's pages begin [R + 1], pages, tokens on each request's last page [R]).

    Pages that lie whole behind the window are left out: their place in the block table may hold page 0, and weights of
    0 would not keep its numbers out. The rest gives tokens' positions to each other; FlashInfer needs no more.
    """
    size, lengths = spec.page_size, group.seq_lens
    counts, behind = -(-lengths // size), np.zeros_like(lengths)
    if spec.window is not None:
        behind = np.maximum(lengths - np.diff(batch.query_start_loc) - (spec.window - 1), 0) // size
    columns = np.arange(group.block_table.shape[1])
    pages = group.block_table[(columns >= behind[:, None]) & (columns < counts[:, None])]
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(counts - behind, out=indptr[1:])
    return indptr, pages, ((lengths - 1) % size + 1).astype(np.int32)


def trial(spec: AttentionSpec, module: Any, means: DeviceFunctions) -> str | None:
    """Runs both kinds of step on a page with values of 1, as all results must be; returns what was wrong."""
    try:
        kv = means.empty((2, *page_shape(spec)), torch.uint8 if spec.cache_dtype.itemsize == 1 else spec.cache_dtype)
        kv = kv.zero_().view(spec.cache_dtype)
        kv[:, 1] = torch.ones((), dtype=spec.cache_dtype, device=kv.device)
        for starts, sizes in (([0, 1], (1,)), ([0, 2], ())):
            count = starts[-1]
            planner = GroupPlanner(spec, module, means, sizes)
            planner.plan(*_trial_step(count))
            out = planner.run(means.empty((count, spec.heads, spec.head_dim), spec.dtype).zero_(), kv)
            if not bool((out.float() == 1).all()):
                return f"a step of {count} tokens gave {float(out.float().mean())}, not 1"
    except Exception as error:  # it compiles, links and launches: whatever goes wrong is a reason not to serve
        return f"FlashInfer fails on a small step: {type(error).__name__}: {error}"
    return None


def _trial_step(count: int) -> tuple[HostBatch, HostGroup]:
    place = np.arange(count, dtype=np.int32)
    group = HostGroup(place, np.ones((1, 1), np.int32), np.array([count], np.int32))
    starts = np.array([0, count], np.int32)
    return HostBatch(place, place, np.zeros(count, np.int32), starts, place[-1:], (group,)), group


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
