"""Cost model of a step: its seconds, read from JSON, written there, and fitted to what was measured."""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quintet.common.suggestions import refuse_unknown

TURNS = 6  # of a fit, each by errors relative to what the one before it found
LEAN = 1e-2  # of a fit: the weight of a square, where a sample's is 1


class Work(NamedTuple):
    """Amount of work in a step."""

    tokens: int  # of all requests
    rows: int  # of logits
    context: int  # tokens that those who decode look back on, themselves included
    pairs: int  # the same of tokens of prompts: n tokens behind s others look back on n s + n (n + 1) / 2


class Sample(NamedTuple):
    """A step that was measured."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class Shape:
    """Capacity that the scheduler of one engine shares out."""

    max_model_len: int
    num_pages: int  # with the one that padding writes to
    page_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    windows: tuple[int | None, ...] = (None,)  # of the groups of layers that have pages; None: they see everything
    num_slots: int = 0  # of states, where layers keep some
    overlap: bool = False  # whether a step is planned while the one before it runs


@dataclass(frozen=True)
class Costs:
    """Seconds of a step = what its number of tokens takes (straight lines between the points of `step`, the last one's
    slope behind them) + per_row x rows of logits + per_context x tokens that decoding requests look back on + per_pair
    x the same of prompts' tokens; all of it x sharing[engines of the machine that compute - 1] x one of spread."""

    shape: Shape
    step: tuple[tuple[int, float], ...]
    per_row: float = 0.0
    per_context: float = 0.0
    per_pair: float = 0.0
    sharing: tuple[float, ...] = (1.0,)  # has an entry for each engine of a machine
    latency: float = 0.0  # seconds from a caller to the engine and back, beside the steps
    spread: tuple[float, ...] = (1.0,)  # factors by which steps of the same work differ, each as likely; 1 on average
    measured: Mapping[str, Any] = field(default_factory=dict)  # on what

    def seconds(self, work: Work, busy: int = 1) -> float:
        """`busy`: engines of the machine that compute, this one among them."""
        rest = self.per_row * work.rows + self.per_context * work.context + self.per_pair * work.pairs
        return (_line(self.step, work.tokens) + rest) * self.sharing[busy - 1]

    def write(self, file: str) -> None:
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        plain["shape"] = asdict(self.shape)
        Path(file).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def read_costs(file: str) -> Costs:
    """ValueError says what is wrong with the file."""
    try:
        found = json.loads(Path(file).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} is no JSON: {error}; `quintet bench simulate --measure MODEL` writes such files"
        ) from None
    try:
        return _costs(found)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _costs(found: Any) -> Costs:
    if not isinstance(found, dict):
        raise ValueError('must be an object with "shape" and "step"')
    refuse_unknown("key", found, [each.name for each in fields(Costs)])
    for name in ("shape", "step"):
        if name not in found:
            raise ValueError(f"{name} is missing")
    numbers = {name: _number(found[name], name) for name in _SECONDS if name in found}
    sharing = _factors(found, "sharing", "a factor for each engine of a machine, such as [1.0, 1.4]")
    spread = _factors(found, "spread", "factors by which steps differ, such as [0.9, 1.1]")
    measured = found.get("measured", {})
    if not isinstance(measured, dict):
        raise ValueError('measured must be an object that says on what, such as {"device": "cpu"}')
    shape, points = _shape(found["shape"]), _points(found["step"])
    return Costs(shape, points, **numbers, sharing=sharing, spread=spread, measured=measured)


_SECONDS = ("per_row", "per_context", "per_pair", "latency")


def _factors(found: Any, name: str, what: str) -> tuple[float, ...]:
    given = found.get(name, [1.0])
    if not isinstance(given, list) or not given:
        raise ValueError(f"{name} must be a list with {what}")
    factors = tuple(_number(each, name) for each in given)
    if min(factors) <= 0:
        raise ValueError(f"{name} must be factors over 0")
    return factors


def _shape(found: Any) -> Shape:
    if not isinstance(found, dict):
        raise ValueError("shape must be an object with max_model_len and num_pages")
    refuse_unknown("key of shape", found, [each.name for each in fields(Shape)])
    whole = {name: value for name, value in found.items() if name not in ("windows", "overlap")}
    for name in ("max_model_len", "num_pages"):
        if name not in found:
            raise ValueError(f"shape lacks {name}")
    for name, value in whole.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (0 if name == "num_slots" else 1):
            raise ValueError(f"shape.{name} must be a whole number over 0, not {value!r}")
    windows = found.get("windows", [None])
    if not isinstance(windows, list) or any(each is not None and not isinstance(each, int) for each in windows):
        raise ValueError(
            f"shape.windows must be a list of tokens, or null where layers see everything, not {windows!r}"
        )
    if not isinstance(found.get("overlap", False), bool):
        raise ValueError("shape.overlap must be true or false")
    return Shape(**{**found, "windows": tuple(windows)})


