"""A Backend without an engine: real admission and real text, tokens that are known beforehand, faults on demand."""

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quintet.chat.prompts import Prompt
from quintet.chat.reasoning_tokens import UNMARKED, ReasoningMarkers
from quintet.config import StructuredOutputsConfig
from quintet.engine.input_processor import InputProcessor, ModelLimits
from quintet.engine.observability.stats import SchedulerStats, Stats, WeightStats
from quintet.engine.output_processor import OutputProcessor
from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.engine.processes.messages import ADAPTER_TAKEN, ADAPTER_UNKNOWN, LoadLoRA, ServedLoRA
from quintet.engine.processes.model_info import ModelInfo
from quintet.engine.request import CoreRequest
from quintet.engine.weight_transfer.orders import CallWorkersCommand, EndRequestsCommand
from quintet.lora.request import LoRAReference
from quintet.media.info import MediaInfo
from quintet.media.items import MediaProcessor
from quintet.outputs import TokenDelta, TokenLogprobs
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import SamplingParams
from quintet.server.backend import Deliver, EngineDead, EngineRefusal, SubmitRequest
from quintet.server.processes.grammar_checks import GrammarChecks
from quintet.tokenizers.tokenizer import Tokenizer, load_tokenizer

BUNDLED = Path(__file__).parents[2] / "quintet" / "bundled"
MODEL = "fake/model"
WIDTH = 16  # numbers of a fake embedding
LOGPROB = -0.5  # of the token that is drawn; the next likeliest have 1 less each


@functools.cache
def bundled_tokenizer() -> Tokenizer:
    """Loaded once; nobody changes it."""
    return load_tokenizer(BUNDLED)


