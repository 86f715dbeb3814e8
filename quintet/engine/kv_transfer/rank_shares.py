"""Parts of pages that each process of an engine sends and receives, and the processes that it asks for its own part."""

import hashlib
import math
import secrets
from dataclasses import replace

import msgspec

from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.kv_transfer.head_slices import PageGrid, SliceSpec, heads_of, producer_shares, row_offsets
from quintet.engine.kv_transfer.p2p.consumer import PageOrigin
from quintet.engine.kv_transfer.p2p.protocol import PagePart
from quintet.engine.kv_transfer.p2p.transfers import P2PTransfer
from quintet.engine.kv_transfer.rank_agreement import RankAgreement
from quintet.engine.kv_transfer_params import LeasePeer
from quintet.interface.types import PAGE_AXES

MAX_NAME = 32  # characters of an engine's name, which a rank's number follows


class RankShares:
    """Place of this rank among the others, if any, and the processes of another engine that it asks for its part of
    pages."""

    def __init__(self, ranks: WorkerGroup, council: RankAgreement | None, words: int | None) -> None:
        """words: int32 words of a row; None: rows are not cut by heads."""
        self._place, self._channel, self.rank_agreement = ranks.workers[0].rank_info, ranks.channel, council
        self.rank, self.size = (0, 1) if self._channel is None else (self._place.rank, self._place.size)
        self._part, grid = part_of(ranks), grid_of(ranks, words)
        self.grid = grid if self.minimum(grid is not None) else None  # all ranks answer a request alike

    def minimum(self, number: int) -> int:
        """Returns the least of all ranks' numbers; every rank calls it at the same point."""
        if self._channel is None:
            return number
        return min(msgspec.msgpack.decode(each, type=int) for each in self._channel.exchange(_encoded(int(number))))

    def agree_on_names(self, transfer: P2PTransfer) -> None:
        """Gives all ranks the engine name of rank 0, and the same loan names, which others cannot guess."""
        if self._channel is None:
            return
        if len(transfer.engine) > MAX_NAME:
            raise ValueError(
                f"kv_transfer_config.engine_id={transfer.engine!r}: where ranks are processes it has at most "
                f"{MAX_NAME} characters; give a shorter one"
            )
        names = self._channel.exchange(msgspec.msgpack.encode((transfer.engine, secrets.token_bytes(32))))[0]
        transfer.engine, secret = msgspec.msgpack.decode(names, type=tuple[str, bytes])
        numbers = iter(range(2**63))
        transfer.make_lease_name = lambda: hashlib.blake2b(
            next(numbers).to_bytes(8, "little"), digest_size=16, key=secret, person=b"quintet-loans"
        ).hexdigest()

    def exchange_addresses(self, transfer: P2PTransfer, here: bool) -> None:
        """Gathers the ports and hosts of all ranks, which rank 0 returns in kv_transfer_params, and how ranks share the
        model. here: at sockets of this machine."""
        transfer.stage_size, transfer.stages = self._place.stage_size, self._place.stages
        if self._channel is not None:
            frames = self._channel.exchange(msgspec.msgpack.encode((transfer.host, transfer.port)))
            addresses = [msgspec.msgpack.decode(each, type=tuple[str, int]) for each in frames]
            transfer.ports, hosts = tuple(port for _, port in addresses), tuple(host for host, _ in addresses)
            transfer.hosts = hosts if len(set(hosts)) > 1 and not here else ()

    def socket_name(self, engine: str, process: int) -> str:
        """Returns the name of a process's socket on one machine."""
        return f"{engine}.r{process}" if process else engine

    def origins(self, peer: LeasePeer, here: bool) -> list[PageOrigin]:
        """Returns the processes that this one asks for pages. here: at a socket of this machine. ValueError says why
        none has its part."""
        stages = self._place.stages
        if peer.stages != stages:
            raise ValueError(f"{peer.host_port} has {peer.stages} stages, and this engine {stages}; both need as many")
        if peer.processes % stages:
            raise ValueError(f"{peer.host_port} has {peer.processes} processes for {stages} stages, which cannot be")
        theirs = parts_of(peer.processes // stages, peer.stage_size, self._part.layers)
        ours = parts_of(self.size // stages, self._place.stage_size, self._part.layers)
        if theirs != ours and self.grid is None:
            raise ValueError(
                f"{peer.host_port} has tensor_parallel_size {peer.stage_size}, and this engine "
                f"{self._place.stage_size}; "
                "both need as many, since pages are not cut by heads here (calculate_kv_scales, a TPU's lanes, a "
                "plugin's layers)"
            )
        before = self._place.stage * len(theirs)  # processes there of earlier stages
        return [
            PageOrigin(self._address(peer, before + share.producer, here), theirs[share.producer], share)
            for share in producer_shares(self.grid or (), theirs, ours, self.rank % len(ours))
        ]

    def _address(self, peer: LeasePeer, process: int, here: bool) -> LeasePeer:
        if not peer.ports:
            return peer
        host = peer.hosts[process] if peer.hosts else self.socket_name(peer.host, process) if here else peer.host
        return replace(peer, host=host, port=peer.ports[process])


_encoded = msgspec.msgpack.Encoder().encode


def parts_of(processes: int, share: int, layers: tuple[int, int]) -> tuple[PagePart, ...]:
    """Returns the part of pages that each process of a stage has."""
    count = share // processes
    return tuple(PagePart(at * count, count, share, layers) for at in range(processes))


def part_of(ranks: WorkerGroup) -> PagePart:
    """Returns the part of pages that this process has."""
    place, stage = ranks.workers[0].rank_info, ranks.workers[0].stage
    layers = (stage.layers.start, stage.layers.stop) if place.stages > 1 else (0, 0)
    return PagePart(place.rank % place.stage_size, len(ranks.workers), place.stage_size, layers)


def grid_of(ranks: WorkerGroup, words: int | None) -> PageGrid | None:
    """Returns the page layout by heads, for rows of `words` words; None: not by heads, or their number is unknown."""
    found, part, totals = [], part_of(ranks), ranks.workers[0].kv_heads
    for layout, heads in zip(ranks.workers[0].kv_cache_layout.layouts, totals, strict=True):
        if heads is None or len(layout.shape) != PAGE_AXES:
            return None
        planes, own, *row = layout.shape
        kept = SliceSpec(planes, heads, math.prod(row) * layout.dtype.itemsize)
        if own != len(heads_of(heads, part.first, part.size)):
            return None
        found.append(kept)
    return tuple(found) if row_offsets(tuple(found), part)[1] == words else None
