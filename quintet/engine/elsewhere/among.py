"""Which part of pages each process of an engine gives and takes, and whom of another engine it asks for it."""

import hashlib
import math
import secrets
from dataclasses import replace

import msgspec

from quintet.engine.elsewhere.council import Council
from quintet.engine.elsewhere.cuts import Grid, Kept, heads_of, lie, shares
from quintet.engine.elsewhere.handoff import Peer
from quintet.engine.elsewhere.taker import From
from quintet.engine.elsewhere.transfer import Transfer
from quintet.engine.elsewhere.wire import Part
from quintet.engine.runner import Ranks
from quintet.types import PAGE_AXES

MOST_SHARED = 32  # characters of an engine's name, behind which a rank's number stands


class Among:
    """This rank among the others, if there are any, and whom of another engine it asks for its part of pages."""

    def __init__(self, ranks: Ranks, council: Council | None, words: int | None) -> None:
        """words: of a row; None: nobody may have parts of it."""
        self._place, self._channel, self.council = ranks.workers[0].place, ranks.channel, council
        self.rank, self.size = (0, 1) if self._channel is None else (self._place.rank, self._place.size)
        self._part, self.grid = part_of(ranks), grid_of(ranks, words)

    def name(self, transfer: Transfer) -> None:
        """All have the engine's name of rank 0, and the same names of loans, which nobody can guess."""
        if self._channel is None:
            return
        if len(transfer.engine) > MOST_SHARED:
            raise ValueError(
                f"kv_transfer_config.engine_id={transfer.engine!r}: where ranks are processes it has at most "
                f"{MOST_SHARED} characters; give a shorter one"
            )
        told = self._channel.exchange(msgspec.msgpack.encode((transfer.engine, secrets.token_bytes(32))))[0]
        transfer.engine, secret = msgspec.msgpack.decode(told, type=tuple[str, bytes])
        numbers = iter(range(2**63))
        transfer.loan_name = lambda: hashlib.blake2b(
            next(numbers).to_bytes(8, "little"), digest_size=16, key=secret, person=b"quintet-loans"
        ).hexdigest()

    def tell_ports(self, transfer: Transfer, here: bool) -> None:
        """Rank 0's answers say where every rank listens, and how ranks share the model. here: at sockets of this
        machine."""
        transfer.share, transfer.stages = self._place.share, self._place.stages
        if self._channel is not None:
            said = self._channel.exchange(msgspec.msgpack.encode((transfer.host, transfer.port)))
            told = [msgspec.msgpack.decode(each, type=tuple[str, int]) for each in said]
            transfer.ports, hosts = tuple(port for _, port in told), tuple(host for host, _ in told)
            transfer.hosts = hosts if len(set(hosts)) > 1 and not here else ()

    def socket(self, engine: str, process: int) -> str:
        """What a process's socket is called on one machine."""
        return f"{engine}.r{process}" if process else engine

    def sources(self, peer: Peer, here: bool) -> list[From]:
        """Whom this process asks. here: at a socket of this machine. ValueError says why nobody has its part."""
        stages = self._place.stages
        if peer.stages != stages:
            raise ValueError(f"{peer.place} has {peer.stages} stages, and this engine {stages}; both need as many")
        if peer.processes % stages:
            raise ValueError(f"{peer.place} has {peer.processes} processes for {stages} stages, which cannot be")
        theirs = parts_of(peer.processes // stages, peer.share, self._part.layers)
        ours = parts_of(self.size // stages, self._place.share, self._part.layers)
        if theirs != ours and self.grid is None:
            raise ValueError(
                f"{peer.place} has tensor_parallel_size {peer.share}, and this engine {self._place.share}; pages of "
                "this model cannot be cut by heads here, so both need as many"
            )
        before = self._place.stage * len(theirs)  # processes there of earlier stages
        return [
            From(self._address(peer, before + share.giver, here), theirs[share.giver], share)
            for share in shares(self.grid or (), theirs, ours, self.rank % len(ours))
        ]

    def _address(self, peer: Peer, process: int, here: bool) -> Peer:
        if not peer.ports:
            return peer
        host = peer.hosts[process] if peer.hosts else self.socket(peer.host, process) if here else peer.host
        return replace(peer, host=host, port=peer.ports[process])


def parts_of(processes: int, share: int, layers: tuple[int, int]) -> tuple[Part, ...]:
    """Of each process of a stage, whose ranks they are."""
    count = share // processes
    return tuple(Part(at * count, count, share, layers) for at in range(processes))


def part_of(ranks: Ranks) -> Part:
    """What this process has."""
    place, stage = ranks.workers[0].place, ranks.workers[0].stage
    layers = (stage.layers.start, stage.layers.stop) if place.stages > 1 else (0, 0)
    return Part(place.rank % place.share, len(ranks.workers), place.share, layers)


def grid_of(ranks: Ranks, words: int | None) -> Grid | None:
    """How the pages lie of which each row has so many words; None: not by heads, or nobody knows of how many."""
    found, part, totals = [], part_of(ranks), ranks.workers[0].kv_heads
    for layout, heads in zip(ranks.workers[0].arrangement.layouts, totals, strict=True):
        if heads is None or len(layout.shape) != PAGE_AXES:
            return None
        planes, own, *row = layout.shape
        kept = Kept(planes, heads, math.prod(row) * layout.dtype.itemsize)
        if own != len(heads_of(heads, part.first, part.size)):
            return None
        found.append(kept)
    return tuple(found) if lie(tuple(found), part)[1] == words else None
