"""The messages between the engine's process and those that speak HTTP: msgpack over ZeroMQ, typed, never unpickled.

The sockets lie in a folder that only this user can enter. The engine pulls from one that all API processes push to,
and pushes to one of each API process; so do API processes that ask each other.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from quintet.chat.reasoning_tokens import Marks
from quintet.common.metric_types import Row
from quintet.config.schema.error_names import NameTranslation
from quintet.engine.observability.stats import Stats
from quintet.engine.request import CoreRequest
from quintet.outputs import TokenDelta
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import SamplingParams
from quintet.server.backend import ModelInfo

BEAT = 0.5  # seconds between two signs of life of the engine


# To the engine; each says which API process sends it.


class Join(msgspec.Struct, tag=True, array_like=True):
    """An API process has started, and asks for Hello."""

    worker: int


class Asked(msgspec.Struct, array_like=True):
    """One prompt, and the completions that are made of it: they differ in their ids and random numbers alone."""

    prompt_ids: Sequence[int]
    embeds: bytes
    max_tokens: int
    salt: bytes
    arrival: float
    completions: list[tuple[str, tuple[int, int]]]  # Admitted.request_id and .key
    thought: int
    types: bytes = b""


class Submit(msgspec.Struct, tag=True, array_like=True):
    """The requests of one call. What they share is sent, and held by the engine, once, however many they are."""

    worker: int
    params: SamplingParams
    stop_ids: frozenset[int]
    bad_words_ids: tuple[tuple[int, ...], ...]
    priority: int
    grammar: str
    marks: Marks | None
    asked: list[Asked]
    pooling: PoolingParams | None = None
    rows: str = ""

    @classmethod
    def of(cls, worker: int, admitted: Sequence[Sequence[CoreRequest]]) -> "Submit":
        """`admitted` as Admission.admit_all gives it."""
        shared = admitted[0][0]
        asked = [
            Asked(
                each[0].prompt_ids, each[0].embeds, each[0].max_tokens, each[0].salt, each[0].arrival,
                [(one.request_id, one.key) for one in each], each[0].thought, each[0].types,
            )
            for each in admitted
        ]  # fmt: skip
        params = copy.copy(shared.params)
        params.structured_outputs = None  # the grammar says it
        return cls(
            worker, params, shared.stop_ids, shared.bad_words_ids, shared.priority, shared.grammar, shared.marks, asked,
            shared.pooling, shared.rows,
        )  # fmt: skip

    def requests(self) -> list[CoreRequest]:
        """As they were admitted."""
        return [
            CoreRequest(
                request_id, each.prompt_ids, self.params, key, each.max_tokens, self.stop_ids, self.bad_words_ids,
                each.salt, self.priority, each.arrival, index == 0, each.embeds, self.grammar,
                self.marks, each.thought, self.pooling, self.rows, each.types,
            )
            for each in self.asked
            for index, (request_id, key) in enumerate(each.completions)
        ]  # fmt: skip


class Abort(msgspec.Struct, tag=True, array_like=True):
    """End these engine requests; no delta follows."""

    worker: int
    request_ids: list[str]


class Leave(msgspec.Struct, tag=True, array_like=True):
    """That process has died: end all that it had."""

    worker: int


class ResetPrefixCache(msgspec.Struct, tag=True, array_like=True):
    worker: int
    number: int  # of the order


class Sleep(msgspec.Struct, tag=True, array_like=True):
    worker: int
    number: int
    level: int


class WakeUp(msgspec.Struct, tag=True, array_like=True):
    worker: int
    number: int


class StartProfile(msgspec.Struct, tag=True, array_like=True):
    worker: int
    number: int


class StopProfile(msgspec.Struct, tag=True, array_like=True):
    worker: int
    number: int


Order = ResetPrefixCache | Sleep | WakeUp | StartProfile | StopProfile
ToEngine = Join | Submit | Abort | Leave | Order


# From an engine, which says its number.


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The answer to Join, once the model is loaded."""

    served: ModelInfo
    pulse: "Pulse"
    engine: int = 0


class Deltas(msgspec.Struct, tag=True, array_like=True):
    """Token deltas of one step."""

    deltas: list[TokenDelta]
    engine: int = 0


class Pulse(msgspec.Struct, tag=True, array_like=True):
    """A sign of life, every BEAT seconds, in steps that take long too."""

    stats: Stats | None  # None while the model is loading
    stepping: float  # seconds that the step which runs has taken so far
    made: float  # time.monotonic() before the stats were read: of two the later counts, in whichever order they come
    engine: int = 0


class Answer(msgspec.Struct, tag=True, array_like=True):
    """To a numbered order: it is done, or why not."""

    number: int
    refused: str = ""
    trace: tuple[str, int, str] = ("", 0, "")  # of StopProfile: the file's name, steps, why it ended
    engine: int = 0


FromEngine = Hello | Deltas | Pulse | Answer


# From one API process to another.


class AskRows(msgspec.Struct, tag=True, array_like=True):
    """Request for the metrics of another API process."""

    worker: int  # that asks
    number: int  # of the question


class TellRows(msgspec.Struct, tag=True, array_like=True):
    """The answer: every series of that process."""

    worker: int  # that answers
    number: int
    rows: list[Row]


class Alive(msgspec.Struct, tag=True, array_like=True):
    """Sign of life to the first API process, which watches the others: the event loop runs."""

    pid: int


FromPeer = AskRows | TellRows | Alive

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_worker = msgspec.msgpack.Decoder(FromEngine | FromPeer).decode


def engine_address(folder: Path, engine: int = 0) -> str:
    """Returns the address at which that engine pulls."""
    return f"ipc://{folder}/engine{engine}"


def last_words(folder: Path, engine: int) -> Path:
    """Returns the file to which that engine writes what broke it."""
    return folder / f"broken{engine}"


def engine_name(engine: int, count: int) -> str:
    """In what users read."""
    return "the engine" if count == 1 else f"engine {engine} of {count}"


def worker_address(folder: Path, worker: int) -> str:
    """Returns the address at which that API process pulls."""
    return f"ipc://{folder}/api{worker}"


class Orders(msgspec.Struct):
    """Orders of a child process, one line of JSON on its standard input. At its end, the parent has died."""

    folder: str  # of the sockets
    worker: int  # which API process this is; -1: an engine
    num_workers: int
    log_level: str
    engine: dict[str, Any]  # EngineConfig's fields
    server: dict[str, Any]  # ServerConfig's fields
    wording: NameTranslation = NameTranslation()  # how settings were typed
    number: int = 0  # of the engine, among those of this server
    listen: int = -1  # inherited file descriptor that an API process accepts on
