"""Orders about weights on all ranks: an error of one is an error of all, and no rank is lost by it."""

from collections.abc import Callable
from typing import Any

import msgspec

from quintet.engine.weight_transfer.controls import Controls
from quintet.engine.weight_transfer.orders import CallWorkersCommand, UpdateFailed, WeightOrder
from quintet.interface.platform import Channel, DeviceLost

MAX_ERROR_BYTES = 600  # bytes of an error that other ranks receive: a message of theirs has 1000 at most
CHUNK_BYTES = 1000  # of results that ranks exchange at a time
MAX_RESULT = 1 << 20  # bytes of a rank's result

Note = tuple[bool, str, bool, list[str]]  # failed, its error, whether it wrote, and what an implicit update lacks


def run_together(channel: Channel, controls: Controls, order: WeightOrder, work: Callable[[], Any]) -> Any:
    """Runs work that the other ranks run at the same time -> its result; for a call of workers, of all ranks.
    UpdateFailed: it failed on one of them."""
    result: Any = None
    own: Exception | None = None
    try:
        result = work()
        encoded = msgspec.msgpack.encode(result)
        if len(encoded) > MAX_RESULT:
            raise ValueError(f"a rank's result has {len(encoded)} bytes; {MAX_RESULT} at most go between processes")
    except DeviceLost:
        raise
    except (TypeError, NotImplementedError) as error:  # of a method's arguments, or of a result that is no plain data
        own, encoded = ValueError(f"{error}; arguments and results are plain data between processes"), b""
    except Exception as error:
        own, encoded = error, b""
    why = "" if own is None else f"{type(own).__name__}: {own}".encode()[:MAX_ERROR_BYTES].decode(errors="ignore")
    pending = [each[:80] for each in controls.pending[:1]]
    notes = [
        msgspec.msgpack.decode(each, type=Note)
        for each in channel.exchange(msgspec.msgpack.encode((own is not None, why, controls.wrote, pending)))
    ]
    wrote = any(note[2] for note in notes)
    failed = [rank for rank, note in enumerate(notes) if note[0]]
    if failed and len(failed) == len(notes):  # as on one rank
        raise UpdateFailed(notes[0][1].partition(": ")[2], wrote) from own
    if failed:
        raise UpdateFailed(f"rank {failed[0]} of {len(notes)}: {notes[failed[0]][1]}", wrote) from own
    if not isinstance(order, CallWorkersCommand):
        return result
    controls.state.pending = next((note[3] for note in notes if note[3]), [])
    return [value for each in _gather(channel, encoded) for value in msgspec.msgpack.decode(each)]


def _gather(channel: Channel, payload: bytes) -> list[bytes]:
    """Returns the payloads of all ranks, in rank order."""
    sizes = [int.from_bytes(each, "big") for each in channel.exchange(len(payload).to_bytes(4, "big"))]
    found = [bytearray() for _ in sizes]
    for start in range(0, max(sizes), CHUNK_BYTES):
        for rank, part in enumerate(channel.exchange(payload[start : start + CHUNK_BYTES])):
            found[rank] += part
    return [bytes(each) for each in found]
