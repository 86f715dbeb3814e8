"""What the kit leaves to tests: platforms that cannot run here, and those that run on more than one device."""

import contextlib
import functools

import pytest

from quintet.config import EngineConfig
from quintet.conformance import kit
from quintet.conformance.check import NotSupported
from quintet.conformance.harness.subject import Subject
from quintet.interface.platform import Unavailable
from quintet.platforms import discover
from tests.helpers.platforms.tpu import needs_jax, programs

# what a mesh does otherwise than one device; tests/e2e/engine/test_tpu.py runs models on it
MESH = ("device.arrays", "device.wait", "memory.facts", "memory.cache", "memory.limit", "memory.plan") + (
    "graphs.buckets", "graphs.padding"
)  # fmt: skip


@pytest.mark.parametrize("name", [found.name for found in discover()])
def test_one_that_cannot_run_says_why_and_what_to_do(name: str) -> None:
    result = next(found.result for found in discover() if found.name == name)
    if isinstance(result, Unavailable):
        assert len(result.reason) > 10 and result.remedy
    else:
        assert result.devices >= 1 and result.dtypes


@functools.cache
def mesh() -> Subject:
    return Subject("tpu", 8, EngineConfig(compilation_cache_dir=programs().name))


@pytest.mark.slow
@needs_jax
@pytest.mark.parametrize("clause", MESH)
def test_a_mesh_of_eight_devices_conforms(clause: str) -> None:
    passed = 0
    for check in kit.checks([clause.partition(".")[0]]):
        for trial in check.trials(mesh()) if check.clause == clause else ():
            with contextlib.suppress(NotSupported):
                trial.call()
                passed += 1
    assert passed
