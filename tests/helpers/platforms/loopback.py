"""A test platform: the ranks of one model are threads of this process, and everything else is the CPU's."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from quintet.config import EngineConfig
from quintet.interface.platform import Capabilities, Communicator, Unavailable
from quintet.interface.types import RankInfo
from quintet.platforms.cpu import PLATFORM as CPU

DEVICES = 3
PATIENCE = 60.0  # seconds that a rank waits for the others before all give up

T = TypeVar("T")


@dataclass
class Room:
    """Where the ranks of one endpoint meet: each leaves its tensor, all have come, each reads."""

    size: int
    desk: list[Tensor] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.desk = [torch.empty(0)] * self.size
        self.barrier = threading.Barrier(self.size, timeout=PATIENCE)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order. They are copies: a rank may overwrite its own as soon as it returns."""
        self.desk[rank] = x.clone()
        self.barrier.wait()
        everyone = list(self.desk)
        self.barrier.wait()
        return everyone


class Loopback(Communicator):
    """One rank's seat in the room."""

    def __init__(self, room: Room, rank: int) -> None:
        self.rank, self.size, self._room = rank, room.size, room

    def all_reduce(self, x: Tensor) -> Tensor:
        return _sum(self._room.exchange(self.rank, x))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._room.exchange(self.rank, x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return _share(_sum(self._room.exchange(self.rank, x)), self.size, dim)[self.rank]

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        pieces = [_share(each, self.size, dim)[self.rank] for each in self._room.exchange(self.rank, x)]
        return torch.cat(pieces, dim)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for each in tensors[1:]:
        total += each
    return total


def _share(x: Tensor, size: int, dim: int) -> Sequence[Tensor]:
    if x.shape[dim] % size:
        raise ValueError(f"{x.shape[dim]} cannot be cut into {size} equal pieces")
    return x.chunk(size, dim)


class LoopbackPlatform(CPU):
    """One instance is shared by the ranks; those that name the same endpoint meet."""

    name = "loopback"

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config)
        self._rooms: dict[str, Room] = {}
        self._lock = threading.Lock()

    @classmethod
    def probe(cls) -> Capabilities | Unavailable:
        return Capabilities(devices=DEVICES, dtypes=(torch.float32, torch.bfloat16), detail="threads of this process")

    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        return config, []

    def connect(self, rank_info: RankInfo) -> Communicator:
        with self._lock:
            room = self._rooms.setdefault(rank_info.endpoint, Room(rank_info.size))
        if room.size != rank_info.size or rank_info.rank >= rank_info.size:
            raise ValueError(f"{rank_info}, where {room.size} ranks meet")
        return Loopback(room, rank_info.rank)


def each_rank(platform: LoopbackPlatform, size: int, work: Callable[[int, str], T]) -> list[T]:
    """work(rank, endpoint) on every rank at once. If one raises, the others stop waiting for it, and this raises."""
    endpoint = f"{size} ranks, meeting {len(platform._rooms)}"
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # it counts per thread
        try:
            results[rank] = work(rank, endpoint)
        except Exception as error:
            errors.append(error)
            if endpoint in platform._rooms:
                platform._rooms[endpoint].barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # the first one is the cause: the others are broken barriers
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
