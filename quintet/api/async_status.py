"""Methods of AsyncLLM about the engine's state and its queue, and requests whose outputs are fetched one by one.

Names are vLLM's.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from quintet.engine.client import EngineClient
from quintet.engine.sleep import release_kv_cache_memory
from quintet.outputs import RequestOutput
from quintet.pooling_outputs import PoolingOutput, answered


class EngineStopped(RuntimeError):
    """The engine's thread has ended; the message says why."""


class OutputStream(NamedTuple):
    """Event loop and queue of a caller that waits for a request's outputs."""

    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | EngineStopped]

    def put(self, item: RequestOutput | EngineStopped) -> bool:
        """Puts an item from any thread; False if the loop is closed, so that no caller listens."""
        try:
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, item)
        except RuntimeError:
            return False
        return True


class RequestOutputCollector:
    """Outputs of a request of add_request(), in order."""

    def __init__(self, request_id: str, stream: OutputStream, *, pools: bool = False) -> None:
        """`pools`: the outputs are numbers."""
        self.request_id, self._queue, self._pools = request_id, stream.outputs, pools

    async def get(self) -> Any:
        """Returns the next RequestOutput, and waits for it; of a request with PoolingParams its PoolingRequestOutput.
        EngineStopped if the engine ended; Unanswered if the request has no numbers."""
        return self._taken(await self._queue.get())

    def get_nowait(self) -> Any:
        """Returns the next output as get(), or None if there is none yet."""
        return None if self._queue.empty() else self._taken(self._queue.get_nowait())

    def _taken(self, output: RequestOutput | EngineStopped) -> Any:
        if isinstance(output, EngineStopped):
            raise output
        return answered(output, PoolingOutput) if self._pools else output


class AsyncStatusMethods:
    """State of the engine, and memory and caches that a caller may give back."""

    _client: EngineClient
    _closed: bool
    _why: str  # the engine's thread ended; "" while it runs, and after shutdown()

    @property
    def is_running(self) -> bool:
        """True until shutdown() or a failure of the engine."""
        return not self._closed

    @property
    def is_stopped(self) -> bool:
        """True after shutdown() or a failure of the engine."""
        return self._closed

    errored = is_stopped

    @property
    def dead_error(self) -> EngineStopped:
        """The error that calls raise when the engine has ended."""
        return EngineStopped(self._why or "this AsyncLLM was shut down; make a new one")

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer object, or None without a tokenizer."""
        return self._client.tokenizer.hf if self._client.tokenizer else None

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns ("generate",), or the tasks of a model that gives numbers."""
        pooling = self._client.input_processor.limits.pooling
        return ("generate",) if pooling is None else tuple(pooling.tasks)

    async def is_tracing_enabled(self) -> bool:
        """Returns False: `quintet serve` alone traces."""
        return False

    def get_num_queued_tokens(self) -> int:
        """Returns the prompt tokens of requests that have no token of output yet."""
        return self._client.output_processor.num_queued_tokens()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raises dead_error if no request can be added. The queue has no limit here; `quintet serve` has one."""
        if self._closed:
            raise self.dead_error

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        """Returns the SHA-256 of each weight as it is placed, for each rank."""
        return [dict(each) for each in await self.collective_rpc("weight_checksums")]

    async def reset_encoder_cache(self) -> None:
        """Forgets what was computed of images, video and audio, and with it the cached prefixes."""
        await self._call(self._client.engine.reset_prefix_cache)

    async def release_kv_cache_memory(self) -> None:
        """See LLM.release_kv_cache_memory."""
        await self._call(lambda: release_kv_cache_memory(self._client.engine))

    async def collective_rpc(self, method: Any) -> list[Any]:
        """Calls a method of each worker by name."""
        raise NotImplementedError

    async def _call(self, function: Callable[[], None]) -> None:
        """Has the engine's thread do it before its next step."""
        raise NotImplementedError
