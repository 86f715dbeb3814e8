"""Samples tokens of a step's logits: edits, draw and log-probabilities, in vLLM's order."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from quintet.engine.request import CoreRequest, Request
from quintet.engine.sampling.logits_edits import (
    AllowedTokens,
    BadWords,
    GrammarMask,
    LogitBias,
    LogitEdit,
    MinTokens,
    Penalties,
    TraceReplay,
)
from quintet.engine.sampling.logits_processors import LogitsProcessor, ProcessorFailed, batch_update_between
from quintet.engine.sampling.thinking_budget import ThinkingBudget
from quintet.engine.sampling.transcription_rules import TranscriptionRules
from quintet.interface.platform import Device, State
from quintet.interface.types import IntArray, Layout, Memory
from quintet.ops.registry import Ops
from quintet.ops.sampling import Draw
from quintet.sampling_params import SamplingParams
from quintet.transcription.rules import DecodingRules

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
USUAL_LOGPROBS = 32  # computed where shapes are fixed and any are asked for: few requests ask for more


class LogprobTensors(NamedTuple):
    """Log-probabilities (or logits) of one position per row, on the device.

    K is the most that any row asks for, or more where shapes are fixed: a row's own are its first logprobs + 1 columns.
    A row that asks for none is 0.
    """

    token_ids: Tensor  # [R, K + 1] int32; column 0 is the token itself, then the likeliest, best first
    logprobs: Tensor  # [R, K + 1] float32
    ranks: Tensor  # [R] int32, of the token itself; 1 is the likeliest
    named: tuple[Tensor, ...] = ()  # [R, 1] float32 each: of the first, second ... token that a row names, else 0


class Sampled(NamedTuple):
    """One token per row, on the device; -1 where none can be drawn, because the logits are not finite.

    Rows past those of the requests, which are there where shapes are fixed, are padding.
    """

    token_ids: Tensor  # [R] int32
    logprobs: LogprobTensors | None  # None if no row asks


class HostSampling(Device):
    """Stands for the device where sampling is done on the host: what comes stays where it is. It holds no cache."""

    def memory(self) -> Memory:
        return Memory(0, 0, 0)

    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        raise MemoryError("the host stands in for sampling alone; allocate the cache on the worker's device")

    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        return tuple([torch.from_numpy(array) for array in arrays])

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x


def logprob_sizes(vocab_size: int, max_logprobs: int) -> tuple[int, ...]:
    """The numbers of log-probabilities that are computed where shapes are fixed; max_logprobs -1 is no limit."""
    if max_logprobs < 0:
        return 0, min(USUAL_LOGPROBS, vocab_size), vocab_size
    return 0, min(max(USUAL_LOGPROBS, max_logprobs), vocab_size)


class Sampler:
    """Draws a token for each request of a step, and remembers from step to step which request has which row.

    The order is vLLM's: raw log-probabilities; grammars; thinking budgets; allowed_token_ids; bad_words; rules of
    transcripts; processors that may change the argmax; min_tokens; logit_bias; penalties; temperature; the other
    processors; min_p, top_k, top_p; the draw.

    With `sizes` (see logprob_sizes) shapes are fixed: they depend on the shape of the logits alone, and rows of padding
    are treated as greedy. With processors, which are user code that sees the requests' rows, shapes are not fixed.
    """

    def __init__(  # noqa: PLR0913  # the last are settings that most engines leave alone
        self,
        ops: Ops,
        device: Device,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] = (),
        logprobs_mode: str = "raw_logprobs",
        sizes: Sequence[int] = (),
        rules: DecodingRules | None = None,
    ) -> None:
        """`rules`: of the transcripts of requests with audio."""
        if logprobs_mode not in get_args(LogprobsMode):
            raise ValueError(f"logprobs_mode must be one of {', '.join(get_args(LogprobsMode))}, not {logprobs_mode!r}")
        self._ops, self.device, self._vocab_size, self._rules = ops, device, vocab_size, rules
        self._processors = tuple(processors)
        self._late = [p for p in processors if p.is_argmax_invariant()]
        self._other_processors = [p for p in processors if not p.is_argmax_invariant()]
        self._sizes = () if processors else tuple(sizes)
        self._returns_processed = logprobs_mode.startswith("processed")
        self._normalize = logprobs_mode.endswith("logprobs")
        self._requests: list[Request] = []  # of each row that draws
        self._asked: list[Request] = []  # that looks_back() was last computed for
        self.start_over()
        self._rows = 0  # of the logits that are looked at
        self._edits: list[Callable[[Tensor, Sequence[int]], Tensor]] = []
        self._num_logprobs: int | None = None
        self._random = False  # whether any row is not greedy
        self._plain = True  # whether the step is one argmax

    @property
    def has_processors(self) -> bool:
        """True if user code (logits processors) takes part in every draw."""
        return bool(self._processors)

    def needs_previous_tokens(self, requests: Sequence[Request]) -> bool:
        """True if the draws of these requests depend on the values of their tokens; the host must then know them.

        With penalties, bad words, grammars and thinking budgets they do. With processors they may.
        """
        if requests != self._asked:
            self._asked = list(requests)
            self._needs_previous_tokens = bool(self._processors and requests) or any(
                r.needs_previous_tokens for r in requests
            )
        return self._needs_previous_tokens

    def __call__(self, logits: Tensor, requests: Sequence[Request], positions: Sequence[int] | None = None) -> Sampled:
        """logits [L, V] of any float type, row r of requests[r]. May overwrite them.

        positions [R] are the places of the tokens that the rows draw, where requests have rows after drafts, too; rows
        after as many drafts follow one another. None: each has one row, and draws what follows its last token.

        Raises ProcessorFailed with the row that a logits processor failed for, and leaves the logits as they were;
        call again without that request and its rows.
        """
        if positions is not None and self._processors:
            return self._sample_drafts(logits, requests, positions)
        self._follow(list(requests), logits.shape[0] if self._sizes else len(requests))
        if self._plain:
            whole = self._rows == logits.shape[0]
            return Sampled(self._ops.greedy(logits if whole else self._ops.widen(logits, self._rows, False)), None)
        if positions is None:
            positions = [len(request.token_ids) for request in requests]
        logits = self._ops.widen(logits, self._rows, False)
        raw = None if self._num_logprobs is None or self._returns_processed else logits
        if self._edited and (raw is not None or self._processors):
            logits = self._ops.widen(logits, self._rows, True)
        for edit in self._edits:
            logits = edit(logits, positions)
        return self._sample(logits, raw, positions)

    def _sample_drafts(self, logits: Tensor, requests: Sequence[Request], positions: Sequence[int]) -> Sampled:
        """Rows after no draft, then those after one, and so on: processors see one row of a request at a time, and the
        tokens up to it. They see all requests as new in the next step."""
        tails = {request: request.token_ids[request.num_known :] for request in requests}
        drawn: list[Sampled] = []
        start = 0
        try:
            while start < len(requests):
                after = positions[start] - requests[start].num_known
                stop = next(
                    (row for row in range(start, len(requests)) if positions[row] - requests[row].num_known != after),
                    len(requests),
                )
                for request in requests[start:stop]:
                    request.token_ids[request.num_known :] = tails[request][:after]
                try:
                    drawn.append(self(logits[start:stop], requests[start:stop]))
                except ProcessorFailed as error:
                    error.row += start
                    raise
                start = stop
        finally:
            for request, tail in tails.items():
                request.token_ids[request.num_known :] = tail
            self._follow([], 0)
        return _concat(drawn)

    def prompt_logprobs(
        self, logits: Tensor, token_ids: IntArray, wanted: IntArray, num: int, columns: Iterable[IntArray] = ()
    ) -> LogprobTensors:
        """Log-probabilities of rows of logits [L, V] where wanted [L] is not 0; token_ids [L] follow. num -1 is all.
        `named` has those of `columns`, each a token id for every row, or -1 for none.

        The model's own, in every mode: nothing is drawn here, so nothing is processed. Logits if the mode is of logits.
        """
        own, asked = self.device.to_device([token_ids, wanted])
        wide = self._ops.widen(logits, logits.shape[0], False)
        num = self._size(self._vocab_size if num < 0 else num)
        found = LogprobTensors(*self._ops.top_logprobs(wide, own, num, self._normalize, asked))
        named = [self._token_logprobs(wide, np.maximum(ids, 0), (ids >= 0).astype(np.int32)) for ids in columns]
        return found._replace(named=tuple(named))

    def _token_logprobs(self, logits: Tensor, token_ids: IntArray, wanted: IntArray) -> Tensor:
        """-> [L, 1], the log-probability of a token of each row of logits where wanted [L] is not 0."""
        ids, asked = self.device.to_device([token_ids, wanted])
        return self._ops.top_logprobs(logits, ids, 0, self._normalize, asked)[1]

    def completion_marker(self, logits: Tensor) -> Tensor:
        """Returns a small tensor that is ready when the logits are, for a step in which no row samples."""
        return self._ops.greedy(logits)

    def warm_up(self, logits: Tensor) -> None:
        """Runs every op on logits of this shape in every way that requests can ask for; nothing is compiled after."""
        if not self._sizes:
            return
        no_draft = np.zeros(logits.shape[0], np.int32)
        for num in self._sizes:
            self.device.to_host(self.prompt_logprobs(logits, no_draft, no_draft, num).ranks)()
        for example in _warm_up_requests(self._sizes):
            self.device.to_host(self(logits, [example]).token_ids)()
        self._follow([], 0)

    def _sample(self, logits: Tensor, raw: Tensor | None, positions: Sequence[int]) -> Sampled:
        """Samples the edited logits: temperature, the late processors, top_k, top_p and min_p, draw."""
        draw = self._draw
        if self._random:
            places = np.zeros(self._rows, np.int32)
            places[: len(positions)] = positions
            draw = draw._replace(positions=self.device.to_device([places])[0])
        if self._late and (self._random or self._num_logprobs is not None):
            logits = self._ops.scale_logits(logits, draw.temperature)
            for processor in self._late:
                logits = processor.apply(logits)
            draw = draw._replace(temperature=(draw.temperature > 0).float())
        choices = logits
        if self._traced:  # log-probabilities are of the logits that are not forced
            choices = self._trace(self._ops.widen(logits, self._rows, True), positions)
        token_ids = self._ops.sample(choices, draw, self._width) if self._random else self._ops.greedy(choices)
        if self._num_logprobs is None:
            return Sampled(token_ids, None)
        if raw is None:  # what the draw saw
            scaled = self._ops.scale_logits(logits, draw.temperature)
            raw = self._ops.filter_logits(scaled, draw, self._width)
        found = LogprobTensors(
            *self._ops.top_logprobs(raw, token_ids, self._num_logprobs, self._normalize, self._wanted)
        )
        named = [self._ops.top_logprobs(raw, ids, 0, self._normalize, asked)[1] for ids, asked in self._named]
        return Sampled(token_ids, found._replace(named=tuple(named)))

    def start_over(self) -> None:
        """Requests may have lost tokens, and a step may have broken off: what was settled or counted is so anew."""
        setting = self._ops, self.device, self._vocab_size, bool(self._sizes)
        self._before: list[LogitEdit] = [GrammarMask(*setting), ThinkingBudget(*setting), AllowedTokens(*setting)]
        self._before.append(BadWords(*setting))
        if self._rules is not None:
            self._before.append(TranscriptionRules(*setting, self._rules))
        self._after: list[LogitEdit] = [MinTokens(*setting), LogitBias(*setting), Penalties(*setting)]
        self._trace, self._traced = TraceReplay(*setting), False
        self._settled = False  # whether what _follow() makes was made for the requests
        self._asked, self._needs_previous_tokens = [], False

    def _follow(self, requests: list[Request], rows: int) -> None:
        """Gives the processors the changes of the rows; if there are any, prepares what the next steps need."""
        changed = requests != self._requests
        update = batch_update_between(self._requests, requests) if changed and self._processors else None
        for processor in self._processors:
            processor.update(update)
        if self._settled and not changed and rows == self._rows:
            return
        self._requests, self._rows, self._settled = requests, rows, False
        before = [edit for edit in self._before if edit.set_requests(requests, rows)]
        after = [edit for edit in self._after if edit.set_requests(requests, rows)]
        self._traced = self._trace.set_requests(requests, rows)
        self._edits = [*before, *(_as_edit(p) for p in self._other_processors), *after]
        self._edited = bool(self._edits or self._late)  # whether the logits may be overwritten
        self._prepare_logprobs(requests)
        self._prepare_draw(requests)
        self._plain = not (self._edits or self._traced or self._random or self._num_logprobs is not None)
        self._settled = True  # else, after an error or Ctrl-C on the way, all of it is done again

    def _prepare_logprobs(self, requests: list[Request]) -> None:
        wishes = [(row, num_logprobs_of(r.params)) for row, r in enumerate(requests)]
        asked = [(row, num) for row, num in wishes if num is not None]
        self._num_logprobs, self._named = None, self._columns(requests)
        if asked:
            self._num_logprobs = self._size(max(self._vocab_size if num == -1 else num for _, num in asked))
            wanted = np.zeros(self._rows, np.int32)
            wanted[[row for row, _ in asked]] = 1
            (self._wanted,) = self.device.to_device([wanted])

    def _columns(self, requests: list[Request]) -> list[tuple[Tensor, Tensor]]:
        """The tokens that rows name, (ids [R], whether a row has one [R]) for the first, the second and so on."""
        named = [r.params.logprob_token_ids or () for r in requests]
        columns = []
        for place in range(max(map(len, named), default=0)):
            ids, asked = np.zeros((2, self._rows), np.int32)
            for row, each in enumerate(named):
                if place < len(each):
                    ids[row], asked[row] = each[place], 1
            on_device = self.device.to_device([ids, asked])
            columns.append((on_device[0], on_device[1]))
        return columns

    def _size(self, num: int) -> int:
        """Number of log-probabilities to compute, where `num` is the most that a row asks for."""
        return next((size for size in self._sizes if size >= num), min(num, self._vocab_size))

    def _prepare_draw(self, requests: list[Request]) -> None:
        """Uploads each row's parameters; a greedy row has no cuts."""
        self._random = not all(r.params.greedy for r in requests)
        off = (0.0, 0, 1.0, 0.0)
        drawn = [r.params for r in requests]
        cuts = [off if p.greedy else (p.temperature, max(p.top_k, 0), p.top_p, p.min_p) for p in drawn]
        widths = (k or (self._vocab_size if p < 1 else 0) for _, k, p, _ in cuts)
        width = min(max(widths, default=0), self._vocab_size)
        self._width = self._vocab_size if width and self._sizes else width
        padding = self._rows - len(requests)
        cuts += [off] * padding
        temperature, top_k, top_p, min_p = zip(*cuts, strict=True) if cuts else ((), (), (), ())
        arrays = [np.array(temperature, np.float32), np.array(top_k, np.int32)]
        arrays += [np.array(top_p, np.float32), np.array(min_p, np.float32)]
        keys = np.array([*(r.core_request.random_key for r in requests), *[(0, 0)] * padding], np.int32).reshape(-1, 2)
        self._draw = Draw(*self.device.to_device([*arrays, keys, np.zeros(self._rows, np.int32)]))


