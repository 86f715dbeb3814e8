"""What a step costs: its seconds, what is refused in a file, and the fit."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from quintet_tools.simulate.cost_model import Costs, Sample, Shape, Work, fitted, read_costs
from quintet_tools.simulate.measurement import mean, spread_of

SHAPE = Shape(64, 100)
GOOD = {"shape": {"max_model_len": 64, "num_pages": 100}, "step": [[1, 1.0], [4, 2.5], [8, 6.5]]}


def test_seconds_are_lines_between_points_and_shares_of_the_rest() -> None:
    costs = Costs(SHAPE, ((1, 1.0), (4, 2.5), (8, 6.5)), 0.5, 0.25, 0.125, (1.0, 1.5))
    seconds = [costs.seconds(Work(tokens, 0, 0, 0)) for tokens in (1, 2, 4, 6, 8, 10)]
    assert seconds == [1.0, 1.5, 2.5, 4.5, 6.5, 8.5]
    assert costs.seconds(Work(1, 2, 4, 8)) == 1 + 2 * 0.5 + 4 * 0.25 + 8 * 0.125
    assert costs.seconds(Work(1, 2, 4, 8), busy=2) == 1.5 * costs.seconds(Work(1, 2, 4, 8))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    shape = Shape(64, 100, windows=(None, 32), num_slots=5, overlap=True)
    costs = Costs(shape, ((1, 0.5),), 0.1, 0.2, 0.3, (1.0, 1.25), 0.004, (0.75, 1.25), {"device": "cpu"})
    file = str(tmp_path / "costs.json")
    costs.write(file)
    assert read_costs(file) == costs


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stpe": 1}, "did you mean 'step'"),
        ({"step": None}, "step must be a list"),
        ({"step": [[1, 0.1], [1, 0.2]]}, "tokens growing"),
        ({"step": [[1, 0.0]]}, "more than 0 seconds"),
        ({"step": [[1, -1.0]]}, "at least 0"),
        ({"per_row": "x"}, "per_row must be seconds"),
        ({"per_row": float("nan")}, "per_row must be seconds"),
        ({"sharing": []}, "a factor for each engine"),
        ({"sharing": [0]}, "over 0"),
        ({"spread": 1}, "spread must be a list"),
        ({"spread": [1, -1]}, "spread must be"),
        ({"latency": -1}, "latency must be seconds"),
        ({"shape": {"max_model_len": 64}}, "shape lacks num_pages"),
        ({"shape": {"max_model_len": 64, "num_pages": 0}}, "shape.num_pages must be"),
        ({"shape": {"max_model_len": 64, "num_pages": 9, "pages": 1}}, "unknown key of shape"),
        ({"measured": 1}, "measured must be an object"),
    ],
)
def test_wrong_costs_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ValueError) as error:
        read_costs(str(file))
    assert str(file) in str(error.value) and says in str(error.value)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        read_costs(str(file))


def test_the_fit_finds_what_made_the_samples() -> None:
    true = Costs(SHAPE, ((1, 0.02), (8, 0.03), (64, 0.3)), 1e-3, 2e-6, 3e-7)
    draw, samples = random.Random(0), []
    for _ in range(200):
        tokens = draw.randrange(1, 65)
        work = Work(tokens, draw.randrange(tokens + 1), draw.randrange(20_000), draw.randrange(50_000))
        samples.append(Sample(work, true.seconds(work)))
    points, rest = fitted(samples, [1, 8, 64])
    found = Costs(SHAPE, points, *rest)
    assert [size for size, _ in points] == [1, 8, 64]
    assert max(abs(found.seconds(work) / seconds - 1) for work, seconds in samples) < 0.02


def test_what_takes_long_now_and_then_takes_long_on_the_average() -> None:
    work = Work(4, 4, 10, 0)
    assert mean([Sample(work, 1.0), Sample(work, 1.0), Sample(work, 4.0)]) == Sample(work, 2.0)


def test_the_spread_keeps_the_mean_and_the_long_steps() -> None:
    """Where one step of ten takes twice as long as the others, so does one of ten that are drawn."""
    kept = spread_of([10 / 11] * 900 + [20 / 11] * 100)
    assert len(kept) == 20 and sum(kept) == pytest.approx(20, abs=1e-3)
    assert kept[:18] == (0.9091,) * 18 and kept[18:] == (1.8182,) * 2
    assert spread_of([1.0, 3.0]) == (1.0,), "few say nothing"


def test_the_fit_of_noisy_samples_is_right_on_the_average() -> None:
    """Relative to what was measured, 10 and 30 would be best told by 12."""
    samples = [Sample(Work(tokens, 1, 0, 0), seconds) for tokens in (1, 8) for seconds in (0.010, 0.030)]
    points, rest = fitted(samples, [1, 8])
    found = Costs(SHAPE, points, *rest)
    assert found.seconds(Work(1, 1, 0, 0)) == pytest.approx(0.020, rel=0.02)
    assert found.seconds(Work(8, 1, 0, 0)) == pytest.approx(0.020, rel=0.02)


def test_no_cost_is_below_zero() -> None:
    """Noise alone would make some so."""
    draw = random.Random(1)
    samples = [Sample(Work(1, 1, context, 0), 0.01 - context * 1e-6) for context in range(0, 1000, 100)]
    samples += [Sample(Work(8, 1, 0, draw.randrange(100)), 0.02) for _ in range(5)]
    points, rest = fitted(samples, [1, 8])
    assert min(*rest, *(seconds for _, seconds in points)) >= 0
