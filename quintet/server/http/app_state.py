"""State that all routes of one API process share: the engine, the settings, and the running calls."""

import asyncio
import logging
import math
from collections.abc import Sequence

from starlette.requests import HTTPConnection
from starlette.requests import Request as HttpRequest

from quintet.chat.messages import load_chat_template
from quintet.chat.output_parser import Parsers
from quintet.chat.reasoning_tokens import ReasoningMarkers, find_reasoning_markers
from quintet.io_processors import Processors
from quintet.media.audio.decode import AudioDecoder
from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, load_plugin
from quintet.server.backend import Backend, EngineDead
from quintet.server.config import ServerConfig
from quintet.server.http.capacity import CapacityLimiter, RequestCost
from quintet.server.http.cooperative import CooperativeWork
from quintet.server.http.engine_call import Caller, EngineCall, PromptRequest
from quintet.server.http.errors import ApiError, as_api_error
from quintet.server.http.inputs.media import MediaCalls
from quintet.server.http.middleware.auth import key_of, owner_of
from quintet.server.http.other_call import OtherCall
from quintet.server.http.served_models import ServedModels, adapter_of, set_adapter
from quintet.server.mcp.servers import ToolServers
from quintet.server.metrics.api_metrics import ApiMetrics
from quintet.server.metrics.call_record import CallRecord
from quintet.server.tracing import make_tracer

logger = logging.getLogger(__name__)
TIMEOUT_HEADER = "x-request-timeout"


class AppState:
    """One for each API process; routes find it as `request.app.state.service`."""

    def __init__(self, backend: Backend, settings: ServerConfig, worker: int = 0, profiles: bool = False) -> None:
        """`profiles`: True if the engine may write profiler traces."""
        self.backend, self.settings, self.profiles = backend, settings, profiles
        self.models = ServedModels(backend, settings)
        self.name = f"w{worker}"  # of this process, in the ids of its requests
        template = settings.chat_template
        self.chat_template = None if template is None else load_chat_template(template)  # Jinja text
        _check_parsers(settings)
        self.io_processors = Processors(settings.io_processor_plugin)
        self._parsers: Parsers | None = None
        self._thoughts: ReasoningMarkers | str | None = None
        self.audio = AudioDecoder(settings.max_audio_seconds)
        backend.reasoning_markers = lambda: self.reasoning_markers
        self.tool_servers = ToolServers(settings)
        self.capacity = CapacityLimiter(_process_share(settings))
        self.cooperative = CooperativeWork()
        self.metrics = ApiMetrics()
        self.tracer = make_tracer(settings.otlp_traces_endpoint, lambda: self.model_names[0])
        self.calls: set[EngineCall | OtherCall] = set()
        self.metrics.calls = lambda: len(self.calls)
        self.draining = False
        self.ended_calls: set[EngineCall | OtherCall] = set()  # by the server's end
        self.media_calls = MediaCalls(backend, settings)
        self._failed: EngineDead | None = None
        self._quiet = asyncio.Event()  # no call is under way
        self._quiet.set()

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model itself; answers show the first."""
        return self.models.base_names

    @property
    def parsers(self) -> Parsers:
        """Parsers of the model's reasoning and tool calls; available once the model is loaded."""
        if self._parsers is None:
            self._parsers = Parsers.select(
                self.settings, self.backend.tokenizer, self.chat_template, self.backend.model_info.family
            )
        return self._parsers

    @property
    def reasoning_markers(self) -> ReasoningMarkers | str:
        """Reasoning markers of the model in tokens, or the reason why it has none."""
        if self._thoughts is None:
            reasoning = self.backend.model_info.reasoning
            self._thoughts = find_reasoning_markers(self.backend.tokenizer, self.parsers.reasoning, reasoning)
        return self._thoughts

    def unavailable_reason(self) -> str | None:
        """Returns why no request is accepted now, or None."""
        if self.draining:
            return "the server is shutting down"
        why = self.backend.unavailable_reason()
        if why is None and self.sleep_level:
            return f"the engine is asleep (level {self.sleep_level}), and POST /wake_up wakes it"
        if why is None and (stats := self.backend.stats()) is not None and stats.weights.torn:
            return "the weights were replaced in part, and that failed; the trainer is to send a full update"
        return why

    @property
    def sleep_level(self) -> int:
        """The level at which the engine sleeps; 0: it is awake."""
        stats = self.backend.stats()
        return 0 if stats is None else stats.asleep

    def check_ready(self) -> None:
        """Raises ApiError 503 if the engine cannot serve."""
        if self._failed is not None:
            raise as_api_error(self._failed)
        if (why := self.unavailable_reason()) is not None:
            raise not_ready_error(why, "asleep" if self.sleep_level and not self.draining else "not_ready")

    async def choose_model(self, http: HTTPConnection, name: str | None) -> None:
        """Has the request answered by the model of that name: the one that is served, or one of its adapters.

        Raises ApiError 404 for a model that is not served; no name is the one there is, and so is its path.
        """
        set_adapter(http, await self.models.find(name))

    def call(
        self, http: HttpRequest | None, asks: Sequence[PromptRequest], caller: Caller | None = None, waits: bool = False
    ) -> EngineCall:
        """Returns a call, to be entered. Without an HTTP request it continues when its client disconnects, for
        `caller`."""
        if caller is None:
            caller = Caller() if http is None else caller_of(http)
        return EngineCall(self, http, asks, self._timeout(http), caller, waits)

    def record(self, http: HttpRequest | None, asks: Sequence[PromptRequest]) -> CallRecord:
        """Returns the record that brings an admitted call into metrics and traces."""
        return CallRecord(self.metrics, asks, None if self.tracer is None else self.tracer.span_of(http))

    def admit_call(self, call: EngineCall | OtherCall, size: RequestCost | None) -> None:
        """Counts a call as running. Raises ApiError 503 while the server shuts down. `size`: of a call to the engine,
        which must be ready (503) and have room (429)."""
        if size is not None:
            self.check_ready()
            self.capacity.acquire(size, key_of(call.owner))
        elif self.draining:
            raise _shutting_down()
        self.calls.add(call)
        self._quiet.clear()

    def end_call(self, call: EngineCall | OtherCall, size: RequestCost | None) -> None:
        if size is not None:
            self.capacity.release(size, key_of(call.owner))
        self.calls.discard(call)
        if not self.calls:
            self._quiet.set()

    async def drain(self) -> None:
        """Accepts no more calls; returns when the last call is over, or ends those that take too long."""
        self.draining = True
        try:
            await asyncio.wait_for(self._quiet.wait(), self.settings.drain_timeout)
        except asyncio.TimeoutError:
            self.end_calls()

    def end_calls(self) -> None:
        """Ends all running calls with 503: the server is shutting down."""
        self.ended_calls |= self.calls
        for call in list(self.calls):
            call.fail(_shutting_down())

    def close(self) -> None:
        """Ends the processes that decode, and sends the last traces."""
        self.media_calls.close()
        if self.tracer is not None:
            self.tracer.close()

    def fail(self, why: str) -> None:
        """The engine is gone: every call ends, and none begins."""
        self._failed = EngineDead(why)
        for call in list(self.calls):
            call.fail(as_api_error(self._failed))

    def _timeout(self, http: HttpRequest | None) -> float:
        most = self.settings.request_timeout
        asked = http.headers.get(TIMEOUT_HEADER) if http is not None else None
        if asked is None:
            return most
        try:
            seconds = float(asked)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds:
            raise ApiError(
                400, f"{TIMEOUT_HEADER} must be seconds, a number over 0, not {asked[:40]!r}", param=TIMEOUT_HEADER
            )
        return min(seconds, most)


