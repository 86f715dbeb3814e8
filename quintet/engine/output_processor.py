"""Builds the outputs that users read from the token deltas of the engine core."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from quintet.chat.prompts import Prompt
from quintet.engine.request import FinishReason
from quintet.lora.request import LoRARequest
from quintet.media.encoder_text import TEXT, TOKENS
from quintet.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    LogprobsAt,
    RequestMetrics,
    RequestOutput,
    TokenDelta,
    TokenLogprobs,
    child_ids,
)
from quintet.sampling_params import RequestOutputKind, SamplingParams
from quintet.tokenizers.detokenizer import Detokenizer
from quintet.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np


class ProcessedOutputs(NamedTuple):
    """Outputs that result from deltas, and requests to abort."""

    outputs: list[RequestOutput]
    aborts: list[str]  # engine requests that the core must end: a stop string was found, or the caller left


@dataclass(slots=True)
class _Completion:
    """One engine request. With output_kind DELTA, token_ids, logprobs and new_text hold what was not given out yet."""

    engine_id: str
    index: int
    detokenizer: Detokenizer | None
    logprobs: list[LogprobsAt] | FlatLogprobs | None
    cumulative_logprob: float | None
    new_text: list[str] = field(default_factory=list)  # with DELTA only
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_preemptions: int = 0
    has_new: bool = False  # since it was last given out
    num_returned: int = 0  # tokens that were given out; counted where outputs are held back
    num_tokens: int = 0  # all that count
    num_routed: int = 0  # tokens whose experts have come
    routed_experts: "list[np.ndarray[Any, Any]]" = field(default_factory=list)  # of stretches of tokens


@dataclass(slots=True)
class _Request:
    request_id: str
    source: Prompt
    prompt_ids: list[int]
    params: SamplingParams
    completions: list[_Completion]
    prompt_logprobs: list[LogprobsAt | None] | FlatLogprobs | None
    metrics: RequestMetrics
    data: "np.ndarray[Any, np.dtype[np.float32]] | None" = None  # numbers of a text, or scores of the prompt
    kv_transfer_params: dict[str, Any] | None = None
    encoder_text: tuple[list[int], str | None] | None = None  # decoded once for all outputs

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)


class OutputProcessor:
    """Keeps the text side of every running request. Knows nothing of models, pages or steps.

    With n > 1 each output holds: of CUMULATIVE and FINAL_ONLY all n completions, of DELTA those with news.
    """

    def __init__(self, tokenizer: Tokenizer | None, interval: int = 1) -> None:
        """`interval`: tokens from one output of a stream to the next."""
        self.tokenizer, self._interval = tokenizer, interval
        self._requests: dict[str, _Request] = {}
        self._owners: dict[str, tuple[_Request, _Completion]] = {}  # by engine request id

    def __len__(self) -> int:
        """Requests that have not finished."""
        return len(self._requests)

    def num_queued_tokens(self) -> int:
        """Returns the prompt tokens of requests without a token of output. May be called from another thread."""
        waiting = [each.metrics for each in list(self._requests.values()) if each.metrics.first_token_time is None]
        return sum(each.num_prompt_tokens for each in waiting)

    def add(
        self,
        request_id: str,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        source: Prompt | None = None,
        arrival: float | None = None,
    ) -> list[str]:
        """Registers a request, before its first delta. Returns the ids of its n engine requests.

        `arrival` is a time.monotonic(); None is now. `source`: the prompt, for its text, adapter and encoder input.
        """
        engine_ids = child_ids(request_id, params.n)
        taken = [each for each in (request_id, *engine_ids) if each in self._requests or each in self._owners]
        if taken:
            raise ValueError(f"request id {taken[0]!r} is in use; give each running request its own")
        if self.tokenizer is None and params.detokenize:
            raise ValueError("the engine has no tokenizer, so it can give no text; set detokenize=False")
        arrival = time.monotonic() if arrival is None else arrival
        source = Prompt(list(prompt_ids)) if source is None else source
        before = () if source.embeds else prompt_ids  # ids only hold the places of embeddings
        request = _Request(
            request_id,
            source,
            list(prompt_ids),
            params,
            completions=[self._start(each, i, params, before) for i, each in enumerate(engine_ids)],
            prompt_logprobs=None if params.prompt_logprobs is None else _positions(params, [None]),
            metrics=RequestMetrics(arrival, num_prompt_tokens=len(prompt_ids)),
        )
        self._requests[request_id] = request
        for completion in request.completions:
            self._owners[completion.engine_id] = request, completion
        return engine_ids

    def _start(self, engine_id: str, index: int, params: SamplingParams, prompt_ids: Sequence[int]) -> _Completion:
        with_text = self.tokenizer is not None and params.detokenize
        detokenizer = Detokenizer(self.tokenizer, params, prompt_ids) if with_text and self.tokenizer else None
        wanted = params.num_logprobs is not None
        logprobs = _positions(params, []) if wanted else None
        return _Completion(engine_id, index, detokenizer, logprobs, 0.0 if wanted else None)

    def process(self, deltas: Iterable[TokenDelta]) -> ProcessedOutputs:
        """Deltas of unknown requests are passed over: those were aborted here while the core went on."""
        now = time.monotonic()
        touched: dict[str, _Request] = {}
        aborts = []
        for delta in deltas:
            request, completion = self._owners.get(delta.request_id, (None, None))
            if request is None or completion is None:
                continue
            self._take(request, completion, delta, now)
            touched[request.request_id] = request
            if completion.finish_reason is not None:
                del self._owners[completion.engine_id]
                if delta.finish_reason is None:
                    aborts.append(completion.engine_id)
        outputs = [output for request in touched.values() if (output := self._give(request, now)) is not None]
        return ProcessedOutputs(outputs, aborts)

    def abort(self, request_ids: str | Iterable[str]) -> ProcessedOutputs:
        """The caller takes requests back; their outputs say "abort". Those that have finished are passed over."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        return self._end([self._requests[each] for each in ids if each in self._requests], FinishReason.ABORT)

    def fail(self, error: str) -> ProcessedOutputs:
        """The core is gone: every running request ends with this error."""
        return self._end(list(self._requests.values()), FinishReason.ERROR, error)

    def _end(self, requests: list[_Request], reason: FinishReason, error: str | None = None) -> ProcessedOutputs:
        deltas = [
            TokenDelta(completion.engine_id, [], reason, error=error)
            for request in requests
            for completion in request.completions
            if completion.finish_reason is None
        ]
        aborts = [delta.request_id for delta in deltas]
        outputs = self.process(deltas).outputs
        for request in requests:  # Ctrl-C may have left it half added, or half ended
            self._requests.pop(request.request_id, None)
            for completion in request.completions:
                self._owners.pop(completion.engine_id, None)
        return ProcessedOutputs(outputs, aborts)

    def _take(self, request: _Request, completion: _Completion, delta: TokenDelta, now: float) -> None:
        """Adds one delta to its completion."""
        ids, logprobs = delta.token_ids, delta.logprobs
        if delta.finish_reason is not None:
            completion.finish_reason = FinishReason(delta.finish_reason).value
            completion.stop_reason, completion.error = delta.stop_reason, delta.error
        if completion.detokenizer is not None:
            ids = self._detokenize(request.params, completion, ids)
        if logprobs is not None and completion.logprobs is not None and completion.cumulative_logprob is not None:
            kept = logprobs[: len(ids)]
            named = bool(request.params.logprob_token_ids)
            self._extend(completion.logprobs, kept, request.params, named)
            completion.cumulative_logprob += sum(each.values[0] for each in kept)
        if delta.prompt_logprobs is not None and request.prompt_logprobs is not None and completion.index == 0:
            self._extend(request.prompt_logprobs, delta.prompt_logprobs, request.params)
        if delta.kv_transfer_params is not None and completion.index == 0:
            request.kv_transfer_params = delta.kv_transfer_params
        if delta.data is not None:
            import numpy as np  # where a model generates text, an API process starts without it

            data = np.frombuffer(delta.data, np.float32).reshape(delta.shape)
            request.data = data if request.data is None else np.concatenate([request.data, data])  # of steps
            request.metrics.first_token_time = request.metrics.last_token_time = now  # as vLLM counts it
        completion.token_ids += ids
        completion.num_tokens += len(ids)
        if delta.routed_experts is not None:
            _add_experts(request, completion, delta)
        completion.has_new |= bool(ids) or completion.finish_reason is not None
        _update_metrics(request.metrics, completion, delta, len(ids), now)

    def _detokenize(self, params: SamplingParams, completion: _Completion, ids: list[int]) -> list[int]:
        """Adds their text and looks for stop strings. Returns the ids that count: those up to a stop string."""
        detokenizer = completion.detokenizer
        assert detokenizer is not None
        ended = completion.finish_reason
        before = detokenizer.num_tokens
        by_token = ended == FinishReason.STOP.value and not params.include_stop_str_in_output
        new = detokenizer.add(ids, hide_last=by_token)
        if ended is not None:
            new += detokenizer.finish()
        if params.output_kind is RequestOutputKind.DELTA:
            completion.new_text.append(new)
        if detokenizer.stop is not None:
            completion.finish_reason, completion.stop_reason = FinishReason.STOP.value, detokenizer.stop
            completion.error = None
        return ids[: detokenizer.num_tokens - before]

    def _extend(
        self, positions: Any, new: Iterable[TokenLogprobs], params: SamplingParams, named: bool = False
    ) -> None:
        """Adds positions. `named`: the tokens after the first were named by the caller, and have no rank."""
        for each in new:
            entries = self._decode_logprobs(each, params, named)
            if isinstance(positions, FlatLogprobs):
                positions.add(entries)
            else:
                positions.append({token_id: Logprob(value, rank, text) for token_id, value, rank, text in entries})

    def _decode_logprobs(
        self, each: TokenLogprobs, params: SamplingParams, named: bool
    ) -> Iterator[tuple[int, float, int | None, str | None]]:
        """Yields token ids, each once, with log-probabilities, ranks and texts."""
        text = self.tokenizer.token_text if self.tokenizer is not None and params.detokenize else None
        seen = set[int]()
        for place, (token_id, value) in enumerate(zip(each.ids, each.values, strict=True)):
            rank = each.rank if place == 0 else None if named else place
            if token_id not in seen:  # the sampled token comes first and may be among the most likely again
                seen.add(token_id)
                yield token_id, value, rank, None if text is None else text(token_id)

    def _give(self, request: _Request, now: float) -> RequestOutput | None:
        """The request's next output, if it is due; forgets a request that has finished."""
        kind = request.params.output_kind
        finished = request.finished
        if finished:
            request.metrics.finished_time = now
            del self._requests[request.request_id]
        elif kind is RequestOutputKind.FINAL_ONLY or not any(each.has_new for each in request.completions):
            return None
        delta = kind is RequestOutputKind.DELTA
        interval = max(self._interval, request.params.stream_interval or 1)
        if interval > 1 and not _is_due(request, delta, interval):
            return None
        scored = request.params.prompt_logprob_token_ids is not None
        output = RequestOutput(
            request.request_id,
            request.source.text,
            request.prompt_ids,
            request.prompt_logprobs,
            [_completion_output(each, delta) for each in request.completions if each.has_new or not delta],
            finished,
            request.metrics.num_cached_tokens,
            request.metrics,
            None if scored else request.data,
            request.kv_transfer_params,
            prompt_token_id_logprobs=request.data if scored and finished else None,
        )
        self._add_source(output, request)
        if delta:
            request.prompt_logprobs = None  # given once
        for completion in request.completions:
            completion.has_new = False
        return output

    def _add_source(self, output: RequestOutput, request: _Request) -> None:
        """Adds the adapter, and the text that the model's encoder read."""
        source = request.source
        if source.lora is not None:
            output.lora_request = LoRARequest(source.lora.name, source.lora.number, source.lora.path)
            for each in output.outputs:
                each.lora_request = output.lora_request
        if source.encoder is not None and source.encoder.kind == TEXT:
            if request.encoder_text is None:
                ids = [int(each) for each in source.encoder.fields[TOKENS].array()]
                request.encoder_text = ids, None if self.tokenizer is None else self.tokenizer.decode(ids)
            output.encoder_prompt_token_ids, output.encoder_prompt = request.encoder_text


