"""Messages of rank 0 to the other ranks: all calls of its engine, numbered, so that all ranks have the same state."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from quintet.engine.request import CoreRequest
from quintet.engine.weight_transfer.orders import WeightOrder
from quintet.lora.request import LoRAReference


class AddCommand(msgspec.Struct, tag=True, array_like=True):
    core_request: CoreRequest


class AbortCommand(msgspec.Struct, tag=True, array_like=True):
    request_ids: list[str]


class CompileCommand(msgspec.Struct, tag=True, array_like=True):
    """Announces a request with this grammar, so that it is compiled."""

    grammar: str


class LoadAdapterCommand(msgspec.Struct, tag=True, array_like=True):
    """Has an adapter read into host memory, which requests will name."""

    reference: LoRAReference


class DropAdapterCommand(msgspec.Struct, tag=True, array_like=True):
    """Has an adapter leave host memory: no request has it."""

    digest: bytes


class ConfirmAdaptersCommand(msgspec.Struct, tag=True, array_like=True):
    """Asks each rank how far it is in reading adapters."""

    references: list[LoRAReference]
    waits: bool  # for a moment: there is no step to compute


class DraftCostsCommand(msgspec.Struct, tag=True, array_like=True):
    """Sets what steps cost: seconds by their tokens, which rank 0 has measured."""

    seconds: list[float]


class ResetPrefixCacheCommand(msgspec.Struct, tag=True, array_like=True):
    pass


class SleepCommand(msgspec.Struct, tag=True, array_like=True):
    level: int


class WakeUpCommand(msgspec.Struct, tag=True, array_like=True):
    tags: list[str] | None = None  # parts of the engine; None: all


OWN_FOLDER = ""  # the folder that an engine was started on


class ReloadCommand(msgspec.Struct, tag=True, array_like=True):
    folder: str | None  # None: random ones


class SaveShardedCommand(msgspec.Struct, tag=True, array_like=True):
    folder: str


AdapterCommand = LoadAdapterCommand | DropAdapterCommand
OtherCommand = CompileCommand | DraftCostsCommand | ResetPrefixCacheCommand
RequestCommand = AddCommand | AbortCommand | AdapterCommand | OtherCommand
# each rank reports its result
CollectiveCommand = (
    SleepCommand | WakeUpCommand | ReloadCommand | SaveShardedCommand | ConfirmAdaptersCommand | WeightOrder
)


class CommandBatch(msgspec.Struct, array_like=True):
    """Calls since the message before; then a step, or an order that all ranks carry out together."""

    number: int
    items: list[RequestCommand]
    traced: bool = False  # whether rank 0 traces this step: no rank replays a recorded one then
    collective: CollectiveCommand | None = None  # None: a step


class RankStart(msgspec.Struct):
    """Start orders of a rank's process."""

    rank: int
    size: int
    endpoint: str  # where all ranks meet
    threads: int  # for torch
    engine: dict[str, Any]  # EngineConfig's fields
    prints_exit_reason: bool = False  # whether it prints why it ends: where rank 0 is on another machine


_encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(CommandBatch).decode


def encode(number: int, items: Sequence[Any], traced: bool = False, joint: CollectiveCommand | None = None) -> bytes:
    return _encode([number, items, traced, joint])


def make_add(admitted: CoreRequest) -> msgspec.Raw:
    """Returns a new request for an inbox. ValueError if it has a value that cannot be sent to other processes."""
    params = copy.copy(admitted.params)
    params.structured_outputs = None  # `admitted.grammar` has it
    with sent(admitted.request_id):
        return msgspec.Raw(_encode(AddCommand(replace(admitted, params=params))))


@contextlib.contextmanager
def sent(request_id: str) -> Iterator[None]:
    """Context in which a request is encoded; ValueError if it has a value that cannot be sent."""
    try:
        yield
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"request {request_id!r} cannot be given to other processes ({error}); its parameters must be plain data "
            "where tensor_parallel_size or data_parallel_size is more than 1"
        ) from None


def make_abort(request_ids: Sequence[str]) -> AbortCommand:
    return AbortCommand(list(request_ids))
