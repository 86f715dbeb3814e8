"""FlashInfer's attention on our pages, where it is installed: it plans each step on the host. Unverified on a GPU.

Our page [2, Hkv, page_size, D] is what it calls HND. Decode steps that may be captured go through a planner of their
own size, whose inputs stay where they are; all others through one for prompts.
"""

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.ops.attention import page_shape
from quintet.ops.registry import Ops
from quintet.platforms.gpu.buckets import table_width
from quintet.platforms.interface import Attention
from quintet.types import AttentionSpec, Batch, HostBatch, KVLayout

WORKSPACE = 128 * 2**20  # bytes of partial results, what its documentation asks for
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
    if spec.cached not in CACHED:
        reasons.append(f"a cache in {_name(spec.cached)}")
    if spec.head_dim not in HEAD_DIMS:
        reasons.append(f"heads of {spec.head_dim}")
    if spec.alibi is not None:
        reasons.append("slopes (ALiBi) of our choice")
    if spec.sinks:
        reasons.append("sinks")
    return reasons


class FlashInferAttention(Attention):
    """write_kv by the bound op, then FlashInfer over the pages that plan() listed."""

    def __init__(self, spec: AttentionSpec, ops: Ops, planner: "Planner") -> None:
        self.layout = KVLayout(spec.cached, spec.page_size, page_shape(spec))
        self._write, self._planner = ops.write_kv, planner

    def plan(self, batch: HostBatch) -> HostBatch:
        self._planner.plan(batch)
        return batch

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        kv = self._write(kv, k, v, batch)
        return self._planner.run(q, kv), kv


class Planner:
    """What layers that are alike share: one plan per step, and FlashInfer's memory."""

    def __init__(
        self, spec: AttentionSpec, module: Any, empty: Empty, sizes: Sequence[int], mark: Mark = lambda: _nothing
    ) -> None:
        self._mark, self._uploaded = mark, _nothing
        self._spec, self._module, self._empty, self._sizes = spec, module, empty, frozenset(sizes)
        self._most = max(sizes, default=0)
        self._workspace: Tensor | None = None
        self._decoders: dict[tuple[int, int], Any] = {}  # (requests, columns of the page table), as graphs have them
        self._buffers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._prompts: Any = None
        self._active: Any = None

    def plan(self, batch: HostBatch) -> None:
        """Queues the upload of the step's plan; every step, outside any graph.

        It goes through FlashInfer's own pinned memory, which the next plan must not touch before it has arrived.
        """
        self._uploaded()
        spec, requests = self._spec, len(batch.lengths)
        counts = -(-batch.lengths // spec.page_size)
        indptr = np.zeros(requests + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        used = np.arange(batch.page_table.shape[1]) < counts[:, None]
        pages = torch.from_numpy(batch.page_table[used])
        last = torch.from_numpy(((batch.lengths - 1) % spec.page_size + 1).astype(np.int32))
        shape = spec.heads, spec.kv_heads, spec.head_dim, spec.page_size
        how: dict[str, Any] = {
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.softcap,
            "sm_scale": spec.scale,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.cached,
        }
        if len(batch.token_ids) == requests and requests in self._sizes:
            self._active = self._decoder(requests, table_width(batch.page_table.shape[1]))
            self._active.plan(torch.from_numpy(indptr), pages, last, *shape, **how)
        else:
            self._active = self._prefill()
            starts = torch.from_numpy(batch.starts)
            self._active.plan(starts, torch.from_numpy(indptr), pages, last, *shape, causal=True, **how)
        self._uploaded = self._mark()

    def run(self, q: Tensor, kv: Tensor) -> Tensor:
        assert self._active is not None, "plan() comes before the step"
        out: Tensor = self._active.run(q.contiguous(), kv)
        return out

    def _space(self) -> Tensor:
        if self._workspace is None:
            self._workspace = self._empty((WORKSPACE,), torch.uint8).zero_()  # its counters begin at 0
        return self._workspace

    def _decoder(self, requests: int, width: int) -> Any:
        """Of a size, its inputs in memory that stays: what a graph reads, plan() writes."""
        key = requests, width
        if key not in self._decoders:
            if width not in self._buffers:
                sizes = (self._most + 1,), (self._most * width,), (self._most,)
                indptr, indices, last = (self._empty(size, torch.int32) for size in sizes)
                self._buffers[width] = indptr, indices, last
            indptr, indices, last = self._buffers[width]
            self._decoders[key] = self._module.BatchDecodeWithPagedKVCacheWrapper(
                self._space(), "HND", use_cuda_graph=True,
                use_tensor_cores=self._spec.heads // self._spec.kv_heads >= 4,  # fewer rows leave tensor cores idle
                paged_kv_indptr_buffer=indptr[: requests + 1], paged_kv_indices_buffer=indices[: requests * width],
                paged_kv_last_page_len_buffer=last[:requests],
            )  # fmt: skip
        return self._decoders[key]

    def _prefill(self) -> Any:
        if self._prompts is None:
            self._prompts = self._module.BatchPrefillWithPagedKVCacheWrapper(self._space(), "HND")
        return self._prompts


def _nothing() -> None:
    """There is nothing to wait for."""


def trial(spec: AttentionSpec, module: Any, empty: Empty) -> str | None:
    """Runs both kinds of step on a page whose values are all 1, as all results must be; says what was wrong."""
    try:
        kv = empty((2, *page_shape(spec)), torch.uint8 if spec.cached.itemsize == 1 else spec.cached)
        kv = kv.zero_().view(spec.cached)
        kv[:, 1] = torch.ones((), dtype=spec.cached, device=kv.device)
        for starts, sizes in (([0, 1], (1,)), ([0, 2], ())):
            count = starts[-1]
            planner = Planner(spec, module, empty, sizes)
            planner.plan(_trial_batch(count))
            out = planner.run(empty((count, spec.heads, spec.head_dim), spec.dtype).zero_(), kv)
            if not bool((out.float() == 1).all()):
                return f"a step of {count} tokens gave {float(out.float().mean())}, not 1"
    except Exception as error:  # it compiles, links and launches: whatever goes wrong is a reason not to serve
        return f"FlashInfer fails on a small step: {type(error).__name__}: {error}"
    return None


def _trial_batch(count: int) -> HostBatch:
    place = np.arange(count, dtype=np.int32)
    starts, lengths = np.array([0, count], np.int32), np.array([count], np.int32)
    table = np.ones((1, 1), np.int32)
    return HostBatch(place, place, place, np.zeros(count, np.int32), starts, lengths, table, place[-1:])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