def num_logprobs_of(params: SamplingParams) -> int | None:
    """Number of likeliest tokens to compute log-probabilities of: 0 if tokens are named; None: no log-probabilities."""
    return 0 if params.logprob_token_ids else params.logprobs


def _as_edit(processor: LogitsProcessor) -> Callable[[Tensor, Sequence[int]], Tensor]:
    return lambda logits, positions: processor.apply(logits)


def _concat(drawn: Sequence[Sampled]) -> Sampled:
    """Joins results to one batch: where some rows ask for fewer log-probabilities, zeros fill their columns."""
    token_ids = torch.cat([each.token_ids for each in drawn])
    found = [each.logprobs for each in drawn]
    if all(each is None for each in found):
        return Sampled(token_ids, None)
    width = max(each.token_ids.shape[1] for each in found if each is not None)
    count = max(len(each.named) for each in found if each is not None)
    parts = [
        _pad_logprobs(_zero_logprobs(rows.token_ids, width) if each is None else each, width, count)
        for rows, each in zip(drawn, found, strict=True)
    ]
    named = tuple(torch.cat([part.named[at] for part in parts]) for at in range(count))
    ids, values = torch.cat([part.token_ids for part in parts]), torch.cat([part.logprobs for part in parts])
    return Sampled(token_ids, LogprobTensors(ids, values, torch.cat([part.ranks for part in parts]), named))


