"""What rank 0 tells the others: all that its engine is asked, numbered. Who does the same has the same books."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from quintet.engine.request import Admitted


class Add(msgspec.Struct, tag=True, array_like=True):
    admitted: Admitted


class Abort(msgspec.Struct, tag=True, array_like=True):
    request_ids: list[str]


class Compile(msgspec.Struct, tag=True, array_like=True):
    """A request with this grammar will come."""

    grammar: str


class ResetPrefixCache(msgspec.Struct, tag=True, array_like=True):
    pass


class Sleep(msgspec.Struct, tag=True, array_like=True):
    level: int


class WakeUp(msgspec.Struct, tag=True, array_like=True):
    pass


class Reload(msgspec.Struct, tag=True, array_like=True):
    folder: str | None  # None: random ones


class SaveSharded(msgspec.Struct, tag=True, array_like=True):
    folder: str


Item = Add | Abort | Compile | ResetPrefixCache
Joint = Sleep | WakeUp | Reload | SaveSharded  # each rank says how it went


class Inbox(msgspec.Struct, array_like=True):
    """What was asked since the one before; then a step, or something that all do together."""

    number: int
    items: list[Item]
    traced: bool = False  # whether rank 0 traces this step: no rank replays a recorded one then
    joint: Joint | None = None  # None: a step


class Orders(msgspec.Struct):
    """What a rank's process reads on its standard input, as one line of JSON. At its end, rank 0 has died."""

    rank: int
    size: int
    endpoint: str  # where all meet
    threads: int  # that torch was given
    engine: dict[str, Any]  # EngineConfig's fields
    leader: int  # its process
    in_main_thread: bool  # whether the thread that started this process ends with its own
    aloud: bool = False  # whether it says why it ends: where rank 0 is another machine's


_encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Inbox).decode


def encode(number: int, items: Sequence[Any], traced: bool = False, joint: Joint | None = None) -> bytes:
    return _encode([number, items, traced, joint])


def added(admitted: Admitted) -> msgspec.Raw:
    """A new request for an inbox. ValueError if it holds what no other process can be given."""
    params = copy.copy(admitted.params)
    params.structured_outputs = None  # the grammar says it
    try:
        return msgspec.Raw(_encode(Add(replace(admitted, params=params))))
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"request {admitted.request_id!r} cannot be given to other processes ({error}); its parameters must be "
            "plain data where tensor_parallel_size or data_parallel_size is more than 1"
        ) from None


def aborted(request_ids: Sequence[str]) -> Abort:
    return Abort(list(request_ids))
