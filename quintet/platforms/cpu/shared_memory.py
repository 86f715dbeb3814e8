"""The ranks of one model over shared memory: processes of this host, or threads of this one.

Every rank adds up the others' numbers itself, from the first to the last: all have the same bits, and every time. The
collectives are kernels, so that a recorded step holds them.
"""

import math
import threading
from typing import Any

import torch
from torch import Tensor

from quintet.interface.platform import Channel, Communicator, SingleRank
from quintet.interface.types import RankInfo
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops.extension import extension, kind_of
from quintet.platforms.cpu.stage_buffers import rank_lost_as_device_lost, stage_buffers_of
from quintet.platforms.host import nameless_file

SHARED, INPROC = "shared://", "inproc://"  # and the number of an open file, or a name


class SharedMemory(Communicator):
    """Collectives of a team. `all_gather` takes any type, sums float32, bfloat16 and float16."""

    def __init__(self, team: Any, channel: Channel | None = None) -> None:
        """`channel`: where it is not the team's own."""
        self.rank, self.size, self._team = team.rank, team.size, team
        self.channel, self.stage_channel = (
            (SharedMemoryChannel(team), stage_buffers_of(team)) if channel is None else (channel, None)
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        x, out = x.contiguous(), empty(x.shape, x.dtype)
        self._team.all_reduce(kind_of(x.dtype), out.data_ptr(), x.data_ptr(), x.numel())
        return out

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        x, dim = x.contiguous(), dim % x.dim()
        shape = [size * (self.size if axis == dim else 1) for axis, size in enumerate(x.shape)]
        out = empty(shape, x.dtype)
        if x.numel():
            row = math.prod(x.shape[dim:]) * x.element_size()
            self._team.all_gather(out.data_ptr(), x.data_ptr(), math.prod(x.shape[:dim]), row)
        return out

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """The root's x, on every rank."""
        x = x.contiguous()
        self._team.broadcast(x.data_ptr(), x.numel() * x.element_size(), root)
        return x

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self._check(x, dim)
        return self.all_reduce(x).chunk(self.size, dim)[self.rank].contiguous()

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        self._check(x, dim)
        everyone = self.all_gather(x.unsqueeze(0), 0)
        return torch.cat([each.chunk(self.size, dim)[self.rank] for each in everyone], dim)

    def all_agree(self, holds: bool) -> bool:
        """True if it holds on every rank. Never within a recording: its result decides what is recorded."""
        votes = self.all_gather(torch.tensor([holds]), 0)
        return bool(votes.all())

    def _check(self, x: Tensor, dim: int) -> None:
        if x.shape[dim] % self.size:
            raise ValueError(f"{x.shape[dim]} cannot be cut into {self.size} equal pieces")


class SharedMemoryChannel(Channel):
    """Channel for messages between these ranks."""

    def __init__(self, team: Any) -> None:
        self._team = team

    def broadcast(self, message: bytes) -> None:
        with rank_lost_as_device_lost():
            self._team.tell(message)

    def receive(self) -> bytes:
        with rank_lost_as_device_lost():
            heard: bytes = self._team.hear()
        return heard

    def exchange(self, message: bytes) -> list[bytes]:
        with rank_lost_as_device_lost():
            notes: list[bytes] = self._team.exchange(message)
        return notes

    def abort(self, reason: str) -> None:
        self._team.stop(reason)

    @property
    def aborted(self) -> str:
        why: str = self._team.stopped()
        return why


class StageCommunicator(SingleRank):
    """The only rank of its stage."""

    def __init__(self, team: Any) -> None:
        self.channel, self.stage_channel = SharedMemoryChannel(team), stage_buffers_of(team)


class UnconnectedCommunicator(Communicator):
    """A rank that never meets the others: what it builds can be looked at, and not run."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank, self.size = rank_info.rank % rank_info.stage_size, rank_info.stage_size

    def all_reduce(self, x: Tensor) -> Tensor:
        raise RuntimeError(f"rank {self.rank} of {self.size} has met no other, and computes nothing")

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self.all_reduce(x)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.all_reduce(x)

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        return self.all_reduce(x)


class SharedFiles:
    """The files that threads of this process share, by the name of their endpoint."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, Any]] = {}
        self._lock = threading.Lock()

    def descriptor(self, rank_info: RankInfo) -> int:
        with self._lock:
            if rank_info.endpoint not in self._files:
                self._files[rank_info.endpoint] = rank_info.size, nameless_file()
            seats, file = self._files[rank_info.endpoint]
        if seats != rank_info.size:
            raise ValueError(
                f"rank {rank_info.rank} of {rank_info.size} at {rank_info.endpoint!r}, where {seats} ranks meet"
            )
        number: int = file.fileno()
        return number


def connect_ranks(rank_info: RankInfo, shared_files: SharedFiles, seconds: float) -> Communicator:
    """The communicator of one of several ranks. They wait for each other when they first compute together."""
    if not 0 <= rank_info.rank < rank_info.size:
        raise ValueError(f"rank {rank_info.rank} of {rank_info.size} at {rank_info.endpoint!r}: ranks count from 0")
    if not rank_info.endpoint:
        return UnconnectedCommunicator(rank_info)
    if rank_info.endpoint.startswith(SHARED):
        descriptor = int(rank_info.endpoint.removeprefix(SHARED))
    elif rank_info.endpoint.startswith(INPROC):
        descriptor = shared_files.descriptor(rank_info)
    else:
        raise ValueError(f"endpoint {rank_info.endpoint!r} is neither {SHARED}FILE nor {INPROC}NAME")
    team = extension().Team(descriptor, rank_info.rank, rank_info.size, seconds, rank_info.stage_size)
    return SharedMemory(team) if rank_info.stage_size > 1 else StageCommunicator(team)
