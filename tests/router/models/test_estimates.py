"""Estimates of several models' memory: the process that makes them, and the order in which it does."""

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quintet.common.processes import Exit
from quintet.config import EngineConfig
from quintet.router.models import estimates
from quintet.router.models.estimate_process import _estimate, local_first
from quintet.router.models.estimates import MemoryEstimate, default_budget, engine_memory, estimate_models
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


def test_the_least_kv_cache_of_an_estimate_is_the_least_that_an_engine_starts_with() -> None:
    config = EngineConfig(model="bundled", max_model_len=256)
    least = _estimate(config).kv_cache_least
    assert _estimate(config.replace(kv_cache_memory_bytes=least)).error == ""
    assert "max_model_len" in _estimate(config.replace(kv_cache_memory_bytes=least - 1)).error
    assert _estimate(config.replace(max_model_len="auto")).kv_cache_least < least


def test_the_memory_of_an_engine_is_a_number_of_bytes_or_a_share_of_the_device() -> None:
    estimate = MemoryEstimate(weights=20, workspace=5, kv_cache=500, kv_cache_least=10, total=200)
    share = dataclasses.replace(spec("a"), memory=0.25, cache_is_sized=False)
    assert engine_memory(share, estimate, 200) == engine_memory(dataclasses.replace(share, memory=50), estimate, 200)
    found = engine_memory(share, estimate, 200)
    assert (found.size.loaded, found.kv_cache_bytes) == (50, 25)
    with pytest.raises(ValueError, match="memory=.* of the model 'a' is less than"):
        engine_memory(dataclasses.replace(share, memory=34), estimate, 200)
