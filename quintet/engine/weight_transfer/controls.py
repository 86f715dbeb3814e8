"""Pauses of an engine, and updates of its weights, between two steps."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from quintet.config import EngineConfig
from quintet.engine.executor.media_parts import incoming_parts
from quintet.engine.executor.worker import Worker
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.observability.stats import WeightStats
from quintet.engine.weight_transfer import orders
from quintet.engine.weight_transfer.between_steps import BetweenSteps
from quintet.engine.weight_transfer.receivers import Receiver, open_receiver, receive_files
from quintet.engine.weight_transfer.worker_view import WorkerView, call_method
from quintet.interface.platform import DeviceLost
from quintet.model_loader.incoming import Incoming
from quintet.model_loader.incoming_parts import IncomingParts

logger = logging.getLogger(__name__)

FIRST_VERSION = "default"  # of the weights that an engine starts with, as in vLLM
PAUSE_SECONDS = 0.005  # that a call of compute() waits while nothing may run

Agree = Callable[[orders.WeightOrder, Callable[[], Any]], Any]  # carries out an order on all ranks


def alone(order: orders.WeightOrder, work: Callable[[], Any]) -> Any:
    """Carries out an order where there is one process of ranks."""
    return work()


@dataclass
class UpdateState:
    """State of a weight update: none, open, or torn."""

    phase: str = ""  # "": the weights are whole; "open": tensors may come; "torn": an update failed after it wrote
    why: str = ""  # it is torn
    draft: bool = False  # of the draft model, whose weights decide no token
    must_be_full: bool = False  # the weights were torn before this update
    implicit: bool = False  # begun by load_weights(): ends by itself once all tensors are there
    # of an implicit one, on any rank: tensors without which others that came make no weight
    pending: list[str] = field(default_factory=list)


class Controls:
    """Pause and update of one engine. Called between two steps, by each rank alike."""

    def __init__(
        self, ranks: WorkerGroup, engine: BetweenSteps, config: EngineConfig | None, agree: Agree = alone
    ) -> None:
        self._ranks, self._engine, self._agree = ranks, engine, agree
        self.is_local = ranks.channel is None  # all ranks are in this process
        self._extension = None if config is None else config.worker_extension_cls
        self._number = 0 if config is None else config.data_parallel_rank or 0  # of the engine
        self.version, self.num_updates = FIRST_VERSION, 0
        self.state, self._mode = UpdateState(), ""
        self._receiver: Receiver | None = None
        self._views: list[WorkerView] | None = None

    @property
    def is_open(self) -> bool:
        """True between start_weight_update() and finish_weight_update()."""
        return self.state.phase == "open" and not self.state.implicit

    @property
    def is_paused(self) -> bool:
        """True if no step may start."""
        if self.state.phase:
            return True
        return self._mode in ("abort", "keep") or (self._mode == "wait" and not self._engine.has_admitted())

    @property
    def refusal(self) -> str:
        """Returns why no request is taken; "": they are, and wait where the engine is paused."""
        state = self.state
        if state.phase == "torn":
            return (
                f"the weights were replaced in part, and that failed ({state.why}); send a full update, or call "
                "reload_weights()"
            )
        if state.implicit and state.pending:
            return f"the weights were replaced in part: {state.pending[0]} never came; send it too"
        return ""

    @property
    def blocks_steps(self) -> bool:
        """True if no step may start, and none will until another order comes."""
        return self.is_paused and not (self.state.implicit and not self.state.pending)

    def wait(self) -> None:
        """Waits a moment: nothing may run, and the caller will ask again."""
        time.sleep(PAUSE_SECONDS)

    def settle(self) -> None:
        """Ends an update that load_weights() began, once all its tensors are there."""
        if not (self.state.implicit and self.state.phase == "open" and not self.state.pending):
            return
        try:
            for incoming in self._incoming():
                incoming.place_waiting()
        except ValueError as error:  # its call has ended: requests learn of it
            self.fail(str(error), wrote=True)
            return
        self._commit(None, False)

    def run(self, order: orders.WeightOrder, agree: Agree | None = None) -> Any:
        """Carries out an order on all ranks -> its result, of plain data; for calls of workers, one of each rank.
        ValueError says why it is refused, or failed: an update then has failed on all."""
        try:
            return (agree or self._agree)(order, lambda: self._carry_out(order))
        except DeviceLost:
            raise
        except Exception as error:
            if isinstance(order, orders.ReceiveWeightsCommand | orders.FinishUpdateCommand):
                self.fail(str(error), isinstance(error, orders.UpdateFailed) and error.wrote)
            raise

    def _carry_out(self, order: orders.WeightOrder) -> Any:
        handlers: dict[type, Callable[[Any], Any]] = {
            orders.PauseCommand: self._pause,
            orders.ResumeCommand: self._resume,
            orders.EndRequestsCommand: self._end_requests,
            orders.RecomputeCommand: lambda order: self._engine.recompute(),
            orders.InitTransferCommand: self._open,
            orders.CloseTransferCommand: lambda order: self.close(),
            orders.StartUpdateCommand: lambda order: self._start(order.draft),
            orders.ReceiveWeightsCommand: self._receive,
            orders.CheckUpdateCommand: lambda order: self._check(order.partial),
            orders.FinishUpdateCommand: lambda order: self._commit(order.version, order.keep_kv),
            orders.FailUpdateCommand: lambda order: self.fail(order.why),
            orders.SetVersionCommand: self._set_version,
            orders.CallWorkersCommand: lambda order: self._call(order.method, order.args, order.kwargs),
        }
        return handlers[type(order)](order)

    def _start(self, draft: bool = False) -> None:
        """Begins an update: no step runs until it ends. Begins anew where one is open. ValueError if weights sleep, or
        there is no draft model for an update of its weights."""
        self._engine.check_weights()
        if draft and any(worker.drafter is None for worker in self._ranks.workers):
            raise ValueError(
                "this engine has no draft model; start it with a speculative_config that has one, or call "
                "start_weight_update()"
            )
        self._engine.finish_steps()
        torn = (self.wrote and not self.state.draft) or self.state.phase == "torn" or self.state.must_be_full
        if torn and draft:
            raise ValueError(f"{self.refusal or 'an update of all weights is open'}; then update the draft model")
        self._ranks.map_workers(partial(_begin, draft=draft))
        self.state = UpdateState("open", draft=draft, must_be_full=torn)

    def put(self, tensors: Iterable[tuple[str, Tensor]], owned: bool = False) -> None:
        """Takes tensors by checkpoint name on the ranks of this process. ValueError if no update is open, or a tensor
        has no place. `owned`: the caller changes no tensor any more."""
        self._check_open()
        try:
            for each in tensors:
                self._ranks.map_workers(partial(_put, each, owned))
        except BaseException as error:
            self.fail(str(error))
            raise

    def _check(self, partial: bool) -> None:
        """ValueError if tensors are missing that must come before finish."""
        self._check_open()
        if partial and self.state.must_be_full:
            raise ValueError(
                "partial=True, and an earlier update had failed after it had replaced some weights; send all tensors"
            )
        for incoming in self._incoming():
            incoming.finish(partial)

    def fail(self, why: str, wrote: bool = False) -> None:
        """Ends an update. Weights are torn if any was written (`wrote`: on another rank); else nothing has changed."""
        if self.state.phase != "open":
            return
        if self.state.draft:
            if wrote or self.wrote:
                logger.warning("the draft model's weights were replaced in part (%s); fewer drafts are accepted", why)
            self.state = UpdateState()
        elif wrote or self.wrote or self.state.must_be_full:
            self.state = UpdateState("torn", why[:200], must_be_full=True)
        else:
            self.state = UpdateState()
        self._drop_incoming()

    @property
    def wrote(self) -> bool:
        """True if the open update has written a weight of this process's ranks."""
        return any(incoming.num_written for incoming in self._incoming())

    def reloaded(self) -> None:
        """Notes that all weights were read from a folder."""
        self._drop_incoming()
        self.state, self.version = UpdateState(), FIRST_VERSION
        self.num_updates += 1

    def _call(self, method: Any, args: Any = (), kwargs: Any = None) -> list[Any]:
        """Calls a method of each worker of this process, by name, or a function of its WorkerView -> the results."""
        self._engine.finish_steps()
        views = dict(zip(self._ranks.workers, self._views_by_rank(), strict=True))
        results = self._ranks.map_workers(lambda worker: call_method(views[worker], method, args, kwargs))
        self.state.pending = self.pending
        return results

    def stats(self) -> WeightStats:
        """May be called from another thread."""
        return WeightStats(self.version, self.num_updates, int(self.is_paused), int(self.state.phase == "torn"))

    def close(self) -> None:
        """Closes the way by which tensors come."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def load(self, worker: Worker, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """load_weights() of one worker: its tensors join the update that is open, or one that begins and ends by
        itself."""
        self._engine.check_weights()
        if self.state.phase != "open":
            self.state = UpdateState("open", implicit=True, must_be_full=self.state.phase == "torn")
        if worker.incoming is None:
            _begin(worker)
        for each in tensors:
            _put(each, False, worker)

    def _pause(self, order: orders.PauseCommand) -> bool:
        """Returns whether nothing runs any more: with mode "wait", the caller asks again until so."""
        if order.mode == "wait":
            if self._mode != "wait":
                self._mode = "wait"
                self._engine.stop_admitting(True)
            if not self.is_paused:
                return False
        self._mode = order.mode
        self._engine.finish_steps()
        if order.mode == "abort":
            self._engine.end_requests(None)
        if order.clear_cache and order.mode != "keep":
            self._engine.clear_cache()
        return True

    def _end_requests(self, order: orders.EndRequestsCommand) -> int:
        """Returns the number of requests that were there."""
        self._engine.finish_steps()
        return self._engine.end_requests(order.request_ids)

    def _resume(self, order: orders.ResumeCommand) -> None:
        self._mode = ""
        self._engine.stop_admitting(False)

    def _open(self, order: orders.InitTransferCommand) -> None:
        self.close()
        infos = [worker.rank_info for worker in self._ranks.workers]
        numbers = [self._number * each.size + each.rank for each in infos]
        self._receiver = open_receiver(order.info, numbers, self._views_by_rank()[0].device)

    def _receive(self, order: orders.ReceiveWeightsCommand) -> int:
        """Returns the number of tensors that came."""
        self._check_open()

        def expect(name: str, shape: list[int], dtype: Any) -> None:
            for incoming in self._incoming():
                incoming.expect(name, shape, dtype)

        from_files = "segment" in order.info or "folder" in order.info
        if from_files:
            tensors = receive_files(order.info, expect)
        elif self._receiver is None:
            raise ValueError("no transfer was opened; call init_weight_transfer_engine() first")
        else:
            tensors = self._receiver.receive(order.info, expect)
        count = 0
        try:
            for name, tensor in tensors:
                self.put([(name, tensor)], owned=not from_files)
                count += 1
        except BaseException:
            if not from_files:  # what is left of the transfer would be taken for the next one
                self.close()
            raise
        return count

    def _commit(self, version: str | None, keep_kv: bool) -> None:
        self._check_open()
        self._drop_incoming()
        for worker in self._ranks.workers:
            worker.main.has_files_weights &= self.state.draft
        self.num_updates += 1
        self.version = orders.check_version(version) or str(self.num_updates)
        self.state = UpdateState()
        self._engine.weights_changed(keep_kv)
        logger.info("weights are of version %s", self.version)

    def _set_version(self, order: orders.SetVersionCommand) -> None:
        self.version = orders.check_version(order.version) or FIRST_VERSION

    def _check_open(self) -> None:
        if self.state.phase == "torn":
            raise ValueError(f"{self.refusal}; a full update begins with start_weight_update()")
        if self.state.phase != "open":
            raise ValueError("no weight update is open; call start_weight_update() first")

    def _drop_incoming(self) -> None:
        for worker in self._ranks.workers:
            worker.incoming = None
            if worker.tower is not None:
                worker.tower.weights_changed()

    @property
    def pending(self) -> list[str]:
        """Tensors without which some that came make no weight, on the ranks of this process."""
        if self.state.implicit and self.state.must_be_full:
            return self._lacking()
        return next((incoming.pending for incoming in self._incoming() if incoming.pending), [])

    def _incoming(self) -> list[IncomingParts]:
        return [worker.incoming for worker in self._ranks.workers if worker.incoming is not None]

    def _lacking(self) -> list[str]:
        """The same of an update that must be full."""
        for incoming in self._incoming():
            try:
                incoming.finish()
            except ValueError as error:
                return [str(error)]
        return []

    def _views_by_rank(self) -> list[WorkerView]:
        if self._views is None:
            self._views = [WorkerView.of(worker, self, self._extension) for worker in self._ranks.workers]
        return self._views


def _put(named: tuple[str, Tensor], owned: bool, worker: Worker) -> None:
    assert worker.incoming is not None, "an update has begun"
    worker.incoming.put(*named, owned)


def _begin(worker: Worker, draft: bool = False) -> None:
    worker.finish_store()
    if not draft:
        worker.incoming = incoming_parts(worker)
        return
    assert worker.drafter is not None, "it was looked for"
    worker.incoming = IncomingParts([Incoming(worker.drafter.model, worker.platform)])