def _positions(params: SamplingParams, first: list[Any]) -> Any:
    """Returns the list of positions that grows, as flat_logprobs asks for it."""
    if not params.flat_logprobs:
        return first
    flat = FlatLogprobs()
    flat.extend(first)
    return flat


def _is_due(request: _Request, delta: bool, interval: int) -> bool:
    """True if a completion has ended, has its first tokens, or `interval` new ones."""
    new = [len(each.token_ids) - (0 if delta else each.num_returned) for each in request.completions]
    due = request.finished or any(
        each.has_new and (each.finish_reason is not None or each.num_returned == 0 or count >= interval)
        for each, count in zip(request.completions, new, strict=True)
    )
    if due:
        for each, count in zip(request.completions, new, strict=True):
            each.num_returned += count
    return due


def _completion_output(completion: _Completion, delta: bool) -> CompletionOutput:
    """A delta takes what has gathered; else the output gets copies, for the originals will grow."""
    logprobs, detokenizer = completion.logprobs, completion.detokenizer
    output = CompletionOutput(
        completion.index,
        "".join(completion.new_text) if delta or detokenizer is None else detokenizer.text,
        completion.token_ids if delta else completion.token_ids.copy(),
        completion.cumulative_logprob,
        logprobs if delta or logprobs is None else logprobs.copy(),
        completion.finish_reason,
        completion.stop_reason,
        completion.error,
        routed_experts=_experts(completion, delta),
    )
    if delta:
        completion.new_text, completion.token_ids = [], []
        completion.logprobs = None if logprobs is None else type(logprobs)()
    return output


