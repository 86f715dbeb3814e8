"""GPU kernels compile ahead for AMD's architectures: nothing spills to memory, and LDS holds what they share."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.platforms.gpu.kernels.chips import CHIP_LIMITS
from tests.platforms.rocm.aot_hip import HEAVY, LDS, TARGETS, Result, complaint, jobs, usage

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("aot_hip.py")
FINE: Result = {
    "kernel": "a: b", "target": "gfx942", "registers": 512, "spills": 0, "scalar": 9, "stack": 0, "shared": LDS,
}  # fmt: skip
SAID = """
    .group_segment_fixed_size: 0
    .private_segment_fixed_size: 88
    .sgpr_spill_count: 3
    .vgpr_count:     256
    .vgpr_spill_count: 24
"""


def test_what_does_not_fit_is_complained_about() -> None:
    assert complaint(FINE) is None
    assert "spills 3 registers, 0 bytes a lane; 0 allowed" in str(complaint(FINE | {"spills": 3}))
    assert "spills 0 registers, 8 bytes a lane" in str(complaint(FINE | {"stack": 8}))
    assert "65537 bytes of LDS of 65536" in str(complaint(FINE | {"shared": LDS + 1}))
    assert complaint(FINE | {"target": "gfx950", "shared": 160 * 1024}) is None
    assert "does not compile: no" in str(complaint({"kernel": "a: b", "target": "gfx942", "error": "no"}))


def test_wide_heads_may_spill_in_waves_of_32_alone() -> None:
    wide, spilt = {"kernel": "attention: attend_tiles bf16 8/4x256 cache bf16"}, {"spills": 64, "stack": 300}
    assert complaint(FINE | wide | spilt | {"target": "gfx1100"}) is None
    assert complaint(FINE | wide | spilt | {"target": "gfx1200"}) is not None
    byte = {"kernel": "attention: attend_tiles bf16 32/8x128 cache e4m3 bytes", "target": "gfx1100"}
    assert complaint(FINE | byte) is None and complaint(FINE | byte | {"spills": 1}) is not None
    assert complaint(FINE | wide | spilt) is not None
    assert complaint(FINE | spilt | {"target": "gfx1100"}) is not None
    assert complaint(FINE | wide | {"spills": 65, "stack": 300, "target": "gfx1100"}) is not None


def test_the_assemblers_metadata_is_read() -> None:
    assert usage(SAID) == {"registers": 256, "spills": 24, "scalar": 3, "stack": 88}
    with pytest.raises(ValueError, match="says nothing of stack"):
        usage(SAID.replace("private_", "other_"))


def test_every_architecture_has_a_cut_and_its_jobs_bear_it() -> None:
    assert {lanes for _, lanes in CHIP_LIMITS} == set(TARGETS.values())
    every = jobs(list(TARGETS), "", spread=False)
    assert {target for _, target in every} == set(TARGETS) and len(every) > 5 * 100
    some = jobs(list(TARGETS), "", spread=True)
    assert len(some) == len(HEAVY) * len(TARGETS)


def compiled(*words: str) -> list[Result]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[3])
    command = [sys.executable, str(SCRIPT), "--jobs", "1", *words]  # other tests run beside
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1780)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def assert_compiled(results: list[Result]) -> None:
    complaints = [text for text in map(complaint, results) if text]
    assert results and not complaints, "\n".join(complaints)


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_one_of_each_heavy_kernel_compiles_for_two_architectures() -> None:
    """One with waves of 64 lanes, one of 32; build/triton keeps what was compiled."""
    assert_compiled(compiled("--targets", "gfx942,gfx1100", "--spread"))


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles(target: str) -> None:
    assert_compiled(compiled("--targets", target))
