"""From a step's logits to its tokens: edits, draw and log-probabilities, in vLLM's order."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from torch import Tensor

from quintet.engine.logit_edits import AllowedTokens, BadWords, LogitBias, LogitEdit, MinTokens, Penalties
from quintet.engine.logits_processors import LogitsProcessor, compare
from quintet.engine.request import Request
from quintet.ops.registry import Ops
from quintet.ops.sampling import Draw
from quintet.platforms.interface import Device

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


class LogprobTensors(NamedTuple):
    """Log-probabilities (or logits) of one position per row, on the device.

    K is the most that any row asks for: a row's own are its first logprobs + 1 columns. A row that asks for none is 0.
    """

    token_ids: Tensor  # [R, K + 1] int32; column 0 is the token itself, then the likeliest, best first
    logprobs: Tensor  # [R, K + 1] float32
    ranks: Tensor  # [R] int32, of the token itself; 1 is the likeliest


class Sampled(NamedTuple):
    """One token per row, on the device; -1 where none can be drawn, because the logits are not finite."""

    token_ids: Tensor  # [R] int32
    logprobs: LogprobTensors | None  # None if no row asks


class Sampler:
    """Draws a token for each request of a step, and remembers from step to step who has which row.

    The order is vLLM's: raw log-probabilities; allowed_token_ids; bad_words; processors that may change the argmax;
    min_tokens; logit_bias; penalties; temperature; the other processors; min_p, top_k, top_p; the draw.
    """

    def __init__(
        self,
        ops: Ops,
        device: Device,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] = (),
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        if logprobs_mode not in get_args(LogprobsMode):
            raise ValueError(f"logprobs_mode must be one of {', '.join(get_args(LogprobsMode))}, not {logprobs_mode!r}")
        self._ops = ops
        self._device = device
        self._vocab_size = vocab_size
        self._processors = tuple(processors)
        self._late = [p for p in processors if p.is_argmax_invariant()]
        self._processed = logprobs_mode.startswith("processed")
        self._normalize = logprobs_mode.endswith("logprobs")
        self._before: list[LogitEdit] = [AllowedTokens(ops, device), BadWords(ops, device)]
        self._after: list[LogitEdit] = [MinTokens(ops, device), LogitBias(ops, device), Penalties(ops, device)]
        self._early = [p for p in processors if not p.is_argmax_invariant()]
        self._requests: list[Request] = []
        self._edits: list[Callable[[Tensor], Tensor]] = []
        self._num_logprobs: int | None = None
        self._random = False  # whether any row is not greedy
        self._plain = True  # whether the step is one argmax

    @property
    def fallible(self) -> bool:
        """Whether a step may raise ProcessorFailed, so that the caller had better keep the logits."""
        return bool(self._processors)

    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> Sampled:
        """logits [R, V] of any float type, row r of requests[r], each of which has one row. May overwrite them.

        Raises ProcessorFailed with the row whose own logits processor failed; call again without that request.
        """
        rows = list(requests)
        if rows != self._requests:
            self._enter(rows)
        elif self._processors:
            for processor in self._processors:
                processor.update(None)
        if logits.shape[1] != self._vocab_size:
            logits = logits[:, : self._vocab_size]  # the rest is padding
        if self._plain:
            return Sampled(self._ops.greedy(logits), None)
        logits = logits.float()
        raw = None if self._num_logprobs is None or self._processed else self._asking(logits, self._edited)
        for edit in self._edits:
            logits = edit(logits)
        return self._sample(logits, raw)

    def prompt_logprobs(self, logits: Tensor, token_ids: Tensor, num: int) -> LogprobTensors:
        """Of prompt positions: logits [P, V], token_ids [P] int32 the tokens that follow; num -1 is all.

        The model's own, in every mode: nothing is drawn here, so nothing is processed. Logits if the mode says logits.
        """
        size = self._vocab_size
        num = size if num < 0 else min(num, size)
        return LogprobTensors(*self._ops.top_logprobs(logits[:, :size], token_ids, num, self._normalize))

    def _sample(self, logits: Tensor, raw: Tensor | None) -> Sampled:
        """What follows the edits: temperature, the late processors, cuts, draw."""
        draw = self._draw
        if self._random:
            positions = np.fromiter((len(r.token_ids) for r in self._requests), np.int32, len(self._requests))
            draw = draw._replace(positions=self._device.to_device([positions])[0])
        if self._late and (self._random or self._num_logprobs is not None):
            logits = self._ops.scale_logits(logits, draw.temperature)
            for processor in self._late:
                logits = processor.apply(logits)
            draw = draw._replace(temperature=(draw.temperature > 0).float())
        token_ids = self._ops.sample(logits, draw, self._width) if self._random else self._ops.greedy(logits)
        if self._num_logprobs is None:
            return Sampled(token_ids, None)
        values = self._process(logits, draw) if raw is None else raw
        return Sampled(token_ids, self._gather(values, token_ids))

    def _process(self, logits: Tensor, draw: Draw) -> Tensor:
        """The logits that the draw saw, of the rows that ask for log-probabilities."""
        draw = Draw(*map(self._asking, draw))
        scaled = self._ops.scale_logits(self._asking(logits), draw.temperature)
        return self._ops.filter_logits(scaled, draw, self._width)

    def _asking(self, x: Tensor, copy: bool = False) -> Tensor:
        """The rows of x whose requests ask for log-probabilities."""
        if self._askers is not None:
            return x[self._askers]
        return x.clone() if copy else x

    def _gather(self, values: Tensor, token_ids: Tensor) -> LogprobTensors:
        """values [A, V] of the asking rows, token_ids [R] -> columns for all rows."""
        drawn = self._asking(token_ids).clamp(min=0)
        found = self._ops.top_logprobs(values, drawn, self._num_logprobs, self._normalize)
        if self._askers is None:
            return LogprobTensors(*found)
        num = len(self._requests)
        return LogprobTensors(*(x.new_zeros((num, *x.shape[1:])).index_put((self._askers,), x) for x in found))

    def _enter(self, requests: list[Request]) -> None:
        """The rows changed: tells the processors, and settles what the next steps need."""
        update = compare(self._requests, requests)
        self._requests = requests
        for processor in self._processors:
            processor.update(update)
        before = [edit for edit in self._before if edit.enter(requests)]
        after = [edit for edit in self._after if edit.enter(requests)]
        self._edits = [*before, *(p.apply for p in self._early), *after]
        self._edited = bool(self._edits or self._late)  # whether the model's logits may be overwritten
        self._enter_logprobs(requests)
        self._enter_draw(requests)
        self._plain = not (self._edits or self._random or self._num_logprobs is not None)

    def _enter_logprobs(self, requests: list[Request]) -> None:
        wanted = [r.params.logprobs for r in requests]
        asked = [self._vocab_size if num == -1 else num for num in wanted if num is not None]
        self._num_logprobs = min(max(asked), self._vocab_size) if asked else None
        self._askers: Tensor | None = None
        if asked and len(asked) < len(requests):
            rows = np.array([row for row, num in enumerate(wanted) if num is not None], np.int32)
            self._askers = self._device.to_device([rows])[0]

    def _enter_draw(self, requests: list[Request]) -> None:
        """Uploads each row's parameters; a greedy row has no cuts."""
        self._random = not all(r.params.greedy for r in requests)
        off = (0.0, 0, 1.0, 0.0)
        drawn = [r.params for r in requests]
        cuts = [off if p.greedy else (p.temperature, max(p.top_k, 0), p.top_p, p.min_p) for p in drawn]
        temperature, top_k, top_p, min_p = zip(*cuts, strict=True) if cuts else ((), (), (), ())
        arrays = [np.array(temperature, np.float32), np.array(top_k, np.int32)]
        arrays += [np.array(top_p, np.float32), np.array(min_p, np.float32)]
        keys = np.array([r.key for r in requests], np.int32).reshape(-1, 2)
        self._draw = Draw(*self._device.to_device([*arrays, keys, np.zeros(len(requests), np.int32)]))
        widths = (k or (self._vocab_size if p < 1 else 0) for _, k, p, _ in cuts)
        self._width = min(max(widths, default=0), self._vocab_size)
