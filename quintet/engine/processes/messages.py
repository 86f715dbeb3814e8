"""Messages between an engine's process and its clients: msgpack over ZeroMQ, typed, never unpickled.

Its clients are the API processes of a server, or one LLM, which counts as API process 0. The sockets lie in a folder
that only this user can enter. The engine pulls from one that all clients push to, and pushes to one of each client.
"""

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quintet.chat.reasoning_tokens import ReasoningMarkerIds
from quintet.engine.observability.stats import Stats
from quintet.engine.parallel.commands import ReloadCommand, ResetPrefixCacheCommand, SleepCommand, WakeUpCommand
from quintet.engine.processes.model_info import ModelInfo
from quintet.engine.request import CoreRequest
from quintet.engine.weight_transfer.orders import WeightOrder
from quintet.lora.request import LoRAReference
from quintet.media.items import MediaItem
from quintet.outputs import TokenDelta
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import SamplingParams
from quintet.transcription.alignment import AlignmentSpan

BEAT = 0.5  # seconds between two signs of life of the engine
FIXABLE: dict[str, type[Exception]] = {
    each.__name__: each for each in (NotImplementedError, MemoryError, ValueError, OSError)
}  # errors that the user can fix, by name
ADAPTER_TAKEN, ADAPTER_UNKNOWN = "taken", "unknown"  # kinds of a refused LoadLoRA, or UnloadLoRA: of its name, its path
_LONGEST = 500  # characters of an error that callers of a server read


class EngineOrders(msgspec.Struct):
    """Start orders of an engine's process."""

    folder: str  # of the sockets
    number: int  # of the engine, among those that are started here
    num_workers: int  # API processes
    engine: dict[str, Any]  # EngineConfig's fields
    log: dict[str, Any] | None = None  # settings of a server's log; None: errors alone are logged
    progress: bool = False  # whether progress of the start is printed
    threads: int = 0  # for torch; 0: as many as it takes by itself
    stats_each_step: bool = False  # whether statistics are sent with the deltas of each step, too
    warm_grammars: bool = False  # whether the vocabulary is prepared for grammars once all clients have joined
    lora_modules: list["LoadLoRA"] = []  # adapters that are served from the start


class Failure(msgspec.Struct):
    """The error that has ended an engine, or its start; its process leaves it in a file."""

    kind: str  # the name of the exception, of one that the user can fix as in FIXABLE
    why: str
    known: bool = True  # whether the text is ours

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """`error`: one that the user can fix."""
        kind = next(name for name, each in FIXABLE.items() if isinstance(error, each))
        return cls(kind, str(error) or type(error).__name__)

    def for_callers(self) -> str:
        """Returns our own message, or only the kind of a foreign error; the log has the rest."""
        return " ".join(self.why.split())[:_LONGEST] if self.known else self.kind

    def leave(self, folder: Path, engine: int) -> None:
        with contextlib.suppress(OSError):
            _failure_file(folder, engine).write_bytes(encode(self))

    @classmethod
    def left(cls, folder: Path, engine: int) -> "Failure | None":
        """Returns what ended an engine; None if it could not write that."""
        try:
            return msgspec.msgpack.decode(_failure_file(folder, engine).read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError):
            return None


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
    completions: list[tuple[str, tuple[int, int]]]  # CoreRequest.request_id and .key
    thought: int
    types: bytes = b""
    scored: bool = True  # of the first completion
    lora: LoRAReference | None = None
    encoder: MediaItem | None = None
    media: tuple[MediaItem, ...] = ()
    alignment: AlignmentSpan | None = None
    sees_prompt: bool = False