def not_ready_error(why: str, code: str = "not_ready") -> ApiError:
    """Returns the error of a call for which the engine is not there now."""
    return ApiError(503, f"{why}; try again", code=code, headers={"Retry-After": "5"})


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")


def caller_of(http: HTTPConnection) -> Caller:
    """Returns whose request it is, and the adapter that it names."""
    return Caller(owner_of(http), adapter_of(http))


def _check_parsers(settings: ServerConfig) -> None:
    """Runs the operator's plug-ins. ValueError if one of them, or a parser that is named, is not there."""
    for plugin in (settings.tool_parser_plugin, settings.reasoning_parser_plugin):
        if plugin is not None:
            load_plugin(plugin)
    if settings.tool_call_parser not in (None, "none"):
        TOOL_PARSERS.check(settings.tool_call_parser)
    if settings.reasoning_parser not in (None, "none"):
        REASONING_PARSERS.check(settings.reasoning_parser)


def _process_share(settings: ServerConfig) -> RequestCost:
    """One API process's part of the limits. The largest body fits in any case."""
    whole = RequestCost(
        settings.max_queued_requests,
        settings.max_queued_tokens,
        settings.max_queued_logprobs,
        settings.max_queued_characters,
        settings.max_queued_bytes,
    )
    share = RequestCost(*(-(-each // settings.api_workers) for each in whole))
    largest = max(settings.max_body_bytes, settings.max_upload_bytes)
    if settings.max_queued_bytes < largest:
        name = "max_upload_bytes" if largest == settings.max_upload_bytes else "max_body_bytes"
        logger.warning(
            "max_queued_bytes is %d, less than the largest body, %d (%s): bodies of %d bytes are taken; lower %s too",
            settings.max_queued_bytes, largest, name, largest, name,
        )  # fmt: skip
    return share._replace(characters=max(share.characters, largest), body_bytes=max(share.body_bytes, largest))
