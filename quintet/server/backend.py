"""Interface between the HTTP server and the engine: readiness, the served model, and outputs of requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from quintet.chat.prompts import Prompt
from quintet.chat.reasoning_tokens import ReasoningMarkers
from quintet.config import ReasoningConfig, StructuredOutputsConfig
from quintet.engine.observability.stats import Stats
from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.outputs import RequestOutput
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import SamplingParams
from quintet.server.processes.grammar_checks import Shapes
from quintet.tokenizers.tokenizer import Tokenizer

Deliver = Callable[[RequestOutput], None]


class SubmitRequest(NamedTuple):
    """One prompt of a call, and the callback that receives its outputs."""

    request_id: str
    prompt: Prompt
    deliver: Deliver


@dataclass(frozen=True)
class ModelInfo:
    """The model that an engine runs, as its start settled it. Plain data: it crosses processes."""

    model: str  # path or hub id
    tokenizer: str | None  # its folder
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    max_logprobs: int
    eos_ids: list[int]  # of the generation config; the tokenizer may add its own
    seed: int  # of requests that bring none
    num_pages: int  # of the KV cache, those that can hold tokens
    page_size: int
    processors: list[str] = field(default_factory=list)  # logits processors, by dotted name
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling parameters of the generation config
    created: int = 0  # Unix time in seconds
    embeds_width: int = 0  # numbers of an embedding that a prompt may have in the place of a token; 0: none may
    by_priority: bool = False  # whether a request's priority counts
    stream_interval: int = 1  # tokens from one output of a stream to the next
    family: str = ""  # of the model: its model_type
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    reasoning: ReasoningConfig = field(default_factory=ReasoningConfig)
    cache_dtype: str = "auto"  # of the KV cache
    prefix_caching: bool = True
    pooling: PoolingBounds | None = None  # what numbers texts may become; None: the model generates text
    labels: list[str] = field(default_factory=list)  # of its classes, where it has some
    transfers: str | None = None  # kv_role, where pages go to other engines or come from them
    step_tokens: int = 2048  # that a step of the engine takes at most
    kv_tokens: int = 0  # that the KV cache holds of requests of max_model_len


class EngineDead(RuntimeError):
    """The engine has ended, or gives no sign of life; the message says what is known."""


class Refused(RuntimeError):
    """The engine refused an order and is unchanged; the message has the reason."""


class Traces(Protocol):
    """Profiler traces of an engine, if its profiler_config allows them."""

    async def start(self) -> None:
        """As Profiler.start; Refused says why not."""
        ...

    async def stop(self) -> tuple[str, int, str]:
        """As Profiler.stop -> the file's name, steps, why it ended; Refused if there is none."""
        ...


class Backend(Protocol):
    """An engine, seen from an event loop. All but trouble() wait for a time when that gives None."""

    shapes: Shapes  # writes and tries the grammar that submit() takes
    thoughts: Callable[[], ReasoningMarkers | str]  # reasoning markers, or why there are none; set by the user

    @property
    def served(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def traces(self) -> Traces: ...

    def trouble(self) -> str | None:
        """Returns why it cannot serve now (it is loading, hung or dead), or None."""
        ...

    def default_params(self) -> SamplingParams:
        """With the model's own defaults; the caller may change it."""
        ...

    def submit(
        self,
        wanted: Sequence[SubmitRequest],
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        grammar: str = "",
    ) -> None:
        """Queues the requests of one call; each `deliver` is then called in this loop with its request's outputs, as
        params.output_kind says; with PoolingParams, once.

        The last output is `finished`. If the request or the engine fails, the completions of the last output have
        finish_reason "error". Raises ValueError (ParameterError for a parameter) if one of the requests cannot be
        served, EngineDead if none can; after any exception nothing is queued, and no state of the requests remains. No
        other request has any of the ids.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request at once; nothing is delivered any more. Passes over ids that are not running."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Empties the prefix cache."""
        ...

    async def sleep(self, level: int) -> None:
        """As Engine.sleep; stats() then has the level, in every process. Refused says why not."""
        ...

    async def wake_up(self) -> None:
        """As Engine.wake_up; Refused says why it still sleeps."""
        ...

    def stats(self) -> Stats | None:
        """Returns the statistics of all engines together, at most a second old; None while one is loading."""
        ...

    @property
    def engines(self) -> Callable[[], list[tuple[ModelInfo, Stats]]]:
        """Returns what each engine serves and its statistics, without engines that are loading."""
        ...
