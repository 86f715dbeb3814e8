"""Logits processors: code of the user's that edits a whole step's logits, or one request's at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from quintet.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from quintet.config import EngineConfig
    from quintet.engine.request import Request
    from quintet.interface.platform import Device


T = TypeVar("T")
RowFunction = Callable[[Sequence[int], Sequence[int], "Tensor"], "Tensor"]
"""(prompt ids, output ids, logits [V] float32) -> logits [V]; may overwrite the logits."""


@dataclass(frozen=True)
class AddedRequest:
    """A request that entered the batch. `token_ids` is the engine's own list and grows as tokens are drawn: read it."""

    row: int
    params: SamplingParams
    token_ids: Sequence[int]  # the prompt, then the output
    num_prompt: int


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of the rows since the last step; apply it in the order of its fields.

    `removed` and the first of each pair in `moved` count rows of the last step, the rest rows of this one. All moves
    happen at once: read every source before writing a target. A request that waits a step is removed, then added again.
    """

    size: int  # rows of this step
    removed: tuple[int, ...]
    moved: tuple[tuple[int, int], ...]  # (old row, new row) of those that stay in another place
    added: tuple[AddedRequest, ...]


class LogitsProcessor(ABC):
    """Edits the logits of a step. Rows must not depend on each other, or a request's tokens depend on its neighbours.

    What an instance may know of a request is in its `params` (`extra_args` is there for that) and its tokens.
    """

    def __init__(self, vocab_size: int, device: "Device") -> None:
        """Once per engine; `device.to_device([arrays])` brings arrays to where the logits are."""
        self.vocab_size = vocab_size
        self.device = device

    @classmethod  # noqa: B027  most have nothing to check
    def validate(cls, params: SamplingParams) -> None:
        """At admission: raises ParameterError (or ValueError) on params that it cannot serve."""

    @classmethod
    def make(cls, vocab_size: int, device: "Device", config: "EngineConfig") -> "LogitsProcessor":
        """The engine's instance."""
        return cls(vocab_size, device)

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the likeliest token always stays the likeliest: it is then left out for greedy requests."""

    @abstractmethod
    def update(self, update: BatchUpdate | None) -> None:
        """Called before each step's apply(); None: the same requests in the same rows, each one token longer."""

    @abstractmethod
    def apply(self, logits: "Tensor") -> "Tensor":
        """logits [R, V] float32 -> the same shape; may overwrite them. They are on the host where torch cannot compute
        with what the device holds."""


class ProcessorFailed(RuntimeError):
    """A per-request processor raised, for the request in `row`. The other rows can be sampled without it."""

    def __init__(self, row: int, processor: str, reason: object) -> None:
        super().__init__(f"logits processor {processor} failed: {reason}")
        self.row = row


class RequestLogitsProcessor(LogitsProcessor):
    """Turns a function per request into a batch's processor: define for_request() and nothing else."""

    def __init__(self, vocab_size: int, device: "Device") -> None:
        super().__init__(vocab_size, device)
        self._rows: dict[int, tuple[AddedRequest, RowFunction]] = {}

    @abstractmethod
    def for_request(self, params: SamplingParams) -> RowFunction | None:
        """The function that edits this request's logits; None if it does not ask for one."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update(self, update: BatchUpdate | None) -> None:
        if update is not None:
            self._rows = apply_batch_update(self._rows, update, self._enter)

    def apply(self, logits: "Tensor") -> "Tensor":
        for row, (added, function) in self._rows.items():
            ids, num_prompt = added.token_ids, added.num_prompt
            try:
                logits[row] = function(ids[:num_prompt], ids[num_prompt:], logits[row])
            except Exception as error:
                raise ProcessorFailed(row, type(self).__qualname__, repr(error)) from error
        return logits

    def _enter(self, added: AddedRequest) -> tuple[AddedRequest, RowFunction] | None:
        try:
            function = self.for_request(added.params)
        except Exception as error:
            function = _raise_when_called(error)  # apply() knows the row by then
        return None if function is None else (added, function)


def apply_batch_update(
    rows: dict[int, T], update: BatchUpdate, enter: Callable[[AddedRequest], T | None]
) -> dict[int, T]:
    """Returns a processor's values per row after an update; `enter` makes a new request's, None if it needs none."""
    gone, moved = set(update.removed), dict(update.moved)
    kept = {moved.get(row, row): value for row, value in rows.items() if row not in gone}
    for added in update.added:
        value = enter(added)
        if value is not None:
            kept[added.row] = value
    return kept


def batch_update_between(before: Sequence["Request"], after: Sequence["Request"]) -> BatchUpdate:
    """The update that leads from one step's rows to the next's; each request has one row at most."""
    old = {id(request): row for row, request in enumerate(before)}
    moved, added = [], []
    for row, request in enumerate(after):
        source = old.pop(id(request), None)
        if source is None:
            added.append(AddedRequest(row, request.params, request.token_ids, request.num_prompt))
        elif source != row:
            moved.append((source, row))
    return BatchUpdate(len(after), tuple(old.values()), tuple(moved), tuple(added))


def _raise_when_called(error: Exception) -> RowFunction:
    def function(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: "Tensor") -> "Tensor":
        raise error

    return function
