"""A device that keeps the books and computes nothing: the engine's unit tests and its own cost are measured on it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quintet.config import EngineConfig
from quintet.interface.platform import (
    Capabilities,
    Communicator,
    Device,
    Mixer,
    Platform,
    SingleRank,
    State,
    Step,
    Unavailable,
)
from quintet.interface.types import (
    INT4,
    AttentionSpec,
    Batch,
    Layout,
    Memory,
    Outputs,
    RankInfo,
    ShapeBucket,
    StateSpec,
)
from quintet.interface.weights import Weight
from quintet.ops.sampling import greedy
from quintet.ops.states import mixer

TOTAL = 64 * 2**30  # bytes that it claims to have


class NullDevice(Device):
    """Keeps page counts, and no pages."""

    def __init__(self) -> None:
        self._used = 0

    def memory(self) -> Memory:
        return Memory(TOTAL - self._used, TOTAL, self._used)

    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        need = units * sum(layout.nbytes for layout in layouts)
        if need > TOTAL - self._used:
            raise MemoryError(f"KV cache needs {need} bytes, {TOTAL - self._used} are free; lower max_model_len")
        self._used += need
        return tuple(torch.empty((units, 0)) for _ in layouts)

    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        return tuple([torch.from_numpy(array) for array in arrays])

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x

    def sleep(self, level: int) -> int:
        freed, self._used = self._used, 0
        return freed

    def wake(self) -> None:
        """Does nothing: it keeps no weights."""


class Null(Platform):
    """The token after (token, position) is (31 token + 17 position + 7) mod vocabulary: no model runs."""

    name = "null"
    op_priority = {"greedy": ("null",)}
    supports_states = True
    optional_spec_fields = frozenset({"chosen_blocks", "chunk", "compressed", "cross", "distances", "max_drafts"})

    @classmethod
    def probe(cls) -> Capabilities | Unavailable:
        return Capabilities(
            devices=1,
            dtypes=(torch.float32, torch.bfloat16),
            sleep=True,
            batch_invariant=True,
            auto_select=False,
            detail="does no arithmetic",
        )

    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        if config.tensor_parallel_size > 1:
            raise ValueError("tensor_parallel_size must be 1 on this platform: it has one device; leave it out")
        if config.enable_return_routed_experts:
            raise ValueError(
                "enable_return_routed_experts must be off on this platform: no model runs, so that no router chooses; "
                "leave it out"
            )
        return config, []

    def open(self, rank: int) -> Device:
        return NullDevice()

    def connect(self, rank_info: RankInfo) -> Communicator:
        return SingleRank()

    def mixer(self, spec: AttentionSpec | StateSpec, ops: Any, rank: int) -> Mixer:
        return mixer(spec, ops, (INT4,))

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        return {weight.name: torch.empty(0)} if into is None else into

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        vocab: int = model.vocab_size  # type: ignore[assignment]  # every model has it; nn.Module hides the type

        def step(state: State, batch: Batch) -> tuple[Outputs, State]:
            # NumPy's calls cost a fraction of torch's, and nothing else is done here
            rows = batch.logits_indices.numpy()
            token_ids, positions = batch.token_ids.numpy()[rows], batch.positions.numpy()[rows]
            logits = np.zeros((len(rows), vocab), np.float32)
            logits[np.arange(len(rows)), next_token(token_ids, positions, vocab)] = 10
            return Outputs(torch.from_numpy(logits)), state

        return step


@greedy.provide("null")
def _greedy(logits: Tensor) -> Tensor:
    return torch.from_numpy(logits.numpy().argmax(-1).astype(np.int32))


def next_token(token_id: Any, position: Any, vocab: int) -> Any:
    """Returns the token that the null platform's step makes most likely after this token at this position."""
    return (token_id * 31 + position * 17 + 7) % vocab
