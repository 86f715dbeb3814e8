"""Tensors and notes between pipeline stages, over shelves in their ranks' shared memory: a sender does not wait."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quintet.interface.platform import DeviceLost
from quintet.interface.stage_channel import PreviousStageFailed, StageChannel
from quintet.platforms.cpu.ops.extension import extension

REPORTS, TENSORS = 0, 1  # shelves


@contextmanager
def rank_lost_as_device_lost() -> Iterator[None]:
    """Turns the extension's RankLost into DeviceLost: nothing runs on these ranks any more."""
    try:
        yield
    except extension().RankLost as error:
        raise DeviceLost(str(error)) from None


class StageBuffers(StageChannel):
    """Pipe of a team of several stages."""

    def __init__(self, team: Any) -> None:
        self.stage, self.stages, self._team = team.stage, team.stages, team
        self._begun = self._heard = self._handed = 0  # the last step of each

    def begin(self) -> None:
        self._begun += 1
        self._team.begin(self._begun)

    def receive(self) -> Tensor:
        address, count = self._take((self.stage - 1) * self._team.size + self._team.rank, TENSORS, self._begun)
        if count == extension().NOTHING:
            raise PreviousStageFailed(f"stage {self.stage - 1} of {self.stages} failed in this step")
        return torch.frombuffer((ctypes.c_char * count).from_address(address), dtype=torch.uint8)

    def send(self, tensors: Sequence[Tensor] | None) -> None:
        if self._handed == self._begun:
            return
        count = extension().NOTHING
        if tensors is not None:
            count = sum(each.nbytes for each in tensors)
            self._fits(count)
            at = self._team.place(TENSORS, self._begun)
            for each in tensors:
                whole = each.contiguous()
                ctypes.memmove(at, whole.data_ptr(), each.nbytes)
                at += each.nbytes
        self._handed = self._begun
        self._team.put(TENSORS, self._begun, count)

    def report(self, message: bytes, result: bytes = b"") -> None:
        if self.stage == self.stages - 1:
            self._fits(len(result))
            ctypes.memmove(self._team.place(TENSORS, self._begun), result, len(result))
            self._team.put(TENSORS, self._begun, len(result))
        ctypes.memmove(self._team.place(REPORTS, self._begun), message, len(message))
        self._team.put(REPORTS, self._begun, len(message))

    def collect(self) -> tuple[list[bytes], bytes]:
        self._heard += 1
        size, first = self._team.size, (self.stages - 1) * self._team.size
        notes = [self._bytes(rank, REPORTS) for rank in range(size * self.stages)]
        return notes, self._bytes(first, TENSORS)

    def restart(self) -> None:
        with rank_lost_as_device_lost():
            self._team.exchange(b"")
        self._heard = self._begun

    def _bytes(self, rank: int, shelf: int) -> bytes:
        address, count = self._take(rank, shelf, self._heard)
        return ctypes.string_at(address, count)

    def _take(self, rank: int, shelf: int, step: int) -> tuple[int, int]:
        with rank_lost_as_device_lost():
            found: tuple[int, int] = self._team.take(rank, shelf, step)
        return found

    @staticmethod
    def _fits(count: int) -> None:
        if count > extension().SHELF_BYTES:
            raise ValueError(
                f"a step gives {count / 2**30:.1f} GiB to other stages, which take 1 GiB; lower max_num_batched_tokens "
                "or ask for fewer log-probabilities"
            )


def stage_buffers_of(team: Any) -> StageBuffers | None:
    """None where there is one stage."""
    return StageBuffers(team) if team.stages > 1 else None
