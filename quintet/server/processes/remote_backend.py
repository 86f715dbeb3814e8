"""The engine as an API process sees it: a Backend over the wire. Text work happens here, off the engine's loop."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from quintet.chat.reasoning_tokens import UNMARKED, ReasoningMarkers
from quintet.common.free_memory import release_file_pages
from quintet.config import StructuredOutputsConfig
from quintet.engine.input_processor import InputProcessor, ModelLimits
from quintet.engine.observability.stats import Stats
from quintet.engine.output_processor import OutputProcessor, ProcessedOutputs
from quintet.engine.parallel.commands import ResetPrefixCacheCommand, SleepCommand, WakeUpCommand
from quintet.engine.processes import messages as wire
from quintet.engine.processes.engine_clients import MAX_SILENCE, EngineClients
from quintet.engine.processes.model_info import ModelInfo
from quintet.engine.sampling.load_processors import load_processors
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import SamplingParams
from quintet.server.backend import Deliver, EngineDead, EngineLoading, EngineRefusal, SubmitRequest
from quintet.server.metrics.api_processes import ApiPeers
from quintet.server.processes.adapter_client import AdapterClient
from quintet.server.processes.grammar_checks import GrammarChecks
from quintet.server.processes.media_client import ServedProcessor
from quintet.server.processes.messages import FromPeer, decode_to_worker
from quintet.server.processes.weight_client import WeightClient
from quintet.tokenizers.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_FIRST_IS_READY = "first-is-ready"  # file of the folder: API process 0 knows the model
_TICK_SECONDS = wire.BEAT / 2  # seconds in which silence is counted


def may_serve(backend: "RemoteBackend") -> bool:
    """Returns whether a process that shares the port may take connections: it knows the model, and so does process 0,
    which takes connections from the start."""
    return backend.unavailable_reason() is None and backend.first_is_ready.exists()


class RemoteBackend:
    """Made and used in one event loop; `start()` is its first call."""

    def __init__(self, folder: Path, worker: int, step_timeout: float, num_engines: int = 1) -> None:
        self._worker, self.first_is_ready = worker, folder / _FIRST_IS_READY
        context = zmq.asyncio.Context()
        self._inbox = context.socket(zmq.PULL)
        self._inbox.rcvhwm = 0
        self._inbox.bind(wire.worker_address(folder, worker))
        self._engines = EngineClients(zmq.Context(context), folder, num_engines, step_timeout)
        self.engines = self._engines.each
        self.peers = ApiPeers(zmq.Context(context), folder, worker)
        self._served: ModelInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._admission: InputProcessor | None = None
        self._processor = OutputProcessor(None)
        self.grammar_checks = GrammarChecks(StructuredOutputsConfig())
        self.reasoning_markers: Callable[[], ReasoningMarkers | str] = lambda: UNMARKED
        self.media_processor = ServedProcessor(lambda: self.model_info)
        self._deliver: dict[str, Deliver] = {}
        self._answers: dict[int, asyncio.Future[wire.Answer]] = {}
        self._numbers = itertools.count(time.time_ns())  # the process that this one replaces used other numbers
        self.trace_control = _Traces(self._order)
        self.lora = AdapterClient(lambda work: self._order(work, 1))
        self.weights = WeightClient(self._order_each, self._engines.forget)
        self.death_reason: str | None = None  # why nothing more can come from the engine, or be understood
        self._reader: asyncio.Task[None] | None = None
        self._meeting: asyncio.Task[None] | None = None
        self._counter: asyncio.Task[None] | None = None
        self.expected_tokenizer: Path | None = None  # loaded while the engine loads; the one that is served counts
        self._early_tokenizer: asyncio.Task[Tokenizer | None] | None = None

    def start(self) -> None:
        """Begins to receive, and sends Join to the engines."""
        self._engines.tell_all(wire.Join(self._worker))
        loop = asyncio.get_running_loop()
        self._reader, self._counter = loop.create_task(self._read()), loop.create_task(self._count())
        if self.expected_tokenizer is not None:
            self._early_tokenizer = loop.create_task(asyncio.to_thread(_load_early, self.expected_tokenizer))

    def close(self) -> None:
        for task in (self._reader, self._meeting, self._counter, self._early_tokenizer):
            if task is not None:
                task.cancel()
        self._inbox.close(0)
        self._engines.close()
        self.media_processor.close()
        self.peers.close()
        self.grammar_checks.close()

    @property
    def model_info(self) -> ModelInfo:
        if self._served is None:
            raise self._unavailable()
        return self._served

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def hung_reason(self, silence: float = MAX_SILENCE) -> str | None:
        """Returns why an engine counts as hung, or None. Before the first sign of life it never does: importing may
        take as long as it likes from a slow disk."""
        hung = self._engines.hung(silence)
        return hung and hung[1]

    def unavailable_reason(self) -> str | None:
        if self.death_reason is not None:
            return self.death_reason
        if (hung := self._engines.hung(MAX_SILENCE, every=True)) is not None:
            return hung[1]
        return None if self._admission is not None else self._engines.loading()

    def default_params(self) -> SamplingParams:
        return self._ready().default_params()

    def stats(self) -> Stats | None:
        return self._engines.stats()

    def submit(
        self,
        wanted: Sequence[SubmitRequest],
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        grammar: str = "",
    ) -> None:
        prompts = [(each.request_id, each.prompt) for each in wanted]
        admitted = self._ready().admit_all(prompts, params, priority, grammar)
        params = admitted[0][0].params if isinstance(params, PoolingParams) else params
        added: list[str] = []
        try:
            for (request_id, prompt, deliver), (first, *_) in zip(wanted, admitted, strict=True):
                self._processor.add(request_id, params, first.prompt_ids, prompt, first.arrival)
                added.append(request_id)
                self._deliver[request_id] = deliver
            shares = self._engines.shares(admitted, added)
            frames = [(each, wire.encode(wire.Submit.of(self._worker, share))) for each, share in shares.items()]
            for engine, frame in frames:
                self._engines.send(engine, frame)
        except BaseException:
            self._processor.abort(added)
            for request_id in added:
                self._deliver.pop(request_id, None)
                self._engines.close_request(request_id)
            raise

    def abort(self, request_id: str) -> None:
        self._deliver.pop(request_id, None)
        self._engines.close_request(request_id)
        self._take(self._processor.abort(request_id))

    async def reset_prefix_cache(self) -> None:
        self._engines.forget()
        await self._order(ResetPrefixCacheCommand())

    async def sleep(self, level: int) -> None:
        stats = self.stats()
        try:
            await self._order(SleepCommand(level))
        except EngineRefusal:
            if self._engines.count > 1 and stats is not None and not stats.asleep:
                await self.wake_up()  # those that sleep: all do, or none
            raise
        self._engines.forget()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._order(WakeUpCommand(None if tags is None else list(tags)))

    async def _order(self, work: wire.Work, engines: int = 0) -> wire.Answer:
        """Returns when all engines, or so many, have done it -> what the first answers; EngineRefusal says why one has
        not."""
        return (await self._order_each(work, engines))[0]

    async def _order_each(self, work: wire.Work, engines: int = 0) -> list[wire.Answer]:
        """The same -> what each answers."""
        self._ready()
        loop = asyncio.get_running_loop()
        numbers = list(itertools.islice(self._numbers, engines or self._engines.count))
        answers = [self._answers.setdefault(number, loop.create_future()) for number in numbers]
        try:
            for engine, number in enumerate(numbers):  # raises where no answer would come
                self._engines.send(engine, wire.encode(wire.Order(self._worker, number, work)))
            results = await asyncio.gather(*answers)
        finally:
            for number in numbers:
                del self._answers[number]
        if refused := [each for each in results if each.refused]:
            raise EngineRefusal(refused[0].refused, refused[0].kind)
        return results

    def fail(self, why: str) -> None:
        """The engine has ended: so does every request, and none is taken on."""
        self.death_reason = why
        self._take(self._processor.fail(why))
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(EngineDead(why))

    def remove_worker(self, worker: int) -> None:
        """Another API process has died: the engine ends what it had."""
        self._engines.tell_all(wire.Leave(worker))

    def _ready(self) -> InputProcessor:
        if self._admission is None or self.unavailable_reason() is not None:
            raise self._unavailable()
        return self._admission

    def _unavailable(self) -> EngineDead:
        """Returns the error of a call that the engine cannot take now."""
        why, loading = self.unavailable_reason(), self._engines.loading()
        return EngineLoading(loading) if why in (None, loading) else EngineDead(why)

    async def _read(self) -> None:
        while True:
            message = decode_to_worker(await self._inbox.recv())
            await asyncio.sleep(0)  # recv() does not wait where a message is there: an engine may be faster than this
            if isinstance(message, FromPeer):  # no sign of life of the engine
                self.peers.handle(message)
                continue
            self._engines.hear(message)
            if isinstance(message, wire.Deltas):
                self._take(self._processor.process(message.deltas))
            elif isinstance(message, wire.Pulse):
                continue
            elif isinstance(message, wire.Adapters):
                self.lora.update(message)
                self._engines.send(0, wire.encode(wire.HasAdapters(self._worker, message.version)))
            elif isinstance(message, wire.Hello):
                if message.engine == 0:
                    self.lora.update(message.adapters)
                if served := self._engines.meet(message):
                    self._meeting = asyncio.create_task(self._meet(served))  # signs of life are heard meanwhile
            elif message.number in self._answers and not self._answers[message.number].done():
                self._answers[message.number].set_result(message)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self.peers.tick(_TICK_SECONDS)
            self._engines.turn(_TICK_SECONDS)

    async def _meet(self, served: ModelInfo) -> None:
        """Loads the tokenizer and the checks of requests, once the model is loaded."""
        self._served = served
        try:
            await self._load_tokenizer(served)
        except (ValueError, OSError, MemoryError) as error:  # what the user can mend
            self.fail(f"the model's tokenizer or a logits processor cannot be loaded: {error or type(error).__name__}")
        except Exception as error:
            logger.exception("an API process broke")
            self.fail(f"an API process broke: {type(error).__name__}: {error}")

    async def _load_tokenizer(self, served: ModelInfo) -> None:
        if served.tokenizer is not None:
            early = None if self._early_tokenizer is None else await self._early_tokenizer
            if early is None or served.tokenizer != str(self.expected_tokenizer):
                early = await asyncio.to_thread(load_tokenizer, served.tokenizer)
            self._tokenizer = early
        eos = frozenset(served.eos_ids) | frozenset(self._tokenizer.eos_ids if self._tokenizer else ())
        pooling = served.pooling
        if pooling is not None and self._tokenizer is not None:
            self._tokenizer.for_pooling(pooling.lowercase)
            pooling = pooling.with_special_tokens(self._tokenizer)
        bounds = ModelLimits(
            served.vocab_size,
            served.max_model_len,
            served.max_logprobs,
            by_priority=served.by_priority,
            pooling=pooling,
            kv_role=served.transfers,
            embeds_rows=served.embeds_rows,
            encoder=served.encoder or served.source,
            whole_runs=served.media_model is not None and served.media_model.max_run > 0,
            max_prefix=0 if served.media_model is None else served.media_model.max_prefix,
        )
        defaults = dict(served.defaults) if self._tokenizer else {**served.defaults, "detokenize": False}
        name = f"{self._worker}/" if self._worker else ""
        self._processor = OutputProcessor(self._tokenizer, served.stream_interval)
        self.grammar_checks = GrammarChecks(served.structured_outputs, self._tokenizer)
        processors = load_processors(served.processors)
        self._admission = InputProcessor(
            bounds,
            self._tokenizer,
            eos,
            served.seed,
            processors,
            defaults,
            name,
            reasoning_markers=lambda: self.reasoning_markers(),
        )
        release_file_pages()
        if not self._worker:
            self.first_is_ready.touch()

    def _take(self, processed: ProcessedOutputs) -> None:
        for output in processed.outputs:
            deliver = self._deliver.get(output.request_id)
            if output.finished:
                self._deliver.pop(output.request_id, None)
                self._engines.close_request(output.request_id)
            if deliver is not None:
                deliver(output)
        if processed.aborts:
            self._engines.tell_all(wire.Abort(self._worker, processed.aborts))


class _Traces:
    """A backend's `traces`."""

    def __init__(self, order: Callable[[wire.Work], Coroutine[Any, Any, wire.Answer]]) -> None:
        """`order` returns what the engine answers."""
        self._order = order

    async def start(self) -> None:
        await self._order(wire.StartProfile())

    async def stop(self) -> tuple[str, int, str]:
        return (await self._order(wire.StopProfile())).trace


def _load_early(file: Path) -> Tokenizer | None:
    """None if it cannot be loaded: the engine then refuses the model, or the tokenizer is another one."""
    try:
        return load_tokenizer(file)
    except (ValueError, OSError, MemoryError):
        return None
