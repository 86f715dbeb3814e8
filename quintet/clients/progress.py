"""Progress of a batch: a bar if standard error is a terminal, else a line every EVERY seconds."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from quintet.clients.batch_files import BatchCounts

EVERY = 10.0  # seconds between two lines


class BatchProgress:
    """with Progress(total) as progress: progress.show(tally), whenever that has changed."""

    def __init__(
        self, total: int | None, kept: int = 0, quiet: bool = False, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._kept, self._quiet, self._now = total, kept, quiet, now
        self._begun = self._said = now()
        self._bar: Any = None

    def __enter__(self) -> "BatchProgress":
        if sys.stderr.isatty() and not self._quiet:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, initial=self._kept, unit=" requests", dynamic_ncols=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, tally: BatchCounts) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self._figures(tally), refresh=False)
            self._bar.update()
        elif not self._quiet and self._now() - self._said >= EVERY:
            self._said = self._now()
            total = "" if self._total is None else f" of {self._total}"
            print(f"{tally.done}{total} requests, {self._figures(tally)}", file=sys.stderr, flush=True)

    def _figures(self, tally: BatchCounts) -> str:
        rate = tally.tokens / max(self._now() - self._begun, 1e-9)
        return f"{rate:.1f} tokens/s, {tally.failed} failed"
