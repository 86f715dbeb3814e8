"""AsyncLLM: the same engine for an event loop. It steps in a thread of its own; outputs come with `async for`."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from quintet.api.arguments import AsyncLLMArguments
from quintet.api.async_status import AsyncStatusMethods, EngineStopped, OutputStream, RequestOutputCollector
from quintet.api.base import EngineHandle
from quintet.api.chat_call import AnswerParser, ChatCall
from quintet.api.collective_rpc import collective_rpc
from quintet.api.lora import AsyncLoRAMethods, adapted
from quintet.api.rollout import AsyncRolloutMethods
from quintet.api.weight_updates import AsyncWeightUpdateMethods
from quintet.chat.encoder_prompts import is_encoder_prompt
from quintet.chat.prompts import Prompt, PromptType
from quintet.config import EngineConfig
from quintet.config.schema.docs import accepts_fields_of
from quintet.config.schema.unsupported import no_attribute, refuses_unsupported
from quintet.engine.observability.profiler import SavedTrace
from quintet.engine.weight_transfer.orders import RecomputeCommand
from quintet.lora.request import LoRARequest
from quintet.outputs import RequestOutput
from quintet.pooling_outputs import PoolingOutput, PoolingRequestOutput, answered
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)


class AsyncLLM(
    AsyncLLMArguments, AsyncLoRAMethods, AsyncRolloutMethods, AsyncWeightUpdateMethods, AsyncStatusMethods, EngineHandle
):
    """Many requests at once from coroutines. Keyword arguments are EngineConfig's fields.

    llm = AsyncLLM("bundled")
    async for output in llm.generate("Once upon a time", SamplingParams(output_kind=RequestOutputKind.DELTA)):
        print(output.outputs[0].text, end="")
    """

    if not TYPE_CHECKING:  # a checker shall see each setting by name: see arguments.pyi

        @accepts_fields_of(EngineConfig)
        def __init__(self, model=None, *, use_tqdm: bool = False, **kwargs):
            """Raises ValueError or OSError that says what is wrong with an argument, the model or the device."""
            self._open(model, use_tqdm, kwargs)

    def _begin(self, config: EngineConfig, use_tqdm: bool) -> None:
        super()._begin(config, use_tqdm)
        self._followers: dict[str, OutputStream] = {}  # of running requests; the engine's thread alone touches it
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # once _closed is set, no call is queued any more
        self._closed, self._why = False, ""
        self._thread = threading.Thread(target=self._loop, name="quintet-engine", daemon=True)
        self._thread.start()

    @refuses_unsupported
    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes one prompt; yields as sampling_params.output_kind says. Leaving the loop ends the request.

        What fails later than ValueError ends this request alone: finish_reason is "error", and `error` says why.
        """
        parsed = await self._parsed(prompt)
        if len(parsed) != 1:
            raise ValueError(f"generate() takes one prompt, not {len(parsed)}; call it once for each")
        parsed = await adapted(self._client, parsed, lora_request)
        async with aclosing(self._follow(parsed[0], sampling_params, request_id, priority)) as outputs:
            async for output in outputs:
                yield output

    @refuses_unsupported
    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> RequestOutputCollector:
        """Queues a prompt; returns once the engine has it. abort() ends it. ValueError says what is wrong with it."""
        parsed = await adapted(self._client, await self._parsed(prompt), lora_request)
        if len(parsed) != 1:
            raise ValueError(f"add_request() takes one prompt, not {len(parsed)}; call it once for each")
        if isinstance(params, SamplingParams):
            params = params.clone()  # the caller may change it
            await asyncio.to_thread(self._client.compile_grammar, params)
        else:
            params = self._client.input_processor.pooling_bounds.resolve_params(params)
        follower = OutputStream(asyncio.get_running_loop(), asyncio.Queue())
        try:
            await self._call(partial(self._add, request_id, parsed[0], params, priority, follower))
        except BaseException:  # cancelled while it was added, or refused
            with suppress(EngineStopped):
                await self._call(partial(self._leave, request_id, follower))
            raise
        return RequestOutputCollector(request_id, follower, pools=isinstance(params, PoolingParams))

    @refuses_unsupported
    async def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers one conversation; `template` as in LLM.chat."""
        self._client.input_processor.check_generates()
        if self._client.tokenizer is None:
            raise ValueError("this AsyncLLM was started with skip_tokenizer_init=True; start it without for chats")
        config = self._client.config.structured_outputs_config
        call = ChatCall(self._client.tokenizer, self._client.family, messages, template, config, self._client.media)
        if len(call) != 1:
            raise ValueError(f"chat() takes one conversation, not {len(call)}; call it once for each")
        [chat] = await call.prepare([sampling_params or self.get_default_sampling_params()], asyncio.to_thread)
        kind = chat.params.output_kind
        delta, parser = (
            kind == RequestOutputKind.DELTA,
            AnswerParser(chat.output_format, kind == RequestOutputKind.FINAL_ONLY),
        )
        [prompt] = await adapted(self._client, [chat.prompt], lora_request)
        async with aclosing(self._follow(prompt, chat.params, request_id, priority)) as outputs:
            async for output in outputs:
                yield parser.take(output, delta)

    @refuses_unsupported
    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """The numbers of one text: yields once. Leaving the loop ends the request; Unanswered if it has no numbers."""
        parsed = self._client.parse(prompt)
        if len(parsed) != 1:
            raise ValueError(f"encode() takes one text, not {len(parsed)}; call it once for each")
        parsed = await adapted(self._client, parsed, lora_request)
        params = self._client.input_processor.pooling_bounds.resolve_params(pooling_params)
        async with aclosing(self._follow(parsed[0], params, request_id, priority)) as outputs:
            async for output in outputs:
                yield answered(output, PoolingOutput)

    async def abort(self, request_id: str) -> None:
        """Ends a request; a caller that waits for its outputs gets the last one."""
        with suppress(EngineStopped):  # then it has ended
            await self._call(lambda: self._deliver(self._client.abort([request_id])))

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer object, or None without a tokenizer."""
        return self._client.tokenizer.hf if self._client.tokenizer else None

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See LLM.reset_prefix_cache."""
        if reset_running_requests:
            await self._order(RecomputeCommand())
        else:
            await self._call(self._client.engine.reset_prefix_cache)
        return True

    async def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Any = None
    ) -> list[Any]:
        """See LLM.collective_rpc."""
        results: list[Any] = []
        await self._call(lambda: results.extend(collective_rpc(self._client, method, args, kwargs or {})))
        return results

    async def reload_weights(self, path: str | None = None) -> None:
        """Takes over other weights of the same model while requests run, as LLM.reload_weights."""
        await self._call(lambda: self._client.reload_weights(path))

    async def sleep(self, level: int = 1) -> None:
        """Gives the device's memory back until wake_up(), as LLM.sleep; ValueError while requests run."""
        await self._call(partial(self._sleep, level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Ends the sleep, as LLM.wake_up."""
        await self._call(lambda: self._client.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """True if it was put to sleep, and takes no requests."""
        return bool(self._client.engine.asleep)

    async def start_profile(self) -> None:
        """Begins a trace, as LLM.start_profile."""
        await self._call(self._client.engine.profiler.start)

    async def stop_profile(self) -> str:
        """Ends it -> its file, as LLM.stop_profile."""
        traces: list[SavedTrace] = []
        await self._call(lambda: traces.append(self._client.engine.profiler.stop()))
        return str(traces[0].path)

    def shutdown(self) -> None:
        """Stops the engine's thread; requests that still run end with an error."""
        with self._gate:
            self._closed = True
            self._calls.put((lambda: None, Future()))  # wakes the thread
        self._thread.join()
        self._client.close()

    if not TYPE_CHECKING:  # a checker shall see what is there

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("AsyncLLM", name, dir(AsyncLLM))

    async def _parsed(self, prompt: PromptType) -> list[Prompt]:
        """Parses a prompt; one with media in another thread, since that takes a while."""
        if isinstance(prompt, Mapping) and is_encoder_prompt(prompt):
            return await asyncio.to_thread(self._client.parse, prompt)
        return self._client.parse(prompt)

    async def _follow(
        self, prompt: Prompt, params: SamplingParams | PoolingParams | None, request_id: str | None, priority: int
    ) -> AsyncGenerator[RequestOutput, None]:
        request_id = self._client.next_id() if request_id is None else request_id
        params = self.get_default_sampling_params() if params is None else params.clone()  # the caller may change it
        if isinstance(params, SamplingParams):
            await asyncio.to_thread(self._client.compile_grammar, params)  # the engine's thread steps on
        follower = OutputStream(asyncio.get_running_loop(), asyncio.Queue())
        finished = False
        try:
            await self._call(partial(self._add, request_id, prompt, params, priority, follower))
            while not finished:
                output = await follower.outputs.get()
                finished = isinstance(output, EngineStopped) or output.finished
                if isinstance(output, EngineStopped):
                    raise output
                yield output
        finally:
            if not finished:  # left, cancelled (while it was added, perhaps) or refused
                with suppress(EngineStopped):
                    await self._call(partial(self._leave, request_id, follower))

    async def _call(self, function: Callable[[], None]) -> None:
        """Has the engine's thread do it before its next step; it does so even if the caller is cancelled."""
        future: Future[None] = Future()
        with self._gate:
            if self._closed:
                raise self.dead_error
            self._calls.put((function, future))
        await asyncio.wrap_future(future)

    # In the engine's thread:

    def _loop(self) -> None:
        why = "the engine was shut down while the request ran"
        try:
            while self._answer():
                self._deliver(self._client.step())
        except BaseException as error:  # a logits processor may raise SystemExit: waiting callers must get it
            logger.exception("the engine's thread failed")
            why = f"the engine failed: {type(error).__name__}: {error}"
        self._fail_all(why)

    def _answer(self) -> bool:
        """Does what was called for, and waits for a call while there is nothing to step; False at shutdown."""
        while not self._closed and not (self._client.busy and self._calls.empty()):
            function, future = self._calls.get()
            error: BaseException | None = None
            try:
                function()
            except BaseException as raised:
                error = raised
            _resolve(future, error)
        return not self._closed

    def _sleep(self, level: int) -> None:
        self._client.engine.sleep(level)

    def _add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        priority: int,
        follower: OutputStream,
    ) -> None:
        self._client.add(request_id, prompt, params, priority)
        self._followers[request_id] = follower

    def _leave(self, request_id: str, follower: OutputStream) -> None:
        """Ends the request, unless the id is another's by now."""
        if self._followers.get(request_id) is follower:
            del self._followers[request_id]
            self._client.abort([request_id])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            follower = self._followers.get(output.request_id)
            if follower is not None and not follower.put(output):
                self._leave(output.request_id, follower)
            if output.finished:
                self._followers.pop(output.request_id, None)

    def _fail_all(self, why: str) -> None:
        with self._gate:
            if not self._closed:
                self._why = why
            self._closed = True
        while not self._calls.empty():
            _resolve(self._calls.get()[1], EngineStopped(why))
        followers, self._followers = self._followers, {}
        for follower in followers.values():
            follower.put(EngineStopped(why))
        self._client.abort(followers)


AsyncLLMEngine = AsyncLLM  # vLLM has both names too


def _resolve(future: Future[None], error: BaseException | None) -> None:
    """Resolves the future of a waiting caller, unless it was cancelled."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error) if error else future.set_result(None)
