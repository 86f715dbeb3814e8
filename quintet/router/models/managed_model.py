"""One model of a server of several: its place in the memory plan, its engine, and the requests that wait for it."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from quintet.common.metric_types import HistogramSeries
from quintet.router.backends import RouterBackend
from quintet.router.metrics import SECONDS, BackendCounts
from quintet.router.models.config import NEVER, ModelSpec
from quintet.router.models.engine import Engine
from quintet.router.models.estimates import EngineMemory, MemoryEstimate
from quintet.router.models.planner import ModelSlot, ModelState

_MIN_BACKOFF, _MAX_BACKOFF = 1.0, 60.0  # seconds after a load that failed, doubled each time
_STABLE_SECONDS = 10.0  # an engine that ends sooner after it was ready counts as a failure
UNLOAD_REASONS = ("idle", "memory", "admin", "exit")


@dataclass
class ModelCounts:
    """Counters of one model."""

    loads: int = 0
    load_failures: int = 0
    sleeps: int = 0
    wakes: int = 0
    unloads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(UNLOAD_REASONS, 0))
    load_seconds: HistogramSeries = field(default_factory=lambda: HistogramSeries(SECONDS))


@dataclass(eq=False)
class ManagedModel:
    """State of one model. Changed by ModelManager alone."""

    spec: ModelSpec
    slot: ModelSlot
    url: str  # of its engine, in the log and in the locations of responses
    keep_alive: float  # seconds; -1: never unloaded for being idle
    estimate: MemoryEstimate | None = None
    memory: EngineMemory | None = None
    is_planning: bool = False  # its estimate is being made
    engine: Engine | None = None
    backend: RouterBackend | None = None  # while its engine takes requests
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # of the present engine
    waiters: deque["asyncio.Future[None]"] = field(default_factory=deque)
    waiting_since: float = 0.0  # of the oldest request that waits
    failure: str = ""  # why the latest load failed
    failures: int = 0  # in a row: loads, and engines that ended soon after theirs
    retry_at: float = 0.0  # the loop's time
    unloading: "asyncio.Task[None] | None" = None  # the latest unload, or attempt to
    idle_timer: asyncio.TimerHandle | None = None
    idle_at: float | None = None  # the loop's time at which it sleeps or ends
    counts: ModelCounts = field(default_factory=ModelCounts)
    answers: BackendCounts = field(default_factory=BackendCounts)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def takes_requests(self) -> bool:
        """True if its engine may get a request now."""
        return self.slot.state is ModelState.LOADED and self.slot.held_for is None and self.backend is not None

    def record_failure(self, now: float, why: str) -> None:
        """Records a load that failed: the next one is tried after a while."""
        self.failure, self.retry_at = why, now + self._backoff
        self.failures += 1
        self.counts.load_failures += 1

    def record_success(self) -> None:
        """Records a load. `failures` remain until its engine has lasted or was unloaded."""
        self.failure, self.retry_at = "", 0.0

    def record_end(self, reason: str, now: float) -> float:
        """Records the end of its engine -> seconds until a pinned model is loaded again."""
        if reason != "exit" or now - self.slot.loaded_at >= _STABLE_SECONDS:
            self.failures = 0
            return _MIN_BACKOFF
        seconds = self._backoff
        self.failures += 1
        return seconds

    @property
    def _backoff(self) -> float:
        return min(_MAX_BACKOFF, _MIN_BACKOFF * 2 ** min(self.failures, 16))

    def stop_timer(self) -> None:
        if self.idle_timer is not None:
            self.idle_timer.cancel()
        self.idle_timer = self.idle_at = None

    def next_waiter(self) -> "asyncio.Future[None] | None":
        """Removes the oldest request that still waits."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                return waiter
        return None

    def fail_waiters(self, error: Exception) -> None:
        """Ends all requests that wait."""
        while (waiter := self.next_waiter()) is not None:
            waiter.set_exception(error)

    @property
    def never_idle(self) -> bool:
        return self.keep_alive == NEVER
