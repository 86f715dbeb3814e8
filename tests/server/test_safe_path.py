"""Nothing of the working directory runs, whatever its files are called: it may be a model that was downloaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.common.subprocess_python import python_command, with_our_path
from quintet.conformance.sections.probe import CHILD

# What the processes import first, and last: of the standard library, of ours, of others.
NAMES = ("json", "zmq", "msgspec", "torch", "safetensors", "tokenizers", "httptools", "uvicorn", "psutil")
NULL = ("--device", "null", "--load-format", "dummy")
ANSWER = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}\n'


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder whose modules say that they ran."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name + chr(10)!r})\n")
    found = tmp_path / "planted-1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (found / "entry_points.txt").write_text("[quintet.platforms]\nplanted = torch:Platform\n")
    return tmp_path


def test_the_folder_is_a_trap(planted: Path) -> None:
    subprocess.run([sys.executable, "-c", "import msgspec"], cwd=planted, check=True)
    assert (planted / "ran").read_text() == "msgspec\n"


@pytest.mark.slow
def test_a_command_and_its_server_run_nothing_of_the_working_directory(planted: Path) -> None:
    """`python -m` puts it first; the server's engine is a process of its own."""
    (planted / "in").write_text(ANSWER)
    command = [sys.executable, "-m", "quintet", "run-batch", "-i", "in", "-o", "out", *NULL]
    done = subprocess.run(command, cwd=planted, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert '"status_code": 200' in (planted / "out").read_text()
    assert not (planted / "ran").exists(), (planted / "ran").read_text()


@pytest.mark.parametrize("module", ["engine.processes.engine_process", "server.processes.api_process"])
def test_a_child_runs_nothing_of_the_working_directory(planted: Path, module: str) -> None:
    """It ends for want of orders, with all its modules imported."""
    words = python_command(f"quintet.{module}")
    done = subprocess.run(words, cwd=planted, input="", capture_output=True, text=True, timeout=240)
    assert "DecodeError" in done.stderr and not (planted / "ran").exists()


@pytest.mark.slow
def test_the_process_that_probes_runs_nothing_of_the_working_directory(planted: Path) -> None:
    words = [sys.executable, "-c", with_our_path(CHILD), '"quintet.platforms.null.platform"', '"Null"', "[]"]
    done = subprocess.run(words, cwd=planted, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert not (planted / "ran").exists()


def test_a_child_finds_what_this_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words and exit code are the module's own, as with `python -m`."""
    (tmp_path / "own.py").write_text("import sys\nprint(__name__, sys.argv[1:])\nsys.exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = subprocess.run([*python_command("own"), "a", "--b"], cwd=os.sep, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "__main__ ['a', '--b']\n")
