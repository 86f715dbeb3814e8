"""Logits processors that were written for vLLM's interface of batches ("v1"), and the names that they import."""

import enum
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from quintet.config import EngineConfig
from quintet.engine.sampling import logits_processors as ours
from quintet.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from quintet.interface.platform import Device

T = TypeVar("T")
_INTERFACE = "vllm.v1.sample.logits_processor.interface"  # loaded, where a processor imports its names from vLLM itself


class MoveDirectionality(enum.Enum):
    """Ways that a request moves from one row to another."""

    UNIDIRECTIONAL = enum.auto()  # what was in the second row is gone
    SWAP = enum.auto()


AddedRequest = tuple[int, SamplingParams, "list[int] | None", "list[int]"]
MovedRequest = tuple[int, int, Any]


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of the rows since the last step, in vLLM's terms: to be applied in the order removed, added, moved.

    Each of `added` is (row, params, prompt_tok_ids, output_tok_ids); the last list grows as tokens are drawn. It
    replaces what was in the row. No row that is removed is given to another, so that adding may come first as well.
    """

    batch_size: int
    removed: Sequence[int] = ()
    added: Sequence[AddedRequest] = ()
    moved: Sequence[MovedRequest] = ()


class LogitsProcessor(ABC):
    """vLLM's interface. A subclass may as well have vLLM's own for its base, or none: it is known by its methods."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """ValueError on params that it cannot serve."""
        return None

    @abstractmethod
    def __init__(self, vllm_config: Any, device: "torch.device", is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        """logits [R, V] -> the same shape; may overwrite them."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the likeliest token always stays the likeliest."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each apply(); None: the same requests in the same rows."""


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, "list[int] | None", list[int]], T | None],
) -> bool:
    """Brings what is kept per row up to date; `new_state` makes it for a new request. True if anything changed."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for row in batch_update.removed:
        req_entries.pop(row, None)
    for row, params, prompt, output in batch_update.added:
        req_entries.pop(row, None)
        if (state := new_state(params, prompt, output)) is not None:
            req_entries[row] = state
    for first, second, how in batch_update.moved:
        there, here = req_entries.pop(first, None), req_entries.pop(second, None)
        if there is not None:
            req_entries[second] = there
        if here is not None and how.name == MoveDirectionality.SWAP.name:
            req_entries[first] = here
    return req_entries != before


class AdapterLogitsProcessor(LogitsProcessor):
    """Makes a processor of a batch of one per request: (output ids, logits [V]) or (prompt ids, output ids, logits)."""

    def __init__(self, vllm_config: Any, device: "torch.device", is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., "torch.Tensor"] | None:
        """None if this request needs none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._state)

    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        for row, function in self.req_info.items():
            try:
                logits[row] = function(logits[row])
            except Exception as error:
                raise ours.ProcessorFailed(row, type(self).__qualname__, repr(error)) from error
        return logits

    def _state(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> Callable[[Any], Any] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        with_prompt = len(inspect.signature(function).parameters) == 3
        return lambda row: function(prompt, output, row) if with_prompt else function(output, row)


class _ConfigPart(SimpleNamespace):
    """A part of vLLM's configuration; what it lacks is refused by name."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"logits processors cannot read {name} of the engine; use {', '.join(sorted(vars(self)))}")


def vllm_config(config: EngineConfig, vocab_size: int) -> Any:
    """Returns the fields of vLLM's VllmConfig that processors read."""
    model = _ConfigPart(
        model=config.model,
        tokenizer=config.tokenizer or config.model,
        max_model_len=config.max_model_len,
        seed=config.seed,
        get_vocab_size=lambda: vocab_size,
    )
    scheduler = _ConfigPart(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.step_tokens)
    guesses = config.speculative_config
    return _ConfigPart(model_config=model, scheduler_config=scheduler, speculative_config=guesses)


@dataclass
class _RowRequest:
    """A request in a row."""

    added: ours.AddedRequest
    output: list[int] = field(default_factory=list)  # the processor's: only ever changed in place

    def __post_init__(self) -> None:
        self.sync()

    def sync(self) -> None:
        ids, start = self.added.token_ids, self.added.num_prompt
        if len(ids) - start < len(self.output):
            del self.output[len(ids) - start :]
        self.output += ids[start + len(self.output) :]


class AdaptedProcessor(ours.LogitsProcessor):
    """Adapts a vLLM logits processor to LogitsProcessor. A subclass is made for each: see adapted()."""

    vllm_class: type[Any]

    def __init__(self, vocab_size: int, device: "Device", config: EngineConfig) -> None:
        super().__init__(vocab_size, device)
        import numpy as np  # an HTTP server validates with this class, and loads neither numpy nor torch

        (somewhere,) = device.to_device([np.zeros(1, np.int32)])
        self._processor = self.vllm_class(vllm_config(config, vocab_size), somewhere.device, False)
        self._rows: dict[int, _RowRequest] = {}
        self._directions: Any = getattr(sys.modules.get(_INTERFACE), "MoveDirectionality", MoveDirectionality)

    @classmethod
    def make(cls, vocab_size: int, device: "Device", config: EngineConfig) -> ours.LogitsProcessor:
        return cls(vocab_size, device, config)

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        validate = getattr(cls.vllm_class, "validate_params", None)  # vLLM's before 0.11 have none
        if validate is not None:
            validate(params)

    def is_argmax_invariant(self) -> bool:
        return bool(self._processor.is_argmax_invariant())

    def update(self, update: ours.BatchUpdate | None) -> None:
        for kept in self._rows.values():
            kept.sync()
        if update is None:
            self._processor.update_state(None)
            return
        size = max(self._rows, default=-1) + 1
        self._rows = ours.apply_batch_update(self._rows, update, _RowRequest)
        self._processor.update_state(self._translated(update, size))

    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        result: torch.Tensor = self._processor.apply(logits)
        return result

    def _translated(self, update: ours.BatchUpdate, before: int) -> BatchUpdate:
        """vLLM puts new requests into the rows of old ones, and then moves one after the other.

        `before`: rows of the last step.
        """
        free = [*sorted(update.removed), *range(before, before + len(update.added))]
        places = dict(update.moved)  # row -> the one where it belongs
        there = {row: places.get(row, row) for row in range(before) if row not in update.removed}
        added: list[AddedRequest] = []
        for each in update.added:
            row = each.row if each.row in free else free[0]
            free.remove(row)
            there[row] = each.row
            kept = self._rows[each.row]
            added.append((row, each.params, list(each.token_ids[: each.num_prompt]), kept.output))
        removed = [row for row in update.removed if row in free]
        return BatchUpdate(update.size, removed, added, self._moves(there))

    def _moves(self, there: dict[int, int]) -> list[MovedRequest]:
        """From "what is in this row belongs in that one" to one move after another."""
        moves: list[MovedRequest] = []
        for target in sorted(there.values()):
            source = next(row for row, belongs in there.items() if belongs == target)
            if source == target:
                continue
            swaps = target in there
            moves.append((source, target, self._directions.SWAP if swaps else self._directions.UNIDIRECTIONAL))
            if swaps:
                there[source] = there[target]
            else:
                del there[source]
            there[target] = target
        return moves


def adapt_processor(theirs: type[Any]) -> type[ours.LogitsProcessor]:
    """Returns the class, adapted to LogitsProcessor."""
    return type(theirs.__name__, (AdaptedProcessor,), {"vllm_class": theirs, "__module__": theirs.__module__})
