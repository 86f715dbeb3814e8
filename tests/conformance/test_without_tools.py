"""`quintet conformance` and `quintet bench simulate` without quintet-llm-tools: one line with the remedy."""

import subprocess
import sys
from pathlib import Path

import pytest

from quintet.common.subprocess_python import with_our_path
from quintet.common.tools_package import MISSING
from quintet.conformance import report

CODE = """
sys.modules["quintet_tools"] = None  # as where it is not installed
from quintet.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def quintet(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", with_our_path(CODE), *words]
    return subprocess.run(command, capture_output=True, text=True, env={"HOME": str(home)}, check=False)


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("bench", "simulate", "--help"), "quintet bench simulate: error: ", 1),
        (("conformance", "--device", "cpu", "--section", "models"), "every check of models runs a model; ", 2),
        (("conformance", "--device", "cpu", "--support", "x.json"), "--support needs every trial; ", 2),
    ],
)
def test_the_remedy_is_one_line(words: tuple[str, ...], says: str, code: int, tmp_path: Path) -> None:
    done = quintet(tmp_path, *words)
    assert done.returncode == code and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"{says}{MISSING}")


@pytest.mark.slow
def test_checks_that_run_no_model_are_tried_and_the_rest_is_named(tmp_path: Path) -> None:
    words = [f"--section={name}" for name in ("device", "memory", "oracle")]
    done = quintet(tmp_path, "conformance", "--device", "cpu", "--quick", "--json", str(tmp_path / "r.json"), *words)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == f"not tried: checks of memory, oracle that run models; {MISSING}"
    found = report.read(tmp_path / "r.json")
    assert (found.sections, found.untried) == (("device", "memory"), ("memory", "oracle"))
    assert found.failures == [] and not found.passed
    assert "memory.sleep" not in {result.clause for result in found.results}
