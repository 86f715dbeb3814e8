"""Estimates of several models' memory: the process that makes them, and the order in which it does."""

import asyncio
import dataclasses
import json
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
    killed = False
    exit = Exit(1)

    def __init__(self, module: str, orders: Any, stdout: int) -> None:
        reader, PlanningChild.writer = os.pipe()
        PlanningChild.killed = False
        self.stdout = os.fdopen(reader, "rb")

    def kill(self) -> None:
        PlanningChild.killed = True

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


async def test_the_process_that_plans_is_killed_when_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "Child", PlanningChild)
    coming = estimate_models([spec("a"), spec("b")])
    first = asyncio.ensure_future(anext(coming))
    await asyncio.sleep(0)
    os.write(PlanningChild.writer, msgspec.json.encode((0, MemoryEstimate())) + b"\n")
    await first
    assert not PlanningChild.killed
    await coming.aclose()
    assert PlanningChild.killed
    os.close(PlanningChild.writer)


def cache_files(folder: Path, name: str, files: dict[str, str]) -> None:
    """Puts files of a model into a folder of the hub's form."""
    cached = folder / f"models--owner--{name}"
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file, text in files.items():
        (snapshot / file).write_text(text)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)


def test_models_that_have_to_be_downloaded_are_planned_last(tmp_path: Path) -> None:
    cache_files(tmp_path, "cached", {"config.json": "{}", "model.safetensors": "{}"})
    names = ["owner/far", "s3://bucket/model", "owner/cached", "bundled"]
    assert local_first([EngineConfig(model=each, download_dir=str(tmp_path)) for each in names]) == [2, 3, 0, 1]


@pytest.mark.parametrize(
    "files",
    [
        ["config.json"],
        ["config.json", "model-00001-of-00002.safetensors"],
        ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"],
        ["config.json", "pytorch_model-00002-of-00002.bin"],
        ["model-Q8_0-00002-of-00002.gguf"],
    ],
    ids=["no-weights", "a-shard", "a-shard-of-an-index", "a-pickle", "a-part-of-gguf"],
)
def test_a_model_whose_download_was_interrupted_is_planned_last(files: list[str], tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    texts = {each: json.dumps(index) if each.endswith("index.json") else "{}" for each in files}
    cache_files(tmp_path, "half", texts)
    cache_files(tmp_path, "whole", {**texts, "config.json": "{}", "model-00001-of-00002.safetensors": "{}",
                                    "model-00002-of-00002.safetensors": "{}"})  # fmt: skip
    names = ["owner/half", "owner/whole"]
    assert local_first([EngineConfig(model=each, download_dir=str(tmp_path)) for each in names]) == [1, 0]


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
