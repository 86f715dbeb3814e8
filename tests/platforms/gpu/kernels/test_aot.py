"""Every GPU kernel compiles ahead for three architectures, spills nothing and fits into shared memory.

By default each kernel once; the slow tests take all that is usual, and every variant for every architecture.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.platforms.gpu.kernels.aot import KERNELS, SHARED, complaint

SCRIPT = Path(__file__).with_name("aot.py")
FINE = {"kernel": "a: b", "target": 80, "registers": 255, "spills": 2, "max_spills": 2, "shared": SHARED[80]}


def test_what_does_not_fit_is_complained_about() -> None:
    assert complaint(FINE) is None
    assert complaint(FINE | {"target": 90, "shared": SHARED[90]}) is None
    assert "spills 3 registers, 2 allowed" in str(complaint(FINE | {"spills": 3}))
    assert "shared memory" in str(complaint(FINE | {"shared": SHARED[80] + 1}))
    assert "copies 16 bytes at a time of rows aligned to 4" in str(complaint(FINE | {"copied": 16, "aligned": 4}))
    assert "does not compile: no" in str(complaint({"kernel": "a: b", "target": 80, "error": "no"}))


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def complaints(*options: str) -> list[str]:
    """Of what is compiled with these options, in a process of its own; build/triton keeps it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[4]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, SCRIPT, "--jobs", "1", *options]  # other tests run beside
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert results, f"no module of {KERNELS} has variants()"
    return [text for text in map(complaint, results) if text]


@needs_triton
@pytest.mark.timeout(600)
def test_each_kernel_compiles_spills_nothing_and_fits() -> None:
    assert not complaints("--spread")


@needs_triton
@pytest.mark.sweep  # each kernel once is in every run, above
@pytest.mark.timeout(900)
def test_every_usual_variant_compiles_spills_nothing_and_fits() -> None:
    assert not complaints()


@needs_triton
@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_every_variant_for_every_architecture_compiles_spills_nothing_and_fits() -> None:
    assert not complaints("--every")
