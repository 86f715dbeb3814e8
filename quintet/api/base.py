"""Common methods of LLM, LLMEngine and AsyncLLM: settings, metrics, and all calls that take no prompts."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from quintet.api.collective_rpc import collective_rpc, save_sharded_state
from quintet.api.lora import LoRAMethods
from quintet.api.thread_sharing import SharedClient
from quintet.api.weight_updates import WeightUpdateMethods
from quintet.config import EngineConfig
from quintet.config.schema.error_names import keywords
from quintet.engine.client import EngineClient
from quintet.engine.observability.metrics import Metric, metrics_of
from quintet.engine.sleep import release_kv_cache_memory
from quintet.engine.weight_transfer.orders import RecomputeCommand
from quintet.sampling_params import SamplingParams

O = TypeVar("O", bound="EngineHandle")  # noqa: E741


class EngineHandle:
    """Base of the classes that have an engine."""

    _client: EngineClient

    @classmethod
    def from_engine_args(cls: type[O], engine_args: EngineConfig) -> O:
        """Creates an instance with these settings: EngineArgs, AsyncEngineArgs or an EngineConfig."""
        if not isinstance(engine_args, EngineConfig):
            raise ValueError(f"engine_args are EngineArgs or an EngineConfig, not {type(engine_args).__name__}")
        opened = cls.__new__(cls)
        opened._begin(engine_args.replace(), False)
        return opened

    def _open(self, model: str | None, use_tqdm: bool, kwargs: dict[str, Any]) -> None:
        if model is not None:
            kwargs["model"] = model
        with keywords(kwargs, EngineConfig):
            self._begin(EngineConfig.from_kwargs(**kwargs), use_tqdm)

    def _begin(self, config: EngineConfig, use_tqdm: bool) -> None:
        self._client = EngineClient(config, use_tqdm)

    @property
    def config(self) -> EngineConfig:
        """Configuration, as the platform has completed it."""
        return self._client.config

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters of the model's generation config; a fresh copy."""
        return self._client.input_processor.default_params()

    def get_metrics(self) -> list[Metric]:
        """Returns the metrics of steps and requests, as vLLM's objects: Counter, Gauge, Histogram and Vector."""
        return metrics_of(self._client.engine.stats(), self._client.request_stats, self.config.model)

    def get_stats(self) -> dict[str, float]:
        """The same numbers by our names: see quintet.engine.observability.stats.Stats."""
        return self._client.metrics()


class SteppedHandle(LoRAMethods, WeightUpdateMethods, EngineHandle):
    """Base of the classes that share an engine among threads. Each call is done between two steps."""

    _shared: SharedClient

    def _begin(self, config: EngineConfig, use_tqdm: bool) -> None:
        super()._begin(config, use_tqdm)
        self._shared = SharedClient(self._client)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets cached beginnings, as after a change of weights. Returns True.

        Running requests go on with their pages, which no later request finds; with reset_running_requests they are
        computed again. A KV connector's pages are always forgotten, too.
        """
        reset = self._client.engine.reset_prefix_cache
        self._shared.call(
            partial(self._client.engine.controls.run, RecomputeCommand()) if reset_running_requests else reset
        )
        return True

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Any = None
    ) -> list[Any]:
        """Calls a method of each worker by name -> its results: one of the class that worker_extension_cls names,
        weight_checksums, load_weights, reload_weights, update_config of the load format, save_sharded_state, sleep,
        wake_up or check_health. Where all ranks are in this process, `method` may be a function of the WorkerView.
        ValueError says why it cannot be called. A call has no `timeout`: what a worker does is not interrupted."""
        return self._shared.call(lambda: collective_rpc(self._client, method, args, kwargs or {}))

    def reload_weights(self, path: str | None = None) -> None:
        """Takes over the weights of a folder or hub id, or of the engine's own folder as it is now, while it runs.

        They are of the same model, in the same form. Nothing is compiled or recorded anew; cached beginnings are
        forgotten, and running requests go on with the tokens that they have. ValueError: nothing has changed.
        """
        self._shared.call(lambda: self._client.reload_weights(path))

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Writes each rank's weights as they are placed, for load_format="sharded_state" with the same settings.

        The configuration and the tokenizer are copied beside. Files have vLLM's names; each rank writes one, whatever
        max_size is. ValueError for another pattern, and where weights are not in the host's memory.
        """
        self._shared.call(lambda: save_sharded_state(self._client, path, pattern, max_size))

    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory back until wake_up(). Level 1 puts weights aside on the host, level 2 drops them.

        Cached beginnings are forgotten. ValueError while requests run; NotImplementedError if the platform cannot.
        """
        self._shared.call(lambda: self._client.engine.sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Ends the sleep; after level 2 the weights are read again, from the folder as it is now.

        If there is no room any more, MemoryError says what is missing, and the call may be repeated. `tags`: what
        wakes, ["weights"] first, so that others may be written, and then ["kv_cache"]; both if left out.
        """
        self._shared.call(lambda: self._client.wake_up(tags))

    def release_kv_cache_memory(self) -> None:
        """Gives the memory of the KV cache back, and keeps the weights; wake_up(["kv_cache"]) takes it again. As
        sleep(), it is refused while requests run."""
        self._shared.call(lambda: release_kv_cache_memory(self._client.engine))

    def is_sleeping(self) -> bool:
        """True if it was put to sleep, and takes no requests."""
        return bool(self._client.engine.asleep)

    def start_profile(self) -> None:
        """Begins a trace of the engine's steps and kernels, as profiler_config allows and bounds it.

        ValueError if it does not allow traces, or if one runs. What is generated is the same to the bit; it takes
        longer, so that times in a trace are to be compared with one another.
        """
        self._shared.call(self._client.engine.profiler.start)

    def stop_profile(self) -> str:
        """Ends the trace -> its file, in profiler_config.torch_profiler_dir: for ui.perfetto.dev or chrome://tracing.

        A trace that reached a bound has ended before: then its file. ValueError if there is none; OSError if it
        cannot be written.
        """
        return str(self._shared.call(self._client.engine.profiler.stop).path)

    def close(self) -> None:
        """Ends the engine. Calls of other threads that wait for it, and all later ones, raise RuntimeError."""
        self._shared.close()
