"""Traces of an engine: begun and ended by a caller, bounded, written to the operator's folder under names of ours."""

import itertools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quintet.config.observability import ProfilerConfig
from quintet.engine.observability.chrome_trace import EVENT_BYTES, write_trace
from quintet.engine.observability.spans import Spans
from quintet.engine.step_hook import Fail, StepHook
from quintet.interface.platform import Platform, Recording

if TYPE_CHECKING:
    from quintet.engine.scheduler import Scheduler
    from quintet.engine.step_plan import StepPlan

logger = logging.getLogger(__name__)

_OFF = ProfilerConfig()


class SavedTrace(NamedTuple):
    """One that was written."""

    path: Path
    steps: int
    reason: str  # why


class Profiler(StepHook):
    """Profiler of one engine; a hook of its steps where traces are allowed. One trace at a time."""

    def __init__(self, config: ProfilerConfig = _OFF, platform: Platform | None = None) -> None:
        """OSError if the folder cannot be made or written to."""
        self.spans, self.running = Spans(), False
        self._config, self._platform = config, platform
        self._recording: Recording | None = None
        self._began = self._base = 0.0
        self._steps = self._delay = 0
        self._last: SavedTrace | None = None  # that ended by itself, and that stop() has not returned yet
        self._numbers = itertools.count(1)
        if config.profiler:
            _check(Path(config.torch_profiler_dir))

    @property
    def wrap_op(self) -> Callable[[str, str, Callable[..., Any]], Callable[..., Any]] | None:
        """Wrapper of ops when they are bound; None where no trace will ever run."""
        return self.spans.wrap_op if self._config.profiler else None

    def start(self) -> None:
        """ValueError if traces are not allowed, or if one runs."""
        if not self._config.profiler:
            raise ValueError(
                "traces are off; allow them with profiler_config={'profiler': 'torch', 'torch_profiler_dir': FOLDER}"
            )
        if self.running:
            raise ValueError("a trace runs already; stop it before another starts")
        self._last, self._steps, self._delay = None, 0, self._config.delay_iterations
        if not self._delay:
            self._begin()
        self.running = True

    def stop(self) -> SavedTrace:
        """Writes the trace; of one that a bound has ended, returns once where it is. ValueError if there is none."""
        if self.running:
            return self._end("it was stopped")
        last, self._last = self._last, None
        if last is None:
            raise ValueError("no trace runs; start one before it is stopped")
        return last

    def before_step(self, fail: Fail) -> None:
        if self.spans.events is not None:
            self.spans.begin()

    def before_launch(self, plan: "StepPlan", fail: Fail) -> None:
        if self.spans.events is not None:
            self.spans.lap("schedule", plan)

    def after_step(self, plan: "StepPlan") -> None:
        if self.spans.events is not None:
            self.spans.lap("finish", plan)

    def after_compute(self, scheduler: "Scheduler", running: bool) -> None:
        if self.running:
            self.spans.end("step", scheduler)
            self._stepped()

    def _stepped(self) -> None:
        """A step is over: the trace begins, goes on or ends. What fails ends the trace, not the engine."""
        try:
            if self.spans.events is not None:
                self._steps += 1
                if why := self._bound(len(self.spans.events)):
                    self._last = self._end(why)
                return
            self._delay -= 1
            if self._delay <= 0:
                self._begin()
        except OSError as error:
            logger.error("%s", error)
        except Exception:
            logger.exception("the trace failed")

    def close(self) -> None:
        """Drops what runs."""
        self.running, self.spans.events = False, None
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()

    def _bound(self, events: int) -> str | None:
        config, seconds = self._config, time.monotonic() - self._began
        if config.max_iterations and self._steps >= config.max_iterations:
            return f"it had max_iterations={config.max_iterations} steps"
        if seconds >= config.max_seconds:
            return f"it took max_seconds={config.max_seconds}"
        if events * EVENT_BYTES >= config.max_bytes:
            return f"it had about max_bytes={config.max_bytes}"
        return None

    def _begin(self) -> None:
        self._began, self._base = time.monotonic(), time.time_ns()
        self.spans.start(self._config.torch_profiler_record_shapes)
        try:
            if self._platform is not None:
                self._recording = self._platform.profile(self.spans.add)
        except BaseException:
            self.close()
            raise
        logger.info("a trace begins; it goes to %s", self._config.torch_profiler_dir)

    def _end(self, why: str) -> SavedTrace:
        how = "no step ran" if self._recording is None else self._recording.description
        try:
            if self._recording is not None:
                self._recording.stop()  # may add events itself
            events = self.spans.events or []
        finally:
            self._recording = None  # whatever came of it, it is not stopped again
            self.close()
        name = f"quintet-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{next(self._numbers)}.pt.trace.json"
        path = Path(self._config.torch_profiler_dir) / (name + ".gz" * self._config.torch_profiler_use_gzip)
        facts = {"steps": self._steps, "how steps ran": how, "why it ended": why}
        try:
            write_trace(path, events, facts, int(self._base), self._config.max_bytes)
        except OSError as error:  # the caller need not know where the operator keeps files
            logger.error("%s: %s", path, error)
            raise OSError(f"the trace could not be written, and is lost: {error.strerror or error}") from None
        logger.info("a trace of %d steps is in %s: %s", self._steps, path, why)
        return SavedTrace(path, self._steps, why)


def _check(folder: Path) -> None:
    """OSError that says what to do, before anything is loaded."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"profiler_config.torch_profiler_dir {str(folder)!r} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"profiler_config.torch_profiler_dir {str(folder)!r} cannot be written to; give another folder")
