"""Outputs: the message from the engine core to the output processor, and the outputs that users read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import msgspec

if TYPE_CHECKING:
    import numpy as np

    from quintet.lora.request import LoRARequest
    from quintet.parsers import Event, ToolCall


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the token that stands there, then the most likely ones, best first.

    `ids[0]` is the sampled token (in a prompt: the prompt's own) and `rank` its rank, 1 for the most likely.
    `ids[1:]` are the top k with ranks 1..k; the token itself may be among them again. k is 0 for `logprobs=0`.
    """

    ids: list[int]
    values: list[float]
    rank: int


@dataclass(slots=True)
class TokenDelta:
    """Output of one step for one engine request; the core's only message to the text side. Encodes with msgspec.

    An engine request is one completion. A request with n = 1 keeps its id; one with n > 1 becomes n engine requests
    with the ids `child_ids(request_id, n)`. The core never parses an id: OutputProcessor maps ids to requests.

    Rules for the core:
    - Send one whenever a step gave tokens, and exactly one with a finish_reason, last. Nothing after that counts.
      A request that the text side aborts gets none.
    - The token that ended the request (end-of-text or stop token) is among token_ids; stop_reason is that id if the
      caller asked for it in stop_token_ids, None if it is the model's own end-of-text.
    - logprobs has one entry per entry of token_ids if the caller asked for any, else it is None.
    - prompt_logprobs holds positions 1.. of the prompt (position 0 has none) in order. Pieces are joined, so each
      prefill chunk may send its own, with token_ids empty. With n > 1 only those of child 0 are read.
    """

    request_id: str
    token_ids: list[int]  # new ones, in order; may be empty
    finish_reason: str | None = None  # a FinishReason or its value
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached: int = 0  # tokens of the prompt found in the prefix cache
    num_preemptions: int = 0  # so far
    error: str | None = None  # what went wrong, shown to the caller; with finish_reason "error"
    scheduled: float | None = None  # time.monotonic() when its first step was planned
    data: bytes | None = None  # of a text that became numbers: float32
    shape: tuple[int, ...] = ()  # of these
    kv_transfer_params: dict[str, Any] | None = None  # where its pages wait for another engine; with a finish_reason
    routed_experts: bytes | None = None  # of tokens that were computed since the last delta: uint8, uint16 or int32
    routed_shape: tuple[int, ...] = ()  # of these: [tokens, layers, k]


def child_ids(request_id: str, n: int) -> list[str]:
    """The ids of the engine requests that make one request with n completions, in the order of their index."""
    return [request_id] if n == 1 else [f"{request_id}#{index}" for index in range(n)]


class Logprob(msgspec.Struct, gc=False):
    """One token's log-probability at one position. Answers hold millions of them, which the garbage collector passes
    over: it would stop everything else for as long as it walks them."""

    logprob: float
    rank: int | None = None  # 1 is the most likely
    decoded_token: str | None = None  # None without detokenization


LogprobsAt = dict[int, Logprob]  # token id -> its log-probability, at one position


@dataclass(slots=True)
class FlatLogprobs(Sequence[Any]):
    """Log-probabilities of many positions in a few lists of numbers, with vLLM's names: a sequence of LogprobsAt, or
    None at the first position of a prompt, each made when it is read.

    Entries of position i are those from start_indices[i] up to end_indices[i] of the other lists.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # in nats
    ranks: list[int | None] = field(default_factory=list)  # 1 is the most likely
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, at: LogprobsAt | None) -> None:
        """Adds a position; None has no entries."""
        self.add((token_id, each.logprob, each.rank, each.decoded_token) for token_id, each in (at or {}).items())

    def extend(self, positions: Iterable[LogprobsAt | None]) -> None:
        """Adds positions."""
        for at in positions:
            self.append(at)

    def add(self, entries: Iterable[tuple[int, float, int | None, str | None]]) -> None:
        """Adds a position, given as token ids, log-probabilities, ranks and texts."""
        self.start_indices.append(len(self.token_ids))
        for token_id, value, rank, text in entries:
            self.token_ids.append(token_id)
            self.logprobs.append(value)
            self.ranks.append(rank)
            self.decoded_tokens.append(text)
        self.end_indices.append(len(self.token_ids))

    def copy(self) -> "FlatLogprobs":
        """Returns one that does not grow with this one."""
        return FlatLogprobs(*(getattr(self, each.name).copy() for each in fields(self)))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            part = FlatLogprobs()
            part.extend(self[at] for at in range(*index.indices(len(self))))
            return part
        places = range(self.start_indices[index], self.end_indices[index])
        found = {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at]) for at in places
        }
        return found or None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of time.monotonic(), and its token counts.

    A request's outputs share one, so an earlier output sees it go on.
    """

    arrival_time: float
    first_scheduled_time: float | None = None  # its first step was planned; of n completions, that of the first to run
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0  # of all completions together
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """From arrival to the end of the last completion."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time

    @property
    def time_in_queue(self) -> float | None:
        """From arrival to the first step."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def prefill_time(self) -> float | None:
        """From the first step to the first token."""
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """From the first token to the last; 0 where there is one."""
        return _between(self.first_token_time, self.last_token_time)

    @property
    def inference_time(self) -> float | None:
        """From the first step to the last token."""
        return _between(self.first_scheduled_time, self.last_token_time)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n completions. With output_kind DELTA text, token_ids, logprobs, reasoning and content are the
    new part only.

    `text` is what the model wrote. What that is made of, chats alone say: the fields after `error`.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None  # of all tokens so far; None if logprobs were not asked for
    logprobs: "list[LogprobsAt] | FlatLogprobs | None" = None  # one entry per token
    finish_reason: str | None = None  # "stop", "length", "repetition", "abort" or "error"; None while it runs
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it; None for end-of-text
    error: str | None = None  # with finish_reason "error"
    reasoning: str = ""  # what it thinks
    content: str = ""  # what it says, without thoughts and calls
    tool_calls: "Sequence[ToolCall]" = ()  # all so far; one that is not complete must not be acted on
    message: dict[str, Any] | None = None  # the whole answer, to be added to the conversation; once it has ended
    events: "Sequence[Event]" = ()  # what is new since the output before this one, in order
    lora_request: "LoRARequest | None" = None  # the adapter that it was made with
    routed_experts: "np.ndarray[Any, Any] | None" = None
    """[tokens, layers, k]: experts of prompt and output but for the last token, with enable_return_routed_experts."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One request's outputs so far. `finished` says that no further RequestOutput will come for it."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsAt | None] | FlatLogprobs | None  # one entry per prompt token, the first None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
    pooled: "np.ndarray[Any, np.dtype[np.float32]] | None" = None  # of a text that became numbers: these
    kv_transfer_params: dict[str, Any] | None = None  # where its pages wait for another engine, once it has finished
    lora_request: "LoRARequest | None" = None  # the adapter that it was answered with
    encoder_prompt: str | None = None  # text of what the model's encoder read, where that is text
    encoder_prompt_token_ids: list[int] | None = None
    prompt_token_id_logprobs: "np.ndarray[Any, np.dtype[np.float32]] | None" = None
    """[rows, K] log-probabilities of prompt_logprob_token_ids, once it has finished; -inf where a row was filled up."""
