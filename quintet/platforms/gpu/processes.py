"""Ranks that are processes of one machine: NCCL carries their tensors, connections of this machine the rest."""

import hmac
import tempfile
import threading
from collections.abc import Callable

import torch

from quintet import __version__
from quintet.config import EngineConfig
from quintet.distributed.exchange import MessageExchange, RankLost
from quintet.distributed.messages import RankMessages
from quintet.distributed.rendezvous import TCP, RendezvousTerms, join, key_of
from quintet.interface.platform import Channel
from quintet.interface.types import RankInfo

__all__ = ["TCP", "ProcessRendezvous", "rendezvous"]


class _WatchedExchange(MessageExchange):
    """Notes that report when they stop: a rank may wait in a collective for others that are gone."""

    def __init__(self, sockets: list[int], rank: int, seconds: float) -> None:
        super().__init__(sockets, rank, seconds)
        self._ended: Callable[[], None] | None = None
        self._once = threading.Lock()

    def call_when_stopped(self, ended: Callable[[], None]) -> None:
        """Calls `ended` when the notes stop; at once if they have stopped."""
        self._ended = ended
        if self.stopped():
            self._end()

    def stop(self, why: str) -> None:
        super().stop(why)
        self._end()

    def _end(self) -> None:
        if self._ended is not None and self._once.acquire(blocking=False):
            self._ended()


class ProcessRendezvous:
    """The channel and files that the ranks have in common once all have come."""

    def __init__(
        self,
        channel: Channel,
        notes: _WatchedExchange,
        rank_info: RankInfo,
        folder: "tempfile.TemporaryDirectory[str] | None",
    ) -> None:
        """`place`: its endpoint is the file, in rank 0's `folder`, at which torch's process groups meet."""
        self.channel, self.rank_info, self._notes, self._folder = channel, rank_info, notes, folder

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def abort_when_stopped(self, group: object) -> None:
        """Ends the group's collectives, where it can, once a rank is gone."""
        abort = getattr(group, "abort", None)
        if abort is not None:
            self._notes.call_when_stopped(abort)


def rendezvous(rank_info: RankInfo, config: EngineConfig) -> ProcessRendezvous:
    """Blocks until all ranks have come to tcp://HOST:PORT; ValueError names a missing rank, or settings that differ."""
    key, terms = (
        key_of(rank_info.endpoint),
        RendezvousTerms(config.distributed_timeout_seconds, config.join_timeout_seconds),
    )
    found = join(rank_info, key, {"quintet": __version__, "torch": str(torch.__version__)}, terms)
    notes = _WatchedExchange(found.sockets, rank_info.rank, terms.seconds)
    seal = hmac.digest(key, b"notes" + found.session, "sha256")
    channel = RankMessages(notes, rank_info, found.connections, seal, terms.seconds, RankLost)
    folder = None
    if rank_info.rank == 0:  # of this user alone
        folder = tempfile.TemporaryDirectory(prefix="quintet-ranks-", ignore_cleanup_errors=True)
    path = channel.exchange(b"" if folder is None else f"{folder.name}/store".encode())[0].decode()
    return ProcessRendezvous(channel, notes, rank_info._replace(endpoint=f"file://{path}"), folder)
