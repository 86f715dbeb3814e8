"""Orders about pauses, weights and workers, which every rank and every engine carries out alike."""

from typing import Any, Literal

import msgspec

MAX_VERSION = 200  # characters of a weight version

PauseMode = Literal["abort", "wait", "keep"]


class UpdateFailed(ValueError):
    """An order failed on a rank, and so on all."""

    def __init__(self, why: str, wrote: bool) -> None:
        """`wrote`: on some rank, weights have changed."""
        super().__init__(why)
        self.wrote = wrote


class PauseCommand(msgspec.Struct, tag=True, array_like=True):
    """Starts no more steps. abort: requests end; wait: those that are there finish first; keep: they stand still."""

    mode: PauseMode = "abort"
    clear_cache: bool = True


class ResumeCommand(msgspec.Struct, tag=True, array_like=True):
    pass


class EndRequestsCommand(msgspec.Struct, tag=True, array_like=True):
    """Ends requests; their last outputs have finish_reason "abort". None: all."""

    request_ids: list[str] | None = None


class RecomputeCommand(msgspec.Struct, tag=True, array_like=True):
    """Empties the prefix cache, and has running requests computed again."""


class InitTransferCommand(msgspec.Struct, tag=True, array_like=True):
    """Opens the way by which tensors come."""

    info: dict[str, Any]


class CloseTransferCommand(msgspec.Struct, tag=True, array_like=True):
    """Closes the way by which tensors come."""


class StartUpdateCommand(msgspec.Struct, tag=True, array_like=True):
    draft: bool = False  # of the draft model (or head) alone


class ReceiveWeightsCommand(msgspec.Struct, tag=True, array_like=True):
    """Takes tensors that come the opened way, or in a segment."""

    info: dict[str, Any]


class CheckUpdateCommand(msgspec.Struct, tag=True, array_like=True):
    """Checks that an update is complete, on all ranks and engines, before it counts on any."""

    partial: bool = False


class FinishUpdateCommand(msgspec.Struct, tag=True, array_like=True):
    version: str | None = None
    keep_kv: bool = False


class FailUpdateCommand(msgspec.Struct, tag=True, array_like=True):
    """Ends an update that failed, here or in another engine."""

    why: str


class SetVersionCommand(msgspec.Struct, tag=True, array_like=True):
    version: str


class CallWorkersCommand(msgspec.Struct, tag=True, array_like=True):
    """Calls a method of every worker by name."""

    method: str
    args: list[Any]
    kwargs: dict[str, Any]


WeightOrder = (
    PauseCommand
    | ResumeCommand
    | EndRequestsCommand
    | RecomputeCommand
    | InitTransferCommand
    | CloseTransferCommand
    | StartUpdateCommand
    | ReceiveWeightsCommand
    | CheckUpdateCommand
    | FinishUpdateCommand
    | FailUpdateCommand
    | SetVersionCommand
    | CallWorkersCommand
)
WEIGHT_ORDERS: tuple[type, ...] = WeightOrder.__args__


def check_version(version: str | None) -> str | None:
    """Returns a weight version. ValueError: it is no short printable text."""
    if version is not None and not (isinstance(version, str) and version.isprintable() and len(version) <= MAX_VERSION):
        raise ValueError(
            f"weight_version is {repr(version)[:80]}; give printable text of {MAX_VERSION} characters at most"
        )
    return version
