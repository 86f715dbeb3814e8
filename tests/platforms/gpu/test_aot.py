"""Every GPU kernel compiles ahead for three architectures, spills nothing and fits into shared memory."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.platforms.gpu.aot import KERNELS, SHARED, complaint

SCRIPT = Path(__file__).with_name("aot.py")
FINE = {"kernel": "a: b", "target": 80, "registers": 255, "spills": 2, "max_spills": 2, "shared": SHARED[80]}


def test_what_does_not_fit_is_complained_about() -> None:
    assert complaint(FINE) is None
    assert complaint(FINE | {"target": 90, "shared": SHARED[90]}) is None
    assert "spills 3 registers, 2 allowed" in str(complaint(FINE | {"spills": 3}))
    assert "shared memory" in str(complaint(FINE | {"shared": SHARED[80] + 1}))
    assert "does not compile: no" in str(complaint({"kernel": "a: b", "target": 80, "error": "no"}))


@pytest.mark.slow  # the first time; build/triton keeps what was compiled
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_every_variant_compiles_spills_nothing_and_fits() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[3])
    command = [sys.executable, SCRIPT, "--jobs", "1"]  # other tests run beside
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880)
    assert run.returncode == 0, run.stderr[-3000:]
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert results, f"no module of {KERNELS} has variants()"
    complaints = [text for text in map(complaint, results) if text]
    assert not complaints, "\n".join(complaints)
