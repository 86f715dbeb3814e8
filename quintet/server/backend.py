"""Interface between the HTTP server and the engine: readiness, the served model, and outputs of requests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from quintet.chat.prompts import Prompt
from quintet.chat.reasoning_tokens import ReasoningMarkers
from quintet.engine.observability.stats import Stats
from quintet.engine.processes.messages import LoadLoRA, ServedLoRA
from quintet.engine.processes.model_info import ModelInfo
from quintet.engine.weight_transfer.orders import WeightOrder
from quintet.media.items import MediaProcessor
from quintet.outputs import RequestOutput
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import SamplingParams
from quintet.server.processes.grammar_checks import GrammarChecks
from quintet.tokenizers.tokenizer import Tokenizer

Deliver = Callable[[RequestOutput], None]


class SubmitRequest(NamedTuple):
    """One prompt of a call, and the callback that receives its outputs."""

    request_id: str
    prompt: Prompt
    deliver: Deliver


class EngineDead(RuntimeError):
    """The engine has ended, or gives no sign of life; the message says what is known."""


class EngineLoading(EngineDead):
    """The engine is loading the model; the message says which engine."""


class EngineRefusal(RuntimeError):
    """The engine refused an order and is unchanged; the message has the reason."""

    def __init__(self, why: str, kind: str = "") -> None:
        """`kind`: as Answer.kind."""
        super().__init__(why)
        self.kind = kind


class TraceControl(Protocol):
    """Profiler traces of an engine, if its profiler_config allows them."""

    async def start(self) -> None:
        """As Profiler.start; Refused says why not."""
        ...

    async def stop(self) -> tuple[str, int, str]:
        """As Profiler.stop -> the file's name, steps, why it ended; Refused if there is none."""
        ...


class AdapterControl(Protocol):
    """Adapters (LoRA) that requests may name."""

    @property
    def served(self) -> Mapping[str, ServedLoRA]:
        """By name, in the order in which they came."""
        ...

    async def load(self, work: LoadLoRA) -> None:
        """Returns when all API processes serve the adapter; EngineRefusal says why not."""
        ...

    async def unload(self, name: str) -> None:
        """Returns when no API process serves the adapter any more; EngineRefusal if there is none of that name."""
        ...


class WeightControl(Protocol):
    """Pauses of all engines, and updates of their weights."""

    async def run(self, order: WeightOrder) -> Any:
        """Has all engines carry out an order -> its result; EngineRefusal says why one did not."""
        ...

    async def reload(self) -> None:
        """Has all engines read the weights of their folder again; EngineRefusal says why one did not."""
        ...


class Backend(Protocol):
    """An engine, seen from an event loop. All but trouble() wait for a time when that gives None."""

    grammar_checks: GrammarChecks  # writes and tries the grammar that submit() takes
    reasoning_markers: Callable[[], ReasoningMarkers | str]  # reasoning markers, or why there are none; set by the user

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def trace_control(self) -> TraceControl: ...

    @property
    def lora(self) -> AdapterControl: ...

    @property
    def weights(self) -> WeightControl: ...

    def unavailable_reason(self) -> str | None:
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

    def media_processor(self) -> MediaProcessor:
        """Returns the processor of the model's images, video and audio. May wait for its start. ValueError says why
        there is none."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Empties the prefix cache."""
        ...

    async def sleep(self, level: int) -> None:
        """As Engine.sleep; stats() then has the level, in every process. Refused says why not."""
        ...

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As Engine.wake_up; Refused says why it still sleeps."""
        ...

    def stats(self) -> Stats | None:
        """Returns the statistics of all engines together, at most a second old; None while one is loading."""
        ...

    @property
    def engines(self) -> Callable[[], list[tuple[ModelInfo, Stats]]]:
        """Returns what each engine serves and its statistics, without engines that are loading."""
        ...
