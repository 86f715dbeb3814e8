"""AsyncLLM: the same engine for an event loop. It steps in a thread of its own; outputs come with `async for`."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

from quintet.config import EngineConfig
from quintet.engine.chat import render_chats
from quintet.engine.client import Client
from quintet.engine.prompts import Prompt, parse_prompts
from quintet.outputs import RequestOutput
from quintet.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Follower = tuple[
    asyncio.AbstractEventLoop, asyncio.Queue[RequestOutput | Exception]
]  # who waits for outputs, and where


class AsyncLLM:
    """Many requests at once from coroutines. Keyword arguments are EngineConfig's fields.

    llm = AsyncLLM("bundled")
    async for output in llm.generate("Once upon a time", SamplingParams(output_kind=RequestOutputKind.DELTA)):
        print(output.outputs[0].text, end="")
    """

    def __init__(self, model: str | None = None, *, use_tqdm: bool = False, **kwargs: Any) -> None:
        if model is not None:
            kwargs["model"] = model
        self._client = Client(EngineConfig.from_kwargs(**kwargs), use_tqdm)
        self._queues: dict[str, Follower] = {}
        self._lock = threading.Lock()  # of the client: a step and an admission do not mix
        self._work = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="quintet-engine", daemon=True)
        self._thread.start()

    @property
    def config(self) -> EngineConfig:
        """As the platform settled it."""
        return self._client.config

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Completes one prompt; yields as sampling_params.output_kind says. Leaving the loop ends the request."""
        parsed = parse_prompts(prompt, self._client.tokenizer, self._client.vocab_size)
        if len(parsed) != 1:
            raise ValueError(f"generate() takes one prompt, not {len(parsed)}; call it once for each")
        async for output in self._follow(parsed[0], sampling_params, request_id, priority):
            yield output

    async def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **template: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answers one conversation; `template` as in LLM.chat."""
        if self._client.tokenizer is None:
            raise ValueError("this AsyncLLM was started with skip_tokenizer_init=True; start it without for chats")
        (prompt,) = render_chats(self._client.tokenizer, messages, **template)
        async for output in self._follow(prompt, sampling_params, request_id, 0):
            yield output

    async def abort(self, request_id: str) -> None:
        """Ends a request; whoever follows it gets its last output."""
        with self._lock:
            outputs = self._client.abort([request_id])
        self._deliver(outputs)
        self._work.set()

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer object, or None without a tokenizer."""
        return self._client.tokenizer.hf if self._client.tokenizer else None

    def get_default_sampling_params(self) -> SamplingParams:
        return self._client.admission.default_params()

    def get_metrics(self) -> dict[str, float]:
        """Numbers of the engine since its start: see quintet.engine.engine.Stats."""
        return self._client.metrics()

    async def reset_prefix_cache(self) -> None:
        with self._lock:
            self._client.engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Stops the engine's thread; requests that still run end with an error."""
        self._closed = True
        self._work.set()
        self._thread.join()
        self._client.close()

    async def _follow(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, priority: int
    ) -> AsyncIterator[RequestOutput]:
        request_id = self._client.next_id() if request_id is None else request_id
        follower: Follower = asyncio.get_running_loop(), asyncio.Queue()
        await asyncio.to_thread(
            self._add, request_id, prompt, params or self.get_default_sampling_params(), priority, follower
        )
        queue, finished = follower[1], False
        try:
            while not finished:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            self._queues.pop(request_id, None)
            if not finished:
                await self.abort(request_id)

    def _add(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int, follower: Follower) -> None:
        """In a thread, since a step may hold the lock for a while."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this AsyncLLM was shut down; make a new one")
            self._client.add(request_id, prompt, params, priority)
            self._queues[request_id] = follower
        self._work.set()

    def _loop(self) -> None:
        while not self._closed:
            self._work.wait()
            self._work.clear()
            try:
                while not self._closed and self._client.busy:
                    with self._lock:
                        outputs = self._client.step()
                    self._deliver(outputs)
            except Exception as error:
                logger.exception("the engine's thread failed")
                self._closed = True
                self._end_all(RuntimeError(f"the engine failed: {type(error).__name__}: {error}"))
        self._end_all(RuntimeError("the engine was shut down while the request ran"))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            follower = self._queues.get(output.request_id)
            if follower is not None:
                _put(follower, output)

    def _end_all(self, error: Exception) -> None:
        with self._lock:
            followers, self._queues = list(self._queues.values()), {}
        for follower in followers:
            _put(follower, error)


def _put(follower: Follower, item: RequestOutput | Exception) -> None:
    """Hands over to the follower's loop; one that is closed has nobody listening."""
    loop, queue = follower
    if not loop.is_closed():
        loop.call_soon_threadsafe(queue.put_nowait, item)
