"""Calls of people who train: pauses, new weights, and functions of workers. Names are vLLM's."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from quintet.api.thread_sharing import SharedClient
from quintet.engine.client import EngineClient
from quintet.engine.weight_transfer import orders, updates

T = TypeVar("T")

Tensors = Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]


def world_size(client: EngineClient, include_dp: bool) -> int:
    """Returns the number of ranks of an engine, or of all engines."""
    config = client.config
    ranks: int = config.tensor_parallel_size * config.pipeline_parallel_size
    return ranks * (config.data_parallel_size if include_dp else 1)


def is_request(tensors: Any) -> bool:
    """True for vLLM's request of a transfer, and not tensors."""
    return hasattr(tensors, "update_info") or (isinstance(tensors, Mapping) and "update_info" in tensors)


def receive_order(request: Any) -> orders.ReceiveWeightsCommand:
    """Returns the order for a request of a transfer."""
    return orders.ReceiveWeightsCommand(updates.info_of(request, "update_info"))


class WeightUpdateMethods:
    """Methods of LLM and LLMEngine. Each is done between two steps."""

    _client: EngineClient
    _shared: SharedClient
    _paused_by: int | None = None  # the thread that paused the engine: it would wait for itself

    def pause(self, mode: orders.PauseMode = "abort", clear_cache: bool = True) -> None:
        """Starts no more steps until resume(). Requests that come wait.

        `mode`: requests that are there end with finish_reason "abort", finish first ("wait"), or stand still until
        resume() ("keep"). clear_cache: cached prefixes are forgotten, unless requests are kept.
        """
        order = _pause_order(mode, clear_cache)
        while not self._order(order):
            self._shared.step(frozenset())
        self._paused_by = threading.get_ident()

    def resume(self) -> None:
        """Ends a pause: requests go on."""
        self._order(orders.ResumeCommand())
        self._paused_by = None

    def is_paused(self) -> bool:
        """True after pause(), and while a weight update is open or has failed."""
        return bool(self._client.engine.stats().weights.paused)

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Opens the way by which update_weights() gets tensors: {"init_info": {...}}, see docs/training.md. ValueError
        or OSError says why it cannot be opened."""
        self._order(orders.InitTransferCommand(updates.info_of(request, "init_info")))

    def shutdown_weight_transfer_engine(self) -> None:
        """Closes the way that init_weight_transfer_engine() opened; does nothing without one."""
        self._order(orders.CloseTransferCommand())

    def start_weight_update(self) -> None:
        """Begins an update: no step runs until finish_weight_update(). Begins anew if one is open or has failed."""
        self._order(orders.StartUpdateCommand())
        self._paused_by = threading.get_ident()

    def start_draft_weight_update(self) -> None:
        """Begins an update of the draft model's or draft head's weights, as start_weight_update() does: names are those
        of its own checkpoint. ValueError if there is none."""
        self._order(orders.StartUpdateCommand(draft=True))
        self._paused_by = threading.get_ident()

    def update_weights(
        self, tensors: Any, *, weight_version: str | None = None, partial: bool = False, keep_kv: bool = False
    ) -> None:
        """Takes tensors by their names in the checkpoint's files: (name, tensor) pairs or a dictionary, in any order.

        Alone, it is a whole update: running requests stand still meanwhile, and go on with the tokens that they have.
        ValueError names tensors that have no place or another shape or type, and, unless `partial`, those that never
        came. After start_weight_update() it only takes tensors, also those of vLLM's request, {"update_info": {...}}.
        `weight_version`, `keep_kv`: as in finish_weight_update().
        """
        if is_request(tensors):
            self._order(receive_order(tensors))
            return
        controls = self._client.engine.controls
        if self._paused_by is not None and self._is_open():
            parts = updates.transfers(controls, tensors)
        else:
            finish = orders.FinishUpdateCommand(orders.check_version(weight_version), keep_kv)
            parts = updates.update(controls, tensors, finish, partial)
            self._paused_by = threading.get_ident()
        try:
            for part in parts:
                self._shared.call(part)
        except BaseException as error:
            self._order(orders.FailUpdateCommand(str(error) or type(error).__name__))
            raise
        self._settle()

    def finish_weight_update(
        self, weight_version: str | None = None, *, partial: bool = False, keep_kv: bool = False
    ) -> None:
        """Ends an update, on all ranks or on none. ValueError names tensors that never came, unless `partial`; the
        update is then still open.

        Cached prefixes are forgotten, and running requests are computed again; with `keep_kv` they keep what other
        weights computed for them. `weight_version`: text that answers and metrics have; the number of the update if it
        is left out.
        """
        finish = orders.FinishUpdateCommand(weight_version, keep_kv)
        self._shared.call(lambda: updates.end(self._client.engine.controls, finish, partial))
        self._settle()

    def update_weight_version(self, new_version: str) -> None:
        """Names the weights that are served."""
        self._order(orders.SetVersionCommand(orders.check_version(new_version) or ""))

    def get_weight_version(self) -> str:
        """Returns the name of the weights that are served: "default" are those of the start."""
        return self._client.engine.controls.version

    def get_world_size(self, include_dp: bool = True) -> int:
        """Returns the number of ranks that take weights, of all engines or of each."""
        return world_size(self._client, include_dp)

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """Calls a function of each rank's model -> its results. ValueError where ranks are other processes."""
        call: Any = lambda view: func(view.get_model())  # noqa: E731
        return self._shared.call(lambda: updates.call_workers(self._client.engine.controls, call, (), {}))

    def _order(self, order: orders.WeightOrder) -> Any:
        return self._shared.call(lambda: self._client.engine.controls.run(order))

    def _is_open(self) -> bool:
        return self._client.engine.controls.is_open

    def _settle(self) -> None:
        if not self.is_paused():
            self._paused_by = None

    def _check_not_waiting(self) -> None:
        """ValueError if a request of this thread would wait until this thread resumes."""
        if self._paused_by == threading.get_ident() and self.is_paused():
            if self._is_open():
                raise ValueError("a weight update is open, and no step runs; call finish_weight_update() first")
            if not self._client.engine.controls.refusal:
                raise ValueError("the engine is paused, and no step runs; call resume() first")


