"""Search for the fewest engines that keep all goals, by doubling and halving."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.common.suggestions import unknown_name_error

METRICS = ("ttft", "tpot", "itl", "e2el")
STATISTICS = {"mean": "mean", "median": "median", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}


@dataclass(frozen=True)
class Goal:
    """A figure that may be so large at most, or `goodput`: the share of requests that must stay within its limits."""

    name: str  # such as ttft_p99, or goodput
    limit: float  # seconds, or a share

    @classmethod
    def of(cls, word: str) -> "Goal":
        """From METRIC_STATISTIC=SECONDS, or goodput=SHARE. ValueError says what is wrong with it."""
        name, _, value = word.partition("=")
        metric, _, statistic = name.partition("_")
        names = [*(f"{each}_{what}" for each in METRICS for what in STATISTICS), "goodput"]
        if name not in names:
            raise ValueError(f"{unknown_name_error('goal', name, names)}; give it as ttft_p99=0.5 (seconds)")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if not limit > 0 or (name == "goodput" and limit > 1):
            what = "a share up to 1" if name == "goodput" else "seconds over 0"
            raise ValueError(
                f"{name} must be {what}, such as {name}={'0.99' if name == 'goodput' else '0.5'}, not {word!r}"
            )
        return cls(name, limit)

    def value(self, figures: Mapping[str, Any]) -> float:
        """Returns the figure, in seconds or as a share; 0 where no request has such a time."""
        if self.name == "goodput":
            return float(figures["goodput_share"])
        metric, _, statistic = self.name.partition("_")
        return float(figures.get(f"{STATISTICS[statistic]}_{metric}_ms", 0.0)) / 1e3

    def kept(self, figures: Mapping[str, Any]) -> bool:
        found = self.value(figures)
        return found >= self.limit if self.name == "goodput" else found <= self.limit


def fewest(
    play: Callable[[int], Mapping[str, Any]], goals: Sequence[Goal], most: int
) -> tuple[int | None, dict[int, Mapping[str, Any]]]:
    """The fewest engines up to `most` that keep all goals, and the figures of all numbers that were tried. None: not
    even `most` do. One engine fewer does not, or was not tried because still fewer did not."""
    tried: dict[int, Mapping[str, Any]] = {}

    def keeps(count: int) -> bool:
        tried[count] = play(count)
        return all(goal.kept(tried[count]) for goal in goals)

    low, high = 0, 1
    while not keeps(high):
        if high == most:
            return None, tried
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high, tried
