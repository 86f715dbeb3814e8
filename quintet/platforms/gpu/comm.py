"""The ranks of one model over torch.distributed, and a kernel of our own for small sums where devices allow it.

A sum has the same bits on every rank. Our kernel adds in the order of ranks; all other sums have NCCL's order.
"""

import importlib
import threading
import weakref
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from quintet.interface.platform import Communicator
from quintet.platforms.gpu.processes import ProcessRendezvous

TIMEOUT = timedelta(minutes=5)  # that ranks wait for each other at the start: one may read weights from a slow disk


class SmallAllReduce(Protocol):
    """A sum of few bytes over the ranks."""

    def supports(self, x: Tensor) -> bool: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class GroupCommunicator(Communicator):
    """Collectives of a process group. Nothing of torch.distributed's global state: two engines do not meet."""

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        small_all_reduce: SmallAllReduce | None = None,
        rendezvous: ProcessRendezvous | None = None,
    ) -> None:
        """`met`: how the ranks have met, where they are processes."""
        self.rank, self.size, self._group, self._small_all_reduce = rank, size, group, small_all_reduce
        if rendezvous is not None:
            self.channel = rendezvous.channel
            rendezvous.abort_when_stopped(group)
            weakref.finalize(self, rendezvous.close)
        self._in_rank_order = False
        # its watchdog's thread would outlive the engine, and warn of it at the end of the process; abort() waits for
        # no other rank: its communicator may be gone by now
        weakref.finalize(self, _ended, group)

    def in_rank_order(self) -> "GroupCommunicator":
        """This one, with sums in the order of the ranks whatever their size: libraries choose theirs by it."""
        self._in_rank_order, self._small_all_reduce = True, None
        return self

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._in_rank_order:
            return _ordered_sum(self._gathered(x))
        if self._small_all_reduce is not None and self._small_all_reduce.supports(x):
            return self._small_all_reduce(x)
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._gathered(x).unbind(), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        pieces = self._pieces(x, dim)
        if self._in_rank_order:
            arrived = torch.empty_like(pieces)
            self._group.alltoall_base(arrived.view(-1), pieces.view(-1), [], []).wait()
            return _ordered_sum(arrived)
        own = x.new_empty(pieces.shape[1:])
        self._group._reduce_scatter_base(own.view(-1), pieces.view(-1)).wait()
        return own

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        pieces = self._pieces(x, dim)
        arrived = torch.empty_like(pieces)
        self._group.alltoall_base(arrived.view(-1), pieces.view(-1), [], []).wait()
        return torch.cat(arrived.unbind(), dim)

    def _gathered(self, x: Tensor) -> Tensor:
        """[size, ...]: every rank's."""
        everyone = x.new_empty((self.size, *x.shape))
        self._group._allgather_base(everyone.view(-1), x.contiguous().view(-1)).wait()
        return everyone

    def _pieces(self, x: Tensor, dim: int) -> Tensor:
        """[size, ...]: x cut along dim."""
        if x.shape[dim] % self.size:
            raise ValueError(f"{x.shape[dim]} cannot be cut into {self.size} equal pieces")
        return torch.stack(x.chunk(self.size, dim))


def _ordered_sum(everyone: Tensor) -> Tensor:
    """[size, ...] first to last, in float32."""
    total = everyone[0].float()
    for each in everyone[1:]:
        total = total + each.float()
    return total.to(everyone.dtype)


def _ended(group: Any) -> None:
    abort = getattr(group, "abort", None)
    if abort is not None:
        abort()


class InProcessStores:
    """Stores by which the ranks of this process find each other: one store per endpoint."""

    def __init__(self) -> None:
        self._stores: dict[str, tuple[int, Any]] = {}
        self._lock = threading.Lock()

    def store(self, rank: int, size: int, endpoint: str) -> Any:
        """inproc://name for ranks of this process, tcp://host:port (rank 0 listens) or file:///path for others."""
        dist: Any = importlib.import_module("torch.distributed")
        scheme, _, rest = endpoint.partition("://")
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size} at {endpoint!r}: ranks count from 0")
        if scheme == "inproc":
            with self._lock:
                seats, store = self._stores.setdefault(endpoint, (size, dist.HashStore()))
            if seats != size:
                raise ValueError(f"rank {rank} of {size} at {endpoint!r}, where {seats} ranks meet")
            return store
        if scheme == "tcp":
            host, _, port = rest.rpartition(":")
            return dist.TCPStore(host, int(port), size, rank == 0, timeout=TIMEOUT)
        if scheme == "file":
            return dist.FileStore(rest, size)
        raise ValueError(f"endpoint {endpoint!r} is neither inproc://, tcp://host:port nor file:///path")


def process_group(library: str, store: Any, rank: int, size: int) -> Any:
    """Returns a process group of NCCL (RCCL under ROCm has its name) or XCCL, on the thread's current device."""
    dist: Any = importlib.import_module("torch.distributed")
    made = getattr(dist, f"ProcessGroup{library}", None)
    if made is None:
        raise RuntimeError(
            f"{size} ranks need {library}, and this build of torch has none; set tensor_parallel_size to 1"
        )
    return made(store, rank, size, made.Options())