class Submit(msgspec.Struct, tag=True, array_like=True):
    """The requests of one call. What they share is sent, and held by the engine, once, however many they are."""

    worker: int
    params: SamplingParams
    stop_ids: frozenset[int]
    bad_words_ids: tuple[tuple[int, ...], ...]
    priority: int
    grammar: str
    marks: ReasoningMarkerIds | None
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
                [(one.request_id, one.random_key) for one in each], each[0].open_reasoning_tokens, each[0].token_types,
                each[0].returns_prompt_logprobs, each[0].lora, each[0].encoder, each[0].media,
                each[0].alignment, each[0].sees_prompt,
            )
            for each in admitted
        ]  # fmt: skip
        params = copy.copy(shared.params)
        params.structured_outputs = None  # the grammar says it
        return cls(
            worker,
            params,
            shared.stop_ids,
            shared.bad_words_ids,
            shared.priority,
            shared.grammar,
            shared.reasoning_marker_ids,
            asked,
            shared.pooling,
            shared.pooled_rows,
        )

    def requests(self) -> list[CoreRequest]:
        """As they were admitted."""
        return [
            CoreRequest(
                request_id, each.prompt_ids, self.params, key, each.max_tokens, self.stop_ids, self.bad_words_ids,
                each.salt, self.priority, each.arrival, each.scored and index == 0, each.embeds, self.grammar,
                self.marks, each.thought, self.pooling, self.rows, each.types, each.lora, each.encoder, each.media,
                each.alignment, each.sees_prompt,
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


class StartProfile(msgspec.Struct, tag=True, array_like=True):
    pass


class StopProfile(msgspec.Struct, tag=True, array_like=True):
    pass


class LoadLoRA(msgspec.Struct, tag=True, array_like=True):
    """Serve an adapter under a name. Engine 0 has the names; the others read an adapter when a request has it."""

    name: str
    path: str  # a folder, or a hub id
    base_model_name: str | None = None
    load_inplace: bool = False  # the name may be there: its next requests get these files


class UnloadLoRA(msgspec.Struct, tag=True, array_like=True):
    """Serve it no more; requests that have it go on."""

    name: str


EngineWork = (
    ResetPrefixCacheCommand | SleepCommand | WakeUpCommand | ReloadCommand | StartProfile | StopProfile | WeightOrder
)
Work = EngineWork | LoadLoRA | UnloadLoRA


class Order(msgspec.Struct, tag=True, array_like=True):
    """Work that is answered."""

    worker: int
    number: int  # of the order
    work: Work


class HasAdapters(msgspec.Struct, tag=True, array_like=True):
    """That process knows the adapters of this version."""

    worker: int
    version: int


class AdapterRead(msgspec.Struct, tag=True, array_like=True):
    """From a thread of the engine's own process: an adapter was read, or was not."""


ToEngine = Join | Submit | Abort | Leave | Order | HasAdapters | AdapterRead


# From an engine, which says its number.


class ServedLoRA(msgspec.Struct, array_like=True, frozen=True):
    """An adapter that requests may name as their model."""

    reference: LoRAReference  # its name is that of requests
    path: str  # as it was given
    base_model_name: str | None
    created: int  # Unix time in seconds
    number: int = 0  # from 0 on, of no other name as long as the server runs: llama.cpp's id


class Adapters(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """All adapters that are served; engine 0 sends them when they change, and each client answers HasAdapters."""

    version: int = 0
    served: tuple[ServedLoRA, ...] = ()
    engine: int = 0


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The answer to Join, once the model is loaded."""

    served: ModelInfo
    pulse: "Pulse"
    engine: int = 0
    adapters: Adapters = Adapters()


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
    kind: str = ""  # of FIXABLE, if it is refused, or ADAPTER_TAKEN, ADAPTER_UNKNOWN
    freed: int = 0  # bytes, of Sleep
    trace: tuple[str, int, str] = ("", 0, "")  # of StopProfile: the file's name, steps, why it ended
    engine: int = 0
    result: bytes = b""  # of a WeightOrder, in msgpack


FromEngine = Hello | Deltas | Pulse | Answer | Adapters

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def engine_address(folder: Path, engine: int = 0) -> str:
    """Returns the address at which that engine pulls."""
    return f"ipc://{folder}/engine{engine}"


def _failure_file(folder: Path, engine: int) -> Path:
    return folder / f"broken{engine}"


def engine_name(engine: int, count: int) -> str:
    """In what users read."""
    return "the engine" if count == 1 else f"engine {engine} of {count}"


def worker_address(folder: Path, worker: int) -> str:
    """Returns the address at which that API process pulls."""
    return f"ipc://{folder}/api{worker}"


def push(context: "zmq.Context[zmq.Socket[bytes]]", address: str, most: int = 0) -> "zmq.Socket[bytes]":
    """Returns a socket that sends to that address and never waits. `most`: messages that may wait in it; 0: any number,
    which the requests that a process may have bound."""
    socket = context.socket(zmq.PUSH)
    socket.sndhwm, socket.linger = most, 0
    socket.reconnect_ivl = 10  # ms; libzmq's 100 would put off the start of who waits for an engine
    socket.connect(address)
    return socket
