"""Imports point down only: the contracts of pyproject.toml hold here, and each refuses a bad sample."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 has no tomllib")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONFIG = PROJECT["tool"]["importlinter"]
CONTRACTS = {c["name"]: c for c in CONFIG["contracts"]}

# contract -> module -> a line that it may not hold. `sample` stands for quintet.
BAD = {
    "imports point down only": {
        "sample.types": "import sample.ops.norm",
        "sample.ops.norm": "from sample.layers import linear",
        "sample.models.llama": "import sample.engine",
        "sample.layers.linear": "import typing\nif typing.TYPE_CHECKING:\n    import sample.models.llama",
        "sample.engine.engine": "def late():\n    from sample.server import cli",
        "sample.engine.pages": "import sample.conformance",
        "sample.platforms.interface": "import sample.ops",
        "sample.config.deeper": "import sample.platforms.interface",
        "sample.settings.model": "import sample.engine",
    },
    "platforms never look up": {
        "sample.platforms.cpu.platform": "import sample.layers.linear",
        "sample.platforms": "import sample.engine",
    },
    "platforms never look sideways": {
        "sample.platforms.cpu.ops": "import sample.platforms.null",
        "sample.platforms.gpu": "import sample.platforms.cuda",
        "sample.platforms.cuda": "import sample.platforms.rocm",
        "sample.platforms.fpga": "",  # nobody listed it
        "sample.platforms.host": "import sample.platforms.cpu",
    },
    "platforms.gpu is for cuda, rocm and xpu": {
        "sample.platforms.null": "import sample.platforms.gpu",
        "sample.platforms.tpu": "import sample.platforms.gpu",
    },
    "nobody names a platform": {
        "sample.engine.loader": "import sample.platforms.cpu",
        "sample.ops.attention": "from sample.platforms.gpu import streams",
        "sample.server.cli": "import sample.platforms.null",
    },
    "parsers know text alone": {
        "sample.parsers.splitter": "import sample.engine.engine",
        "sample.parsers": "def late():\n    import torch",
    },
    "device libraries stay inside platforms": {
        "sample.layers.moe": "import triton",
        "sample.engine.sampler": "def f():\n    from flashinfer import sampling",
        "sample.types": "import jax",
    },
}

GOOD = {
    "sample": "import typing\nif typing.TYPE_CHECKING:\n    import sample.engine.engine",
    "sample.server.cli": "import sample.engine.engine, sample.platforms, sample.conformance",
    "sample.conformance": "import sample.engine.engine, sample.platforms",
    "sample.engine.engine": "import sample.models.llama, sample.platforms",
    "sample.models.llama": "import sample.layers.linear",
    "sample.layers.linear": "import sample.ops.norm",
    "sample.ops.norm": "import sample.types, torch",
    "sample.parsers.splitter": "import json, msgspec, sample.parsers.events",
    "sample.parsers.events": "",
    "sample.platforms.interface": "import sample.types, sample.config, sample.platforms.pipe",
    "sample.platforms.network": "import sample.platforms.host, sample.platforms.interface",
    "sample.platforms.numa": "",
    "sample.platforms.pipe": "import sample.types",
    "sample.platforms.host": "import sample.types",
    "sample.platforms.cpu.platform": "from sample import _cpu\nimport sample.platforms.interface, sample.ops.norm",
    "sample.platforms.gpu": "import sample.platforms.interface, triton",
    "sample.platforms.cuda": "import sample.platforms.gpu",
    "sample.platforms.null": "import sample.platforms.interface",
    "sample.platforms.rocm": "import sample.platforms.gpu",
    "sample.platforms.tpu": "import sample.platforms.interface, sample.platforms.host",
    "sample.config": "import sample.settings.engine",
    "sample.settings.engine": "import sample.types",
    "sample.types": "",
}


def write(root: Path, modules: dict[str, str]) -> None:
    """Each module as a package of its own, so that any of them can have parts; parents are made as needed."""
    for name, text in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            folder = root.joinpath(*parts[:depth])
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (root.joinpath(*parts) / "__init__.py").write_text(text, encoding="utf-8")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def sample(folder: Path, bad: dict[str, str]) -> subprocess.CompletedProcess[str]:
    config = (ROOT / "pyproject.toml").read_text(encoding="utf-8").replace("quintet", "sample")
    (folder / "pyproject.toml").write_text(config, encoding="utf-8")
    write(folder, GOOD | bad)
    return lint(folder)


def test_imports_point_down_only() -> None:
    run = lint(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


def test_contracts_keep_a_good_sample(tmp_path: Path) -> None:
    run = sample(tmp_path, {})
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_contract_has_a_bad_sample() -> None:
    assert set(CONTRACTS) == set(BAD)


@pytest.mark.parametrize("contract", BAD)
def test_contract_bites(contract: str, tmp_path: Path) -> None:
    run = sample(tmp_path, BAD[contract])
    assert f"{contract} BROKEN" in run.stdout, run.stdout + run.stderr
    report = run.stdout.partition("Broken contracts")[2]
    assert [m for m in BAD[contract] if m.removeprefix("sample.") not in report] == []


def test_every_module_has_its_place() -> None:
    """A new top-level module or folder fails here until it stands in the first contract."""
    layers = " ".join(CONTRACTS["imports point down only"]["layers"])
    placed = {word.strip("()").split(".")[1] for word in layers.split() if "." in word}
    children = {p.parent.name for p in (ROOT / "quintet").glob("*/__init__.py")}
    children |= {p.stem for p in (ROOT / "quintet").glob("*.py") if not p.stem.startswith("__")}
    assert children - placed == set()


MODULES = {"py-cpuinfo": "cpuinfo", "pyyaml": "yaml", "pyzmq": "zmq"}  # where a module is not called as its package


def test_every_dependency_is_imported() -> None:
    """One that nothing imports is downloaded and audited for nothing."""
    code = "\n".join(each.read_text(encoding="utf-8") for each in (ROOT / "quintet").rglob("*.py"))
    names = [re.split(r"[^\w-]", each)[0] for each in PROJECT["project"]["dependencies"]]
    modules = {name: MODULES.get(name, name.replace("-", "_")) for name in names}
    idle = [name for name, module in modules.items() if not re.search(rf"^\s*(import|from) {module}\b", code, re.M)]
    assert idle == []
