"""Collectives between the devices of one process: queues meet, and the threads that run the model do not wait."""

import threading

import torch
from quintet.contract import Communicator
from torch import Tensor

from acme.launch import launch

PATIENCE = 60.0  # seconds that a rank's queue waits for the others: one may still capture its steps on a busy host


class Room:
    """Where the ranks of one endpoint meet: each leaves its tensor, all have come, each reads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._desk: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=PATIENCE)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order."""
        self._desk[rank] = x.clone()
        self.meet()
        everyone = list(self._desk)
        self.meet()
        return everyone

    def meet(self) -> None:
        """Waits for all ranks. One that never comes ends the engine: nobody knows any more who is where."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError(
                f"{self.size} ranks were to meet, and after {PATIENCE:.0f} s some had not come: they failed, or run "
                "another model. Start the engine again"
            ) from None


class AcmeCommunicator(Communicator):
    """One rank's seat in the room."""

    def __init__(self, room: Room, rank: int) -> None:
        self.rank, self.size, self._room = rank, room.size, room

    def all_reduce(self, x: Tensor) -> Tensor:
        result: Tensor = launch(self._sum, torch.empty_like, x)
        return result

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        result: Tensor = launch(self._joined, self._joined_shape, x, dim)
        return result

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self._divides(x, dim)
        result: Tensor = launch(self._share_of_sum, self._share, x, dim)
        return result

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        self._divides(x, dim)
        result: Tensor = launch(self._swapped, self._like, x, dim)
        return result

    def _sum(self, x: Tensor) -> Tensor:
        total, *others = self._room.exchange(self.rank, x)
        for each in others:
            total = total + each
        return total

    def _joined(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._room.exchange(self.rank, x), dim)

    def _share_of_sum(self, x: Tensor, dim: int) -> Tensor:
        return self._share(self._sum(x), dim)

    def _swapped(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([self._share(each, dim) for each in self._room.exchange(self.rank, x)], dim)

    def _share(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.size, dim)[self.rank].contiguous()

    def _joined_shape(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.size, dim)

    def _like(self, x: Tensor, dim: int) -> Tensor:
        return torch.empty_like(x)

    def _divides(self, x: Tensor, dim: int) -> None:
        if x.shape[dim] % self.size:
            raise ValueError(f"{x.shape[dim]} cannot be cut into {self.size} equal pieces")