def _pause_order(mode: Any, clear_cache: bool) -> orders.PauseCommand:
    if mode not in ("abort", "wait", "keep"):
        raise ValueError(f"mode is abort, wait or keep, not {repr(mode)[:40]}")
    return orders.PauseCommand(mode, bool(clear_cache))


class AsyncWeightUpdateMethods:
    """The same methods of AsyncLLM."""

    _client: EngineClient

    async def _call(self, function: Callable[[], None]) -> None:
        """Has the engine's thread do it before its next step."""
        raise NotImplementedError

    async def pause_generation(
        self, *, mode: orders.PauseMode = "abort", clear_cache: bool = True, wait_for_inflight_requests: bool = False
    ) -> None:
        """See LLM.pause; wait_for_inflight_requests is mode="wait"."""
        order = _pause_order("wait" if wait_for_inflight_requests else mode, clear_cache)
        while not await self._order(order):
            pass

    async def resume_generation(self) -> None:
        """See LLM.resume."""
        await self._order(orders.ResumeCommand())

    pause, resume = pause_generation, resume_generation

    async def is_paused(self) -> bool:
        """See LLM.is_paused."""
        return bool(self._client.engine.stats().weights.paused)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """See LLM.init_weight_transfer_engine."""
        await self._order(orders.InitTransferCommand(updates.info_of(request, "init_info")))

    async def shutdown_weight_transfer_engine(self) -> None:
        """See LLM.shutdown_weight_transfer_engine."""
        await self._order(orders.CloseTransferCommand())

    async def start_weight_update(self) -> None:
        """See LLM.start_weight_update."""
        await self._order(orders.StartUpdateCommand())

    async def start_draft_weight_update(self) -> None:
        """See LLM.start_draft_weight_update."""
        await self._order(orders.StartUpdateCommand(draft=True))

    async def update_weights(
        self, tensors: Any, *, weight_version: str | None = None, partial: bool = False, keep_kv: bool = False
    ) -> None:
        """See LLM.update_weights."""
        if is_request(tensors):
            await self._order(receive_order(tensors))
            return
        controls = self._client.engine.controls
        if controls.is_open:
            parts = updates.transfers(controls, tensors)
        else:
            finish = orders.FinishUpdateCommand(orders.check_version(weight_version), keep_kv)
            parts = updates.update(controls, tensors, finish, partial)
        try:
            for part in parts:
                await self._work(part)
        except BaseException as error:
            await self._order(orders.FailUpdateCommand(str(error) or type(error).__name__))
            raise

    async def finish_weight_update(
        self, weight_version: str | None = None, *, partial: bool = False, keep_kv: bool = False
    ) -> None:
        """See LLM.finish_weight_update."""
        finish = orders.FinishUpdateCommand(weight_version, keep_kv)
        await self._work(lambda: updates.end(self._client.engine.controls, finish, partial))

    async def update_weight_version(self, new_version: str) -> None:
        """See LLM.update_weight_version."""
        await self._order(orders.SetVersionCommand(orders.check_version(new_version) or ""))

    async def get_weight_version(self) -> str:
        """See LLM.get_weight_version."""
        return self._client.engine.controls.version

    async def get_world_size(self, include_dp: bool = True) -> int:
        """See LLM.get_world_size."""
        return world_size(self._client, include_dp)

    async def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """See LLM.apply_model."""
        call: Any = lambda view: func(view.get_model())  # noqa: E731
        found: list[T] = await self._work(lambda: updates.call_workers(self._client.engine.controls, call, (), {}))
        return found

    async def _order(self, order: orders.WeightOrder) -> Any:
        return await self._work(lambda: self._client.engine.controls.run(order))

    async def _work(self, function: Callable[[], Any]) -> Any:
        results: list[Any] = []
        await self._call(lambda: results.append(function()))
        return results[0]


class ModelLoader:
    """Path by which TRL's colocate mode writes weights:
    llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights()."""

    def __init__(self, call: Callable[[Any, Sequence[Any]], list[Any]]) -> None:
        """`call` calls a method of all workers."""
        self._call = call

    @property
    def model_runner(self) -> "ModelLoader":
        """The next part of that path."""
        return self

    @property
    def model(self) -> "ModelLoader":
        """The last part of that path."""
        return self

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Writes tensors by their names in the checkpoint's files -> the names. Several calls may make one update:
        requests are refused while a weight lacks some of its tensors. ValueError: a tensor has no place."""
        tensors = list(weights)
        self._call("load_weights", [tensors])
        return {name for name, _ in tensors}
