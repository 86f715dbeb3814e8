"""What a process tells its engines' processes, and they it: msgpack over sockets that only these two have."""

from typing import Any

import msgspec

from quintet.engine.ranks.inbox import Abort, Add, Joint, ResetPrefixCache
from quintet.engine.stats import Stats
from quintet.outputs import TokenDelta


class Orders(msgspec.Struct):
    """What an engine's process reads on its standard input, as a line of JSON. At its end, who started it has died."""

    number: int  # of the engine
    descriptor: int  # of the socket
    threads: int  # that torch was given
    engine: dict[str, Any]  # EngineConfig's fields
    leader: int  # the process that started it
    in_main_thread: bool  # whether the thread that started it ends with that process


class Do(msgspec.Struct, tag=True, array_like=True):
    """Something that is answered."""

    joint: Joint


Letter = Add | Abort | ResetPrefixCache | Do


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The model is loaded."""

    max_model_len: int


class Told(msgspec.Struct, tag=True, array_like=True):
    """After each step, and after letters that come to an idle engine: a sign of life, whatever it gave."""

    deltas: list[TokenDelta]
    stats: Stats


class Done(msgspec.Struct, tag=True, array_like=True):
    """The answer to Do."""

    freed: int = 0  # bytes, of sleep


class Refused(msgspec.Struct, tag=True, array_like=True):
    """What the user can mend: a start, or something that was to be done. `kind` is the error's: see ERRORS."""

    kind: str
    why: str

    @classmethod
    def of(cls, error: Exception) -> "Refused":
        kind = next(name for name, each in ERRORS.items() if isinstance(error, each))
        return cls(kind, str(error) or type(error).__name__)

    def error(self) -> Exception:
        return ERRORS[self.kind](self.why)


class Broke(msgspec.Struct, tag=True, array_like=True):
    """It ends, by what nobody expected."""

    why: str


Reply = Ready | Told | Done | Refused | Broke
ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (NotImplementedError, MemoryError, ValueError, OSError)
}

encode = msgspec.msgpack.Encoder().encode
decode_letter = msgspec.msgpack.Decoder(Letter).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
