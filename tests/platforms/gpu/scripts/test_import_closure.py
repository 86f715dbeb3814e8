"""The import closure: a GPU machine has every module that runs there, or `make gpu-wheels` carries it."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.on_gpu import wheels

pytest.importorskip("triton")
metadata = importlib.metadata
ROOT = Path(__file__).parents[4]
OURS = {"quintet", "quintet_tools", "tests", "scripts", "benchmarks", "quintet_rehearsal"}
REFUSE = """
import json, sys
class Known:
    names, finders = set(json.loads({known!r})), sys.meta_path
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in cls.names and not name.startswith("_sysconfigdata"):
            return None
        return next(filter(None, (each.find_spec(name, path, target) for each in cls.finders)), None)
    @classmethod
    def find_distributions(cls, *context):
        for each in cls.finders:
            yield from getattr(each, "find_distributions", lambda *_: ())(*context)
sys.meta_path = [Known]
for name in [name for name in sys.modules if name.partition(".")[0] not in Known.names]:
    del sys.modules[name]
"""


def named(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def required(distribution: str) -> Iterator[str]:
    """The distributions that one asks for without extras."""
    try:
        found = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:  # a platform's own, or one of another Python
        return
    yield from (named(each) for each in found if "extra ==" not in each.replace("'", '"'))


def carried() -> set[str]:
    """Distributions that wheels bring or the target's image has."""
    found, todo = set(), [*wheels.roots(), *wheels.THERE]
    while todo:
        name = todo.pop()
        if name not in found and name not in wheels.IDLE:
            found.add(name)
            todo += required(name)
    return found


def known() -> set[str]:
    """Top-level modules that may be imported."""
    there = carried()
    modules = {
        module
        for module, owners in metadata.packages_distributions().items()
        if any(named(each) in there for each in owners)
    }
    return (
        modules | set(sys.stdlib_module_names) | OURS | {"__main__", "__mp_main__", "_distutils_hack", "sitecustomize"}
    )


def ran(code: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs code in a process that refuses all other modules."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    own = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    refuse = REFUSE.format(known=json.dumps(sorted(known())))
    command = [sys.executable, "-c", refuse + code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=own | environment, capture_output=True, text=True, check=False)


def script(path: str) -> str:
    return f"import runpy; sys.argv[0] = {path!r}; runpy.run_path({path!r}, run_name='__main__')"


def test_other_modules_are_refused() -> None:
    done = ran("import zmq")
    assert done.returncode and "No module named 'zmq'" in done.stderr
    assert not known() & {"zmq", "fastapi", "uvicorn", "sentence_transformers", "openai"}


@pytest.mark.slow
def test_a_model_generates_its_tokens(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    done = ran(script("scripts/on_gpu/first.py"), "step", "--results", str(results), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert json.loads(results.read_text())["kind"] == "step"


@pytest.mark.slow
def test_steps_are_measured(tmp_path: Path) -> None:
    out = str(tmp_path / "out.json")
    more = ("--shape", "tiny", "--device", "cpu", "--out", out, "--results", str(tmp_path / "results.jsonl"))
    done = ran(script("benchmarks/gpu.py"), *more)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["benchmarks.gpu_profile", "benchmarks.gpu_sweep", "scripts.on_gpu.alternatives",
                                    "scripts.on_gpu.sections", "scripts.gpu"])  # fmt: skip
def test_scripts_can_be_imported(module: str) -> None:
    done = ran(f"import {module}")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_kit_lists_its_checks() -> None:
    done = ran("from quintet.conformance import kit; print(len(kit.checks()))")
    assert done.returncode == 0 and int(done.stdout) > 20, done.stderr


@pytest.mark.slow
def test_gpu_tests_are_collected() -> None:
    plugins = ("-p", "xdist.plugin", "-p", "pytest_timeout", "-p", "pytest_asyncio.plugin")
    places = ("tests/platforms/gpu", "tests/platforms/cuda")
    code = "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = ran(code, "--collect-only", "-q", "-p", "no:cacheprovider", *plugins, *places)
    assert done.returncode == 0 and re.search(r"\d+ tests collected", done.stdout), done.stdout[-3000:] + done.stderr
