"""Estimates of several models' memory: the process that makes them, and the order in which it does."""

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quintet.common.processes import Exit
from quintet.config import EngineConfig
from quintet.router.models import estimates
from quintet.router.models.estimate_process import local_first
from quintet.router.models.estimates import MemoryEstimate, default_budget, estimate_models
from tests.router.models.worlds import spec


class PlanningChild:
    """A process that plans: the test writes its lines."""

    writer: int
    exit = Exit(1)

    def __init__(self, module: str, orders: Any, stdout: int) -> None:
        reader, PlanningChild.writer = os.pipe()
        self.stdout = os.fdopen(reader, "rb")

    def close(self) -> None:
        self.stdout.close()


async def test_an_estimate_comes_before_the_next_model_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "Child", PlanningChild)
    coming = estimate_models([spec("a"), spec("b"), spec("c")])
    first = asyncio.ensure_future(anext(coming))
    await asyncio.sleep(0)
    os.write(PlanningChild.writer, msgspec.json.encode((1, MemoryEstimate(weights=7))) + b"\n")
    assert await first == (1, MemoryEstimate(weights=7))
    os.close(PlanningChild.writer)
    missing = [(index, estimate.error) async for index, estimate in coming]
    why = "the process that plans its memory has ended: it exited with code 1"
    assert missing == [(0, why), (2, why)]


def test_models_that_have_to_be_downloaded_are_planned_last(tmp_path: Path) -> None:
    cached = tmp_path / "models--owner--cached"
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    names = ["owner/far", "s3://bucket/model", "owner/cached", "bundled"]
    assert local_first([EngineConfig(model=each, download_dir=str(tmp_path)) for each in names]) == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("wanted", "budget"), [(None, 50), (0.25, 25), ("0.25", 25), (70, 70)],
)  # fmt: skip
def test_the_budget_is_what_is_free_a_share_or_a_number(wanted: Any, budget: int) -> None:
    assert default_budget(MemoryEstimate(free=50, total=100), 0.9, wanted) == budget
    assert default_budget(MemoryEstimate(free=95, total=100), 0.9, None) == 90
