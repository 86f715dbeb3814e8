"""Messages between a process and its data-parallel engines' processes: msgpack over sockets that only these have."""

from typing import Any

import msgspec

from quintet.engine.observability.stats import Stats
from quintet.engine.parallel.commands import Abort, Add, Joint, ResetPrefixCache
from quintet.outputs import TokenDelta


class Orders(msgspec.Struct):
    """Start orders of an engine's process, which reads them on standard input as a line of JSON. End of file: the
    parent died."""

    number: int  # of the engine
    descriptor: int  # of the socket
    threads: int  # for torch
    engine: dict[str, Any]  # EngineConfig's fields
    leader: int  # the process that started it
    in_main_thread: bool  # whether the thread that started it ends with that process


class Run(msgspec.Struct, tag=True, array_like=True):
    """Order that is answered."""

    joint: Joint


Letter = Add | Abort | ResetPrefixCache | Run


class Ready(msgspec.Struct, tag=True, array_like=True):
    """Reply: the model is loaded."""

    max_model_len: int


class Report(msgspec.Struct, tag=True, array_like=True):
    """Report after each step, and after messages that come to an idle engine: a sign of life, with or without
    deltas."""

    deltas: list[TokenDelta]
    stats: Stats


class Done(msgspec.Struct, tag=True, array_like=True):
    """Reply to Do."""

    freed: int = 0  # bytes, of sleep


class Refused(msgspec.Struct, tag=True, array_like=True):
    """Error that the user can correct, of a start or of an order. `kind`: the name of the exception, see ERRORS."""

    kind: str
    why: str

    @classmethod
    def of(cls, error: Exception) -> "Refused":
        kind = next(name for name, each in ERRORS.items() if isinstance(error, each))
        return cls(kind, str(error) or type(error).__name__)

    def error(self) -> Exception:
        return ERRORS[self.kind](self.why)


class Crashed(msgspec.Struct, tag=True, array_like=True):
    """Report that the engine ends, by an unexpected error."""

    why: str


Reply = Ready | Report | Done | Refused | Crashed
ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (NotImplementedError, MemoryError, ValueError, OSError)
}

encode = msgspec.msgpack.Encoder().encode
decode_letter = msgspec.msgpack.Decoder(Letter).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