def _add_experts(request: _Request, completion: _Completion, delta: TokenDelta) -> None:
    """Adds the experts of tokens, but for those behind a stop string and the last that counts."""
    import numpy as np

    assert delta.routed_experts is not None
    itemsize = len(delta.routed_experts) // int(np.prod(delta.routed_shape))
    kind = {1: np.uint8, 2: np.uint16, 4: np.int32}[itemsize]
    rows = np.frombuffer(delta.routed_experts, kind).reshape(delta.routed_shape)
    wanted = len(request.prompt_ids) + completion.num_tokens - 1 - request.params.routed_experts_prompt_start
    completion.routed_experts.append(rows[: wanted - completion.num_routed])
    completion.num_routed += len(completion.routed_experts[-1])


def _experts(completion: _Completion, delta: bool) -> "np.ndarray[Any, Any] | None":
    """Returns the experts of all tokens so far, or, in a delta, of those that are new."""
    if not completion.routed_experts:
        return None
    import numpy as np

    found = np.concatenate(completion.routed_experts)
    completion.routed_experts = [] if delta else [found]
    return found


def _update_metrics(
    metrics: RequestMetrics, completion: _Completion, delta: TokenDelta, num_tokens: int, now: float
) -> None:
    if delta.scheduled is not None:
        metrics.first_scheduled_time = min(delta.scheduled, metrics.first_scheduled_time or delta.scheduled)
    if num_tokens:
        metrics.first_token_time = metrics.first_token_time or now
        metrics.last_token_time = now
        metrics.num_generation_tokens += num_tokens
    if completion.index == 0:
        metrics.num_cached_tokens = max(metrics.num_cached_tokens, delta.num_cached)
    if delta.num_preemptions > completion.num_preemptions:
        metrics.num_preemptions += delta.num_preemptions - completion.num_preemptions
        completion.num_preemptions = delta.num_preemptions
