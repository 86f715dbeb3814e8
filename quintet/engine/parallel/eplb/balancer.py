"""Moves experts by their measured load (EPLB): counts over a window of steps, at the same step on every rank."""

import logging
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from quintet.common.interrupts import DeferredSigint
from quintet.config import EPLBConfig
from quintet.engine.executor.worker import Worker
from quintet.engine.executor.worker_group import STEP_LEFT, WorkerGroup
from quintet.engine.observability.stats import ExpertStats, Stats
from quintet.engine.parallel.eplb.placement import balancedness, rebalanced
from quintet.engine.parallel.eplb.transfer import ExpertMove
from quintet.engine.parallel.expert_parallel import moe_layers_of
from quintet.engine.step_hook import Fail, StepHook
from quintet.engine.step_plan import StepPlan
from quintet.interface.platform import Channel, DeviceLost
from quintet.layers.moe.expert_placement import Placement
from quintet.layers.moe.moe import Experts

logger = logging.getLogger(__name__)

MAX_ERROR_BYTES = 800  # bytes of an error that other ranks receive

Loads = list[list[int]]  # by layer and expert: how often tokens were routed to it


class MoveFailed(RuntimeError):
    """Experts could not be moved to some rank, and so were moved to none."""


class ExpertBalancer(StepHook):
    """Balancer of experts. It counts expert ids, which are the same on all ranks, and planned steps; it uses no
    clock."""

    def __init__(self, config: EPLBConfig, ranks: WorkerGroup) -> None:
        self._config, self._ranks = config, ranks
        self._window = min(config.window_size, config.step_interval)
        self._steps = 0  # since experts were placed
        self._before: np.ndarray | None = None  # counts when the window began; None: it has not
        self._stats = ExpertStats()

    @property
    def waits_for_steps(self) -> bool:
        """True if experts are placed before the next step."""
        return self._steps >= self._config.step_interval

    def before_step(self, fail: Fail) -> None:
        if self.waits_for_steps:
            self._place()

    def before_launch(self, plan: StepPlan, fail: Fail) -> None:
        """Counts a step that begins, on every rank."""
        if not plan:
            return
        self._steps += 1
        if self._before is None and self._steps > self._config.step_interval - self._window:
            self._before = self._counts()

    def start_over(self) -> None:
        """Starts the window anew after a failed step, for which the counts of the ranks may differ."""
        self._before = None

    def add_stats(self, stats: Stats) -> Stats:
        return replace(stats, experts=self._stats)

    def _place(self) -> None:
        """Moves experts to a better placement, while no step runs. A move that fails on one rank is done on none. A
        layer that has moved stays so: the results of the next step are the same."""
        before, self._before, self._steps = self._before, None, 0
        if before is None:
            return
        loads: Loads = (self._counts() - before).tolist()  # unsigned: correct when a counter overflows, too
        if (channel := self._ranks.channel) is not None:
            _check_same_counts(channel, loads)
        layers = self._layers(self._ranks.workers[0])
        now = [each.rank_experts.placement for each in layers if each.rank_experts is not None]
        wanted = [rebalanced(*pair) for pair in zip(loads, now, strict=True)]
        was, will = _mean_balancedness(loads, now), _mean_balancedness(loads, wanted)
        moved, changes = 0, [index for index, new in enumerate(wanted) if new != now[index]]
        try:
            for index in changes:
                moved += self._move(index, wanted[index])
        except MoveFailed as error:
            logger.error("experts stay where they are: %s", error)
        done = self._stats
        self._stats = ExpertStats(was, done.expert_placements + bool(moved), done.experts_moved + moved)
        if self._config.log_balancedness:
            text = "balancedness of the last %d steps: %.3f; %.3f with experts of %d of %d layers placed anew"
            logger.info(text, self._window, was, will, len(changes), len(layers))

    def restore_placement(self) -> None:
        """Moves every expert back to its first place: a new engine can read weights that are saved then."""
        for index, layer in enumerate(self._layers(self._ranks.workers[0])):
            if layer.rank_experts is not None and layer.rank_experts.placement != layer.rank_experts.initial_placement:
                self._move(index, layer.rank_experts.initial_placement)

    def _move(self, index: int, new: Placement) -> int:
        """Moves the experts of one layer -> number of places, on all ranks, with an expert that came from another
        rank."""
        staged, error = list[ExpertMove](), None
        layer = self._layers(self._ranks.workers[0])[index]
        now = layer.rank_experts.placement if layer.rank_experts is not None else ()
        with DeferredSigint():
            try:
                staged = self._ranks.map_workers(lambda worker: ExpertMove(self._layers(worker)[index], new))
            except DeviceLost:
                raise
            except Exception as failed:  # all ranks receive it
                error = f"{type(failed).__name__}: {failed}"
            self._agree(error or "")
            for each in staged:
                each.write()
        return sum(expert not in own for own, wanted in zip(now, new, strict=True) for expert in wanted)

    def _agree(self, error: str) -> None:
        """Raises MoveFailed, on every rank, where one has an error."""
        channel = self._ranks.channel
        errors = [error] if channel is None else _exchange_errors(channel, error)
        if any(errors):
            causes = [(rank, each) for rank, each in enumerate(errors) if each]
            rank, why = next((each for each in causes if not each[1].startswith(STEP_LEFT)), causes[0])
            raise MoveFailed(f"rank {rank} of {len(errors)}: {why}")

    def _counts(self) -> np.ndarray:
        """Returns the counts [layers, E] of the first rank of this process, since it began."""
        worker = self._ranks.workers[0]
        waiting = [worker.device.to_host(each.loads) for each in self._layers(worker)]
        return torch.stack([each().clone() for each in waiting]).numpy().view(np.uint32)

    @staticmethod
    def _layers(worker: Worker) -> list[Experts]:
        return [layer for _, layer in moe_layers_of(worker.model)]


def _exchange_errors(channel: Channel, error: str) -> list[str]:
    notes = channel.exchange(error.encode()[:MAX_ERROR_BYTES])
    return [note.decode(errors="ignore") for note in notes]


def _check_same_counts(channel: Channel, loads: Loads) -> None:
    """Raises DeviceLost where ranks have different counts: they are no longer one model."""
    digests = channel.exchange(zlib.crc32(np.array(loads, np.int64).tobytes()).to_bytes(4, "little"))
    if len(set(digests)) > 1:
        lost = DeviceLost("the ranks have counted different loads of experts: they are no longer one model")
        channel.abort(str(lost))
        raise lost


def _mean_balancedness(loads: Loads, placements: Sequence[Placement]) -> float:
    """Returns the mean evenness of the layers."""
    each = [balancedness(*pair) for pair in zip(loads, placements, strict=True)]
    return sum(each) / len(each) if each else 1.0
