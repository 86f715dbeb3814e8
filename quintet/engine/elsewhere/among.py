"""Which rank of one engine gives and takes its part of pages, where ranks are processes: each with its like alone."""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import replace

import msgspec

from quintet.engine.elsewhere.council import Council
from quintet.engine.elsewhere.handoff import Peer
from quintet.engine.elsewhere.taker import Address
from quintet.engine.elsewhere.transfer import Transfer
from quintet.engine.elsewhere.wire import Channel as Wire
from quintet.platforms.interface import Channel
from quintet.types import Place

MOST_SHARED = 32  # characters of an engine's name, behind which a rank's number stands


class Among:
    """This rank among the others, if there are any."""

    def __init__(self, place: Place, channel: Channel | None, council: Council | None) -> None:
        self._channel, self.council = channel, council
        self.rank, self.size = (0, 1) if channel is None else (place.rank, place.size)

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

    def tell_ports(self, transfer: Transfer) -> None:
        """Rank 0's answers say where every rank listens."""
        if self._channel is not None:
            said = self._channel.exchange(msgspec.msgpack.encode(transfer.port))
            transfer.ports = tuple(msgspec.msgpack.decode(each, type=int) for each in said)

    def part(self, engine: str) -> str:
        """What this rank's socket is called on one machine."""
        return f"{engine}.r{self.rank}" if self.rank else engine

    def connecting(self, reach: Callable[[Address], Wire], here: bool) -> Callable[[Address], Wire]:
        """`reach`, of this rank's like."""
        return lambda address: reach(self.address(address, here))

    def address(self, address: Address, here: bool) -> Address:
        """Where another engine's rank of the same number is."""
        if self._channel is None or not isinstance(address, Peer):
            return address
        host = self.part(address.host) if here else address.host
        return replace(address, host=host, port=address.ports[self.rank])