def _pad_logprobs(found: LogprobTensors, width: int, count: int) -> LogprobTensors:
    """Pads to so many columns, and so many named tokens."""
    more = 0, width - found.token_ids.shape[1]
    pad = torch.nn.functional.pad
    nothing = torch.zeros_like(found.logprobs[:, :1])
    named = found.named + (nothing,) * (count - len(found.named))
    return LogprobTensors(pad(found.token_ids, more), pad(found.logprobs, more), found.ranks, named)


def _zero_logprobs(drawn: Tensor, width: int) -> LogprobTensors:
    """Returns zeros for rows that need no log-probabilities, on the device of the drawn tokens."""
    ids = torch.zeros((len(drawn), width), dtype=torch.int32, device=drawn.device)
    return LogprobTensors(ids, torch.zeros((len(drawn), width), device=drawn.device), ids[:, 0])


def _warm_up_requests(sizes: Sequence[int]) -> list[Request]:
    """Requests that, one after the other, take every op through each of its variants."""
    edits: dict[str, Any] = {"allowed_token_ids": [0], "logit_bias": {0: 1.0}, "repetition_penalty": 2.0}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        *({"temperature": 0.0, "logprobs": size} for size in sizes),
        {"logprobs": 0},
        {"logprobs": 0, "top_k": 1},
        {"logprobs": 0, "min_tokens": 1, **edits},
    ]
    ends: dict[str, Any] = {"stop_ids": frozenset([0]), "bad_words_ids": ((0,),)}
    return [Request(CoreRequest("warm-up", [0], SamplingParams(**kind), (0, 0), 1, **ends)) for kind in kinds]
