"""Methods of AsyncLLM that verl's and OpenRLHF's rollout actors call. Names are vLLM's."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from quintet.config import EngineConfig
from quintet.engine.client import EngineClient

R = TypeVar("R", bound="AsyncRolloutMethods")
_UNUSED = ("usage_context", "stat_loggers", "enable_log_requests", "disable_log_stats")  # of from_vllm_config
_POLL = 0.01  # seconds between two looks at whether requests have finished


class AsyncRolloutMethods:
    """Counts requests, waits for their end, and opens an engine as verl does."""

    _client: EngineClient

    @classmethod
    def from_vllm_config(cls: type[R], vllm_config: EngineConfig, **unused: Any) -> R:
        """Creates an engine with the settings of EngineArgs.create_engine_config(). What vLLM's engine logs is left
        out. TypeError for other arguments."""
        unknown = sorted(unused.keys() - set(_UNUSED))
        if unknown:
            raise TypeError(f"from_vllm_config takes vllm_config, {', '.join(_UNUSED)}, not {unknown[0]!r}")
        handle: Any = cls  # the class that has these methods is one
        made: R = handle.from_engine_args(vllm_config)
        return made

    @property
    def output_processor(self: R) -> R:
        """This engine, which has get_num_unfinished_requests()."""
        return self

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of requests that have not ended."""
        return len(self._client.output_processor)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Returns once no request is left. TimeoutError after so many seconds."""
        end = time.monotonic() + drain_timeout
        while left := self.get_num_unfinished_requests():
            if time.monotonic() > end:
                raise TimeoutError(f"{left} requests run after {drain_timeout:g} s; abort() ends them")
            await asyncio.sleep(_POLL)

    async def reset_mm_cache(self) -> None:
        """Forgets what was computed of images, video and audio, and with it the cached prefixes."""
        await self._call(self._client.engine.reset_prefix_cache)

    async def _call(self, function: Callable[[], None]) -> None:
        """Has the engine's thread do it before its next step."""
        raise NotImplementedError
