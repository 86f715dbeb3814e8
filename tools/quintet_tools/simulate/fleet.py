"""Engines in virtual time: requests arrive, the router gives each to an engine, and every engine steps by itself."""

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quintet.clients.request_traces import TraceEntry
from quintet.config import EngineConfig
from quintet.engine.data_parallel.balancing import LoadBalancer
from quintet.engine.engine import Engine
from quintet.engine.executor.engine_parts import EngineParts
from quintet.engine.kv_cache.groups import KVCacheGroup
from quintet.engine.kv_cache.manager import KVCacheManager
from quintet.engine.kv_cache.page_pool import PagePool
from quintet.engine.kv_cache.state_slots import StateSlotPool
from quintet.engine.memory_planner import MemoryPlan
from quintet.engine.observability.stats import Stats
from quintet.engine.request import CoreRequest
from quintet.engine.scheduler import Scheduler
from quintet.engine.sizing import scheduler_limits
from quintet.outputs import TokenDelta
from quintet.sampling_params import SamplingParams
from quintet_tools.simulate.cost_model import Costs, Shape
from quintet_tools.simulate.timed_runner import TimedSteps

VOCAB = 1000  # token ids of prompts; `quintet bench serve` sends the same
_ARRIVES, _STEPS = 0, 1  # a request that arrives at the moment of a step is in it


@dataclass
class Told:
    """Result of one request. Times are seconds of the trace."""

    entry: TraceEntry
    engine: int = -1
    scheduled: float = 0.0  # when its first step began
    times: "array[float]" = field(default_factory=lambda: array("d"))  # of its tokens
    cached: int = 0  # tokens of its prompt that were found in the prefix cache
    preemptions: int = 0


@dataclass(frozen=True)
class Played:
    """A trace that was played to its end."""

    told: Sequence[Told]
    stats: Sequence[Stats]  # by engine
    worked: Sequence[float]  # seconds that each engine computed
    seconds: float  # from the first arrival to the last token


class _Engine:
    """One of the fleet, and the deltas of the step that runs."""

    def __init__(self, config: EngineConfig, costs: Costs, machine: "_Machine", number: int) -> None:
        self.steps = TimedSteps(costs, machine.count, number)
        self.engine = Engine(EngineParts(scheduler_of(config, costs.shape), self.steps, costs.shape.overlap))
        self.machine = machine
        self.deltas: list[TokenDelta] = []
        self.stepping = False  # whether its next step has its place in time


class _Machine:
    """Machine that engines share."""

    def __init__(self) -> None:
        self.computing = 0

    def count(self) -> int:
        return max(1, self.computing)


def scheduler_of(config: EngineConfig, shape: Shape) -> Scheduler:
    """Returns the scheduler of an engine, with no model behind it."""
    plan = MemoryPlan(shape.num_pages, shape.max_model_len, None, 0, num_slots=shape.num_slots)  # type: ignore[arg-type]
    pool = PagePool(shape.num_pages, config.enable_prefix_caching)
    groups = tuple(KVCacheGroup(window) for window in shape.windows)
    slots = StateSlotPool(shape.num_slots, config.enable_prefix_caching) if shape.num_slots else None
    tables = KVCacheManager(pool, config.page_size, groups, config.step_tokens, slots)
    return Scheduler(scheduler_limits(config, plan), tables)


class Fleet:
    """A number of engines, and a router that gives them requests as a server's API process does."""

    def __init__(self, config: EngineConfig, costs: Costs) -> None:
        """`config`: with data_parallel_size engines, and what costs.shape says of each. Those of one machine, of which
        costs.sharing tells, follow one another."""
        count, size = config.data_parallel_size, len(costs.sharing)
        machines = [_Machine() for _ in range(-(-count // size))]
        self._engines = [_Engine(config, costs, machines[number // size], number) for number in range(count)]
        self._latency = costs.latency
        self._router = LoadBalancer(count, config.page_size) if count > 1 else None
        self._told: list[Told] = []
        self._queue: list[tuple[float, int, int]] = []  # (time, kind of event, number of the request or engine)

    def play(self, entries: Sequence[TraceEntry]) -> Played:
        """All requests, from the first arrival to the last token. ValueError: one that an engine would refuse."""
        self._told = [Told(entry) for entry in entries]
        self._queue = [(entry.arrival + self._latency, _ARRIVES, number) for number, entry in enumerate(entries)]
        heapq.heapify(self._queue)
        while self._queue:
            now, what, number = heapq.heappop(self._queue)
            if what == _ARRIVES:
                self._arrive(now, number)
            else:
                self._step(now, number)
        worked = [each.steps.worked for each in self._engines]
        first, last = min(each.arrival for each in entries), max(each.times[-1] for each in self._told)
        return Played(self._told, [each.engine.stats() for each in self._engines], worked, last - first)

    def _arrive(self, now: float, number: int) -> None:
        told = self._told[number]
        ids, name = told.entry.prompt(number, VOCAB), str(number)
        told.engine = 0 if self._router is None else self._router.choose(name, ids)
        self._engines[told.engine].engine.add(_admitted(name, told.entry, ids))
        self._wake(now, told.engine)

    def _wake(self, now: float, number: int) -> None:
        one = self._engines[number]
        if not one.stepping:
            one.stepping = True
            one.machine.computing += 1
            heapq.heappush(self._queue, (now, _STEPS, number))

    def _step(self, now: float, number: int) -> None:
        """The step that ran has ended; the next one begins with all who have come."""
        one = self._engines[number]
        for delta in one.deltas:
            self._tell(one, now, delta)
        one.deltas = []
        if not one.engine.busy:
            one.stepping = False
            one.machine.computing -= 1
            return
        one.steps.now = now
        before = one.steps.worked
        one.deltas = one.engine.step()
        assert one.deltas or one.steps.worked > before or one.steps.now > now, f"engine {number} stands still at {now}"
        heapq.heappush(self._queue, (one.steps.now, _STEPS, number))

    def _tell(self, one: _Engine, now: float, delta: TokenDelta) -> None:
        told = self._told[int(delta.request_id)]
        assert delta.error is None, delta.error
        for _ in delta.token_ids:
            told.times.append(now)
        if delta.finish_reason is not None:
            told.scheduled = one.steps.scheduled.pop(delta.request_id)
            told.cached, told.preemptions = delta.num_cached, delta.num_preemptions
            if self._router is not None:
                self._router.close(delta.request_id)


def _admitted(name: str, entry: TraceEntry, ids: list[int]) -> CoreRequest:
    return CoreRequest(name, ids, _PARAMS, (0, 0), entry.output_length, priority=entry.priority, arrival=entry.arrival)


_PARAMS = SamplingParams(temperature=0, ignore_eos=True)


def too_long(entries: Sequence[TraceEntry], max_model_len: int) -> Iterator[int]:
    """Numbers of the requests that such an engine refuses."""
    for number, entry in enumerate(entries):
        if entry.input_length + entry.output_length > max_model_len:
            yield number
