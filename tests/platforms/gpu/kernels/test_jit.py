"""What a device would ask Triton's JIT for passes its front end: no kernel is refused for the arguments of a launch.

An argument of 1 is a constant to a kernel, a plain int, whatever its declared type. aot.py, beside this, compiles
declared types alone, and Triton's interpreter specializes nothing.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("jit.py")
ROOT = SCRIPT.parents[4]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
KERNELS = """
import triton
import triton.language as tl

from quintet.platforms.gpu.kernels.variant import Variant


@triton.jit
def specialized(out, count):
    tl.store(out, count.to(tl.int64))


@triton.jit(do_not_specialize=["count"])
def plain(out, count):
    tl.store(out, count.to(tl.int64))


def variants():
    return [Variant(each.__name__, each, {"out": "*i64", "count": "i32"}) for each in (specialized, plain)]
"""


def results(*options: str, folder: Path = ROOT) -> list[dict[str, Any]]:
    """Of the cases that the script runs with these options, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "tools"), str(folder), environment.get("PYTHONPATH", "")]
    )
    run = subprocess.run([sys.executable, SCRIPT, *options], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def refused(found: list[dict[str, Any]]) -> list[str]:
    """Cases that failed; and those that launched nothing, which show nothing."""
    failed = [f"{each['case']}: {each['error']}" for each in found if each["error"] is not None]
    return failed + [f"{each['case']} launches no kernel" for each in found if not each["specializations"]]


@pytest.mark.slow
def test_a_kernel_that_asks_an_argument_of_1_for_its_type_is_refused(tmp_path: Path) -> None:
    """selective_scan did so, with one channel. What is not specialized stays a number."""
    (tmp_path / "ask_its_type.py").write_text(KERNELS)
    specialized, plain = results("--kinds", "kernels", "--module", "ask_its_type", folder=tmp_path)
    assert "ask_its_type.specialized: CompilationError" in specialized["error"]
    assert "'int' object has no attribute 'to'" in specialized["error"]
    assert (specialized["specializations"], plain["specializations"], plain["error"]) == (3, 1, None)


@pytest.mark.slow
def test_no_probe_and_no_kernel_is_refused() -> None:
    found = results("--kinds", "probes,kernels")
    assert {each["case"].partition(" ")[0] for each in found} == {"probe", "kernel"}
    assert not refused(found)


@pytest.mark.slow
def test_no_model_is_refused() -> None:
    found = results("--kinds", "models")
    assert found and not refused(found)


@pytest.mark.sweep
@pytest.mark.timeout(600)  # a minute or two each
@pytest.mark.parametrize("share", [f"{number}/12" for number in range(1, 13)])
@pytest.mark.parametrize("kinds", ["kernels", "models", "ops"])
def test_no_variant_of_a_kernel_no_type_of_a_model_and_no_op_of_the_kit_is_refused(kinds: str, share: str) -> None:
    found = results("--kinds", kinds, "--every", "--share", share)
    assert found and not refused(found)
