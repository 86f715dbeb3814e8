"""Sums of few bytes through torch's symmetric memory, where ranks are processes. Unverified on a GPU.

torch 2.11's one-shot kernel (torch/csrc/distributed/c10d/symm_mem): a rank copies its own numbers to where the others
read them, reads all ranks', and adds them in rank order: the same bits everywhere. It ends when all have read.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_RANKS = 8  # that its kernels are unrolled for
# Each rank reads every rank's: beyond this NCCL's two passes move less. A guess until it is measured.
MAX_BYTES = 256 * 1024
DTYPES = (torch.float32, torch.bfloat16)  # that it adds


@dataclass(frozen=True)
class SymmetricMemory:
    """Functions of torch that are used here; a test gives others."""

    empty: Callable[[int], Tensor]  # bytes that other ranks may read, uint8
    rendezvous: Callable[
        [Tensor, str, Any, int, int], None
    ]  # (bytes, name, store, rank, size): opens all ranks' to each
    add: Callable[[Tensor, Tensor, str, str], Tensor]  # (space, x, "sum", name) -> the sum, like x


class SymmetricAllReduce:
    """One rank's part. Every rank makes the same calls in the same order."""

    def __init__(self, library: SymmetricMemory, space: Tensor, name: str) -> None:
        self._add, self._space, self._name = library.add, space, name
        self.device = space.device

    def supports(self, x: Tensor) -> bool:
        nbytes = x.numel() * x.element_size()
        plain = x.is_contiguous() and x.data_ptr() % 16 == 0 and x.dtype in DTYPES
        return plain and 0 < nbytes <= MAX_BYTES and nbytes % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        space = self._space[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        return self._add(space, x, "sum", self._name)


def load(device: torch.device) -> SymmetricMemory | str:
    """torch's, or the reason why it does not serve here."""
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        return f"torch {torch.__version__} has no sums over symmetric memory"
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    dist: Any = importlib.import_module("torch.distributed")

    def meet(space: Tensor, name: str, store: Any, rank: int, size: int) -> None:
        group = dist.ProcessGroup(dist.PrefixStore(f"{name} group", store), rank, size)
        group._set_group_name(name)
        c10d._register_process_group(name, group)  # later versions look for it by that name
        c10d._SymmetricMemory.set_group_info(name, rank, size, dist.PrefixStore(name, store))
        c10d._SymmetricMemory.rendezvous(space, name)

    def empty(nbytes: int) -> Tensor:
        made: Tensor = c10d._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        return made

    return SymmetricMemory(empty, meet, torch.ops.symm_mem.one_shot_all_reduce_copy)


def join(library: SymmetricMemory | str, store: Any, rank: int, size: int, name: str) -> SymmetricAllReduce | str:
    """Meets the other ranks and adds once; or the reason why sums are left to NCCL, on every rank alike."""
    lacking = library if isinstance(library, str) else ""
    if size > MAX_RANKS:
        lacking = f"{size} ranks, and it serves up to {MAX_RANKS}"
    if wrong := _first_failure(store, "begin", rank, size, lacking):
        return wrong
    assert isinstance(library, SymmetricMemory)
    made = _rendezvous(library, store, rank, size, name)
    if wrong := _first_failure(store, "met", rank, size, made if isinstance(made, str) else ""):
        return wrong
    assert isinstance(made, SymmetricAllReduce)
    return _first_failure(store, "tried", rank, size, _trial_failure(made, rank, size)) or made


def _rendezvous(library: SymmetricMemory, store: Any, rank: int, size: int, name: str) -> SymmetricAllReduce | str:
    try:
        space = library.empty(MAX_BYTES)
        library.rendezvous(space, name, store, rank, size)
    except Exception as error:  # of drivers, of devices that do not reach each other, of a torch with other names
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    return SymmetricAllReduce(library, space, name)


def _trial_failure(made: SymmetricAllReduce, rank: int, size: int) -> str:
    """Returns what was wrong with a sum of the ranks' numbers, counted from 1; empty if nothing was."""
    want = size * (size + 1) // 2
    try:
        got = made(torch.full((64,), rank + 1.0, dtype=torch.bfloat16, device=made.device))
    except Exception as error:  # reported to the other ranks, which would wait for it
        return f"{type(error).__name__}: {error}"
    return "" if bool((got == want).all()) else f"a sum gave {float(got.float().mean())}, not {want}"


def _first_failure(store: Any, stage: str, rank: int, size: int, wrong: str) -> str:
    """The first rank's reason that has one: either all go on, or none."""
    store.set(f"symmetric {stage} {rank}", wrong)
    reports = [store.get(f"symmetric {stage} {other}").decode() for other in range(size)]
    return next((f"rank {other}: {each}" for other, each in enumerate(reports) if each), "")