def fake_numbers(ids: Sequence[int], params: PoolingParams, classes: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Of each token numbers of its own; a text's are their mean. Classes are the first ones."""
    rows = np.stack([np.random.default_rng(each).standard_normal(WIDTH) for each in ids]).astype(np.float32)
    x = rows if params.of_tokens else rows.mean(0, keepdims=True)
    if params.task in ("classify", "score", "token_classify"):
        x = x[:, :classes]
    elif params.dimensions is not None:
        x = x[:, : params.dimensions]
    if params.task in ("embed", "token_embed") and params.use_activation is not False:
        x = x / np.sqrt((x * x).sum(-1, keepdims=True))
    return np.ascontiguousarray(x if params.of_tokens else x[0])


@dataclass
class Submitted:
    """A request as it arrived."""

    request_id: str
    prompt: Prompt
    params: SamplingParams | PoolingParams
    priority: int
    grammar: str = ""


@dataclass
class FakeTraces:
    """One at a time."""

    running: bool = False

    async def start(self) -> None:
        if self.running:
            raise EngineRefusal("a trace runs already")
        self.running = True

    async def stop(self) -> tuple[str, int, str]:
        if not self.running:
            raise EngineRefusal("no trace runs")
        self.running = False
        return "a.json.gz", 3, "it was stopped"


@dataclass
class FakeAdapters:
    """Serves whatever is loaded; a path that begins with "bad" is refused."""

    served: dict[str, ServedLoRA] = field(default_factory=dict)
    loads: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def load(self, work: LoadLoRA) -> None:
        self.loads += 1
        if work.name in self.served and not work.load_inplace:
            raise EngineRefusal(f"The lora adapter '{work.name}' has already been loaded.", ADAPTER_TAKEN)
        if work.path.startswith("none"):
            raise EngineRefusal(f"No adapter found for '{work.path}'", ADAPTER_UNKNOWN)
        if work.path.startswith("bad"):
            raise EngineRefusal(f"{work.path}: tensor 'x' has the shape [1]", "ValueError")
        reference = LoRAReference(work.name, work.path, work.path.encode())
        number = self.served[work.name].number if work.name in self.served else next(self.numbers)
        self.served[work.name] = ServedLoRA(reference, work.path, work.base_model_name, 1, number)

    async def unload(self, name: str) -> None:
        if self.served.pop(name, None) is None:
            raise EngineRefusal(f"The lora adapter '{name}' cannot be found.", ADAPTER_UNKNOWN)


@dataclass
class FakeWeights:
    """Notes orders, and carries out none."""

    ran: list[Any] = field(default_factory=list)
    stats: WeightStats = WeightStats()
    refuses: str = ""  # why it does nothing
    result: Any = None  # of calls of workers, and of requests that end
    busy: int = 0  # times that a pause is asked for before requests have finished

    async def run(self, order: Any) -> Any:
        self.ran.append(order)
        if self.refuses:
            raise EngineRefusal(self.refuses)
        self.busy -= 1
        if isinstance(order, EndRequestsCommand | CallWorkersCommand):
            return self.result
        return self.busy < 0

    async def reload(self) -> None:
        self.ran.append("reload")


@dataclass
class FakeBackend:
    """Answers with `reply`, or the prompt's own tokens again and again; one token for each turn of the loop.

    A reply ends with end-of-text ("stop") unless max_tokens comes first. `hang` waits before the token of that
    number until `go_on` is set; `fail_at` fails the request there; `dead` refuses everything.
    """

    tokenizer: Tokenizer | None = field(default_factory=bundled_tokenizer)
    reply: Sequence[int] | None = None
    hang: int | None = None
    fail_at: int | None = None
    failure: str = "the fake failed"  # error of that request
    dead: str | None = None
    cached: int = 0  # tokens of each prompt that count as found in the prefix cache
    burst: int = 1  # tokens of each delta
    aborted: list[str] = field(default_factory=list)
    submitted: list[Submitted] = field(default_factory=list)
    running: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    hanging: int = 0  # requests that wait for go_on; what came before is delivered
    resets: int = 0
    asleep: int = 0
    trace_control: FakeTraces = field(default_factory=FakeTraces)
    lora: FakeAdapters = field(default_factory=FakeAdapters)
    weights: FakeWeights = field(default_factory=FakeWeights)
    woken: Sequence[str] | None = None  # what was woken last
    refuses: str = ""  # why it does not sleep, or wake
    max_model_len: int = 512
    pooling: PoolingBounds | None = None  # of a model that gives numbers
    labels: Sequence[str] = ()
    step_tokens: int = 2048
    media: MediaInfo = field(default_factory=MediaInfo)  # images, video and audio that prompts may have
    media_processor: Callable[[], MediaProcessor] | None = None

    def __post_init__(self) -> None:
        self.go_on = asyncio.Event()
        self.gone = asyncio.Event()  # something was aborted
        size = 512 if self.tokenizer is None else self.tokenizer.vocab_size
        eos = frozenset(self.tokenizer.eos_ids) if self.tokenizer else frozenset({0})
        self.eos = min(eos)
        self.model_info = ModelInfo(
            MODEL, str(BUNDLED), size, self.max_model_len, 20, sorted(eos), 0, 1000, 16, created=1, kv_tokens=16000,
            pooling=self.pooling, labels=list(self.labels), step_tokens=self.step_tokens,
            media=self.media,
        )  # fmt: skip
        self.reasoning_markers: Callable[[], ReasoningMarkers | str] = lambda: UNMARKED
        ending = None if self.pooling is None else self.pooling.with_special_tokens(self.tokenizer)
        bounds = ModelLimits(size, self.max_model_len, 20, pooling=ending)
        self._admission = InputProcessor(
            bounds, self.tokenizer, eos, 0, reasoning_markers=lambda: self.reasoning_markers()
        )
        self._processor = OutputProcessor(self.tokenizer)
        self.grammar_checks = GrammarChecks(StructuredOutputsConfig())

    def unavailable_reason(self) -> str | None:
        return self.dead

    def default_params(self) -> SamplingParams:
        params = self._admission.default_params()
        if self.tokenizer is None:
            params.detokenize = False
        return params

    def submit(
        self,
        wanted: Sequence[SubmitRequest],
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        grammar: str = "",
    ) -> None:
        if self.dead is not None:
            raise EngineDead(self.dead)
        prompts = [(each.request_id, each.prompt) for each in wanted]
        admitted = self._admission.admit_all(prompts, params, priority, grammar)
        for (request_id, prompt, deliver), requests in zip(wanted, admitted, strict=True):
            self._processor.add(request_id, requests[0].params, requests[0].prompt_ids, prompt)
            self.submitted.append(Submitted(request_id, prompt, params, priority, grammar))
            self.running[request_id] = asyncio.get_running_loop().create_task(self._run(request_id, requests, deliver))

    async def _run(self, request_id: str, requests: list[CoreRequest], deliver: Deliver) -> None:
        left = {each.request_id: each for each in requests}
        place, scheduled = 0, time.monotonic()
        while left:
            if self.hang == place:
                self.hanging += 1
                await self.go_on.wait()
            else:
                await asyncio.sleep(0)
            deltas = [replace(self._delta(each, place), scheduled=scheduled) for each in left.values()]
            place += self.burst
            processed = self._processor.process(deltas)
            for delta in deltas:
                if delta.finish_reason is not None or delta.request_id in processed.aborts:
                    left.pop(delta.request_id, None)
            if not left:
                self.running.pop(request_id, None)
            for output in processed.outputs:
                deliver(output)

    def _delta(self, request: CoreRequest, place: int) -> TokenDelta:
        """The tokens from `place` on, at most `burst`, with the log-probabilities that were asked for."""
        delta = TokenDelta(request.request_id, [], num_cached=min(self.cached, len(request.prompt_ids) - 1))
        if self.fail_at is not None and place >= self.fail_at:
            delta.finish_reason, delta.error = "error", self.failure
            return delta
        if request.pooling is not None:
            numbers = fake_numbers(request.prompt_ids, request.pooling, len(self.labels))
            delta.data, delta.shape, delta.finish_reason = numbers.tobytes(), numbers.shape, "stop"
            return delta
        for at in range(place, place + self.burst):
            token = self._token(request, at)
            delta.token_ids.append(token)
            if token in request.stop_ids:
                delta.finish_reason = "stop"
                delta.stop_reason = None if token == self.eos else token
                break
            if at + 1 >= request.max_tokens:
                delta.finish_reason = "length"
                break
        num, named = request.params.num_logprobs, request.params.logprob_token_ids
        if num is not None:
            delta.logprobs = [self._scores(each, num, named) for each in delta.token_ids]
        if place == 0 and request.params.prompt_logprobs is not None:
            num = request.params.prompt_logprobs
            delta.prompt_logprobs = [self._scores(each, num) for each in request.prompt_ids[1:]]
        return delta

    def _token(self, request: CoreRequest, place: int) -> int:
        if self.reply is not None:
            return self.reply[place] if place < len(self.reply) else self.eos
        return request.prompt_ids[place % len(request.prompt_ids)]

    def _scores(self, token: int, num: int, named: Sequence[int] | None = None) -> TokenLogprobs:
        """The token itself is the likeliest; then come the ids after it, or those that were named."""
        size = self.model_info.vocab_size
        top = list(named or ((token + step) % size for step in range(num if num >= 0 else size)))
        return TokenLogprobs([token, *top], [LOGPROB, *(LOGPROB - step for step in range(len(top)))], 1)

    def abort(self, request_id: str) -> None:
        task = self.running.pop(request_id, None)
        if task is None:
            return
        task.cancel()
        self._processor.abort(request_id)
        self.aborted.append(request_id)
        self.gone.set()

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def sleep(self, level: int) -> None:
        if self.refuses:
            raise EngineRefusal(self.refuses)
        self.asleep = level

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.woken = tags
        await self.sleep(0)

    def stats(self) -> Stats:
        return Stats(SchedulerStats(num_running=len(self.running)), weights=self.weights.stats, asleep=self.asleep)

    def engines(self) -> list[tuple[ModelInfo, Stats]]:
        return [] if self.unavailable_reason() else [(self.model_info, self.stats())]

    def with_defaults(self, **defaults: object) -> "FakeBackend":
        """As if the model's generation config said this."""
        self.model_info = replace(self.model_info, defaults=dict(defaults))
        self._admission.defaults = dict(defaults)
        return self

    def encode(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text, add_special_tokens=False)
