"""thinking_token_budget: where a request has thought enough, the end of its thought is all that can be drawn."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quintet.chat.reasoning_tokens import ReasoningCounter
from quintet.engine.request import Request
from quintet.engine.sampling.logits_edits import LogitEdit, keep_only
from quintet.interface.platform import Device
from quintet.ops.registry import Ops


class ThinkingBudget(LogitEdit):
    """Comes after Grammar, which may not let a thought end within a character: then one more token is drawn."""

    def __init__(self, ops: Ops, device: Device, vocab_size: int, static: bool) -> None:
        super().__init__(ops, device, vocab_size, static)
        self._states: dict[Request, _ReasoningState] = {}

    def set_requests(self, requests: Sequence[Request], rows: int) -> bool:
        self._rows = [(row, r) for row, r in enumerate(requests) if r.core_request.reasoning_marker_ids is not None]
        self._states = {r: self._states.get(r) or _ReasoningState(r) for _, r in self._rows}
        self._size = rows, -(-self.vocab_size // 32)
        return bool(self._rows)

    def __call__(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        found = [(row, self._states[r].forced(positions[row])) for row, r in self._rows]
        forced = [(row, token_id) for row, token_id in found if token_id is not None]
        if not forced:
            return logits
        bits = np.full(self._size, -1, np.int32)
        for row, token_id in forced:
            keep_only(bits[row], token_id)
        return self.ops.keep_tokens(logits, self.device.to_device([bits])[0])


class _ReasoningState:
    """Reasoning state of one request, computed from its output alone, so that preemption does not lose it."""

    def __init__(self, request: Request) -> None:
        self._request, self._read = request, 0
        self._begin()

    def forced(self, position: int) -> int | None:
        """The token at the position, if there is no choice."""
        request, budget = self._request, self._request.params.thinking_token_budget
        if budget is None:
            return None
        if request.num_known < self._read:  # tokens were taken back
            self._begin()
        self._walk.advance(request.token_ids[self._read : request.num_known])
        self._read = request.num_known
        drafts = request.token_ids[request.num_known : position]
        token_id = self._walk.after(drafts).forced_token(budget)
        if token_id is None or request.grammar is None:
            return token_id
        if request.grammar.count_allowed(request, [*drafts, token_id]) > len(drafts):
            return token_id
        return None

    def _begin(self) -> None:
        facts = self._request.core_request
        assert facts.reasoning_marker_ids is not None
        self._walk, self._read = (
            ReasoningCounter(facts.reasoning_marker_ids, facts.open_reasoning_tokens),
            self._request.num_prompt,
        )