def _points(found: Any) -> tuple[tuple[int, float], ...]:
    wanted = "step must be a list of [tokens, seconds], tokens growing, such as [[1, 0.01], [512, 0.2]]"
    if not isinstance(found, list) or not found:
        raise ValueError(wanted)
    points = []
    for each in found:
        if not isinstance(each, list) or len(each) != 2 or isinstance(each[0], bool) or not isinstance(each[0], int):
            raise ValueError(f"{wanted}, not {each!r}")
        points.append((each[0], _number(each[1], "step")))
    if any(later[0] <= earlier[0] for earlier, later in zip(points, points[1:], strict=False)) or points[0][0] < 1:
        raise ValueError(wanted)
    if points[-1][1] <= 0:
        raise ValueError("step: a step of many tokens takes more than 0 seconds")
    return tuple(points)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be seconds of at least 0, not {value!r}")
    return float(value)


def _line(points: Sequence[tuple[int, float]], tokens: int) -> float:
    if len(points) == 1 or tokens <= points[0][0]:
        return points[0][1]
    at = min(bisect_right(points, (tokens, math.inf)), len(points) - 1)
    (left, low), (right, high) = points[at - 1], points[at]
    return low + (high - low) * (tokens - left) / (right - left)


def fitted(samples: Sequence[Sample], sizes: Sequence[int]) -> tuple[tuple[tuple[int, float], ...], list[float]]:
    """The points of `step` at these numbers of tokens, and per_row, per_context and per_pair, that come nearest to what
    was measured: least squares of the relative errors, with no number below 0.

    Errors are relative to what is fitted, not to what was measured: where two samples of the same work are 10 and 20
    ms, those relative to the samples are least at 12, and a step takes 15 on the average."""
    matrix = np.zeros((len(samples), len(sizes) + 3))
    for row, (work, _) in enumerate(samples):
        for column in range(len(sizes)):  # the share that each point has in the line's height
            hat = tuple((size, float(place == column)) for place, size in enumerate(sizes))
            matrix[row, column] = _line(hat, work.tokens)
        matrix[row, len(sizes) :] = work[1:]
    # what each point has more than the one before: a step of more tokens takes no less, whatever noise says
    matrix[:, : len(sizes)] = np.cumsum(matrix[:, : len(sizes)][:, ::-1], axis=1)[:, ::-1]
    seconds = np.array([each.seconds for each in samples])
    found, said = np.zeros(len(sizes) + 3), seconds
    for _ in range(TURNS):
        found = _relative(matrix, seconds, said, len(sizes))
        said = np.maximum(matrix @ found, seconds.min() / 2)
    heights = np.cumsum(found[: len(sizes)])
    points = tuple((size, float(height)) for size, height in zip(sizes, heights, strict=True))
    return points, [float(each) for each in found[len(sizes) :]]


def _relative(matrix: Any, seconds: Any, said: Any, sizes: int) -> Any:
    """Returns the numbers with the least squares of errors, relative to the fit of the turn before."""
    rows = matrix / said[:, None]
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-30)
    # what the samples do not tell apart is the number of tokens' cost, and none of what was looked back on
    weights = np.array([0.0] * sizes + [LEAN] * 3)
    return _least_squares(rows / scale, seconds / said, weights) / scale


def _least_squares(matrix: Any, wanted: Any, weights: Any) -> Any:
    """With no number below 0, and `weights` on their squares: each in turn is set to its best, until none moves."""
    found, rest = np.zeros(matrix.shape[1]), np.array(wanted)
    norms = np.maximum((matrix**2).sum(axis=0), 1e-30)
    for _ in range(20_000):
        moved = 0.0
        for column in range(matrix.shape[1]):
            pull = float(matrix[:, column] @ rest) + norms[column] * found[column]
            best = max(0.0, pull / (norms[column] + weights[column]))
            change = best - found[column]
            if change:
                rest -= matrix[:, column] * change
                found[column] = best
                moved = max(moved, abs(change))
        if moved < 1e-9:
            break
    return found
