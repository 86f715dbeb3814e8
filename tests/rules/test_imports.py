"""Imports point down only: the contracts of pyproject.toml hold here, and each refuses a bad sample."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quintet import __version__
from quintet.common.distribution import DISTRIBUTION

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
        "sample.interface.types": "import sample.ops.norm",
        "sample.ops.norm": "from sample.layers import linear",
        "sample.models.llama": "import sample.engine",
        "sample.layers.linear": "import typing\nif typing.TYPE_CHECKING:\n    import sample.models.llama",
        "sample.engine.engine": "def late():\n    from sample.server import backend",
        "sample.engine.kv_cache.page_pool": "import sample.conformance",
        "sample.interface.platform": "import sample.ops",
        "sample.config.deeper": "import sample.interface.platform",
        "sample.config.model": "import sample.engine",
        "sample.common": "import sample.config",
        "sample.hub": "import sample.engine",
        "sample.lora": "import sample.models",
        "sample.tokenizers": "import sample.chat",
        "sample.structured_output": "import sample.engine.request",
        "sample.server.backend": "import sample.cli",
        "sample.clients": "import sample.verification",
    },
    "platforms never look up": {
        "sample.platforms.cpu.platform": "import sample.layers.linear",
        "sample.platforms": "import sample.engine",
    },
    "platforms never look sideways": {
        "sample.platforms.cpu.ops": "import sample.platforms.null",
        "sample.platforms.gpu": "import sample.platforms.cuda",
        "sample.platforms.cuda": "import sample.platforms.rocm",
        "sample.platforms.fpga": "",  # stands in no layer
        "sample.platforms.host": "import sample.platforms.cpu",
    },
    "platforms.gpu is for cuda, rocm and xpu": {
        "sample.platforms.null": "import sample.platforms.gpu",
        "sample.platforms.tpu": "import sample.platforms.gpu",
    },
    "no module outside names a platform": {
        "sample.engine.startup": "import sample.platforms.cpu",
        "sample.ops.attention": "from sample.platforms.gpu import streams",
        "sample.cli.main": "import sample.platforms.null",
    },
    "the wheel runs without the tools": {
        "sample.conformance.harness": "from sample_tools.checkpoints import tiny",
        "sample.conformance.sections.ops": "import typing\nif typing.TYPE_CHECKING:\n    import sample_tools",
        "sample.cli.commands": "def late():\n    import sample_tools.simulate",
    },
    "parsers know text alone": {
        "sample.parsers.stream_parser": "import sample.engine.engine",
        "sample.parsers": "def late():\n    import torch",
    },
    "device libraries stay inside platforms": {
        "sample.layers.moe": "import triton",
        "sample.engine.sampling": "def f():\n    from flashinfer import sampling",
        "sample.interface.types": "import jax",
    },
}

GOOD = {
    "sample": "import typing\nif typing.TYPE_CHECKING:\n    import sample.engine.engine",
    "sample.cli.main": "import sample.server.backend, sample.router, sample.conformance",
    "sample.router": "",
    "sample.server.backend": "import sample.api, sample.engine.engine",
    "sample.verification": "import sample.clients, sample.api",
    "sample.clients": "import sample.outputs",
    "sample.conformance": "import sample.engine.engine, sample.platforms",
    "sample.conformance.sections.with_models.oracle": "from sample_tools.checkpoints import tiny",
    "sample.quantize": "import sample.engine",
    "sample.api": "import sample.engine.engine",
    "sample.engine.engine": "import sample.models.llama, sample.platforms, sample.chat",
    "sample.chat": "import sample.structured_output",
    "sample.structured_output": "import sample.tokenizers",
    "sample.tokenizers": "import sample.hub",
    "sample.hub": "import sample.model_loader",
    "sample.model_loader": "import sample.layers.linear",
    "sample.models.llama": "import sample.layers.linear",
    "sample.layers.linear": "import sample.ops.norm",
    "sample.ops.norm": "import sample.interface.types, torch",
    "sample.parsers.stream_parser": "import json, msgspec, sample.parsers.events",
    "sample.parsers.events": "",
    "sample.interface.platform": "import sample.interface.types, sample.config",
    "sample.interface.types": "",
    "sample.distributed": "import sample.interface.platform",
    "sample.platforms.numa": "",
    "sample.platforms.host": "import sample.interface.types",
    "sample.platforms.cpu.platform": "from sample import _cpu\nimport sample.interface.platform, sample.ops.norm",
    "sample.platforms.gpu": "import sample.interface.platform, triton",
    "sample.platforms.cuda": "import sample.platforms.gpu",
    "sample.platforms.null": "import sample.interface.platform",
    "sample.platforms.rocm": "import sample.platforms.gpu",
    "sample.platforms.tpu": "import sample.interface.platform, sample.platforms.host",
    "sample.media": "import sample.common",
    "sample.transcription": "",
    "sample.outputs": "import sample.config",
    "sample.config": "import sample.common",
    "sample.config.engine": "import sample.parsers",
    "sample.common": "",
    "sample.lora": "import sample.common",
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


def test_the_tools_need_the_quintet_that_they_are_of() -> None:
    project = tomllib.loads((ROOT / "tools" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["version"], project["dependencies"]) == (__version__, [f"{DISTRIBUTION}=={__version__}"])


MODULES = {"py-cpuinfo": "cpuinfo", "pyyaml": "yaml", "pyzmq": "zmq"}  # where a module is not called as its package


def test_every_dependency_is_imported() -> None:
    """One that nothing imports is downloaded and audited for nothing."""
    code = "\n".join(each.read_text(encoding="utf-8") for each in (ROOT / "quintet").rglob("*.py"))
    names = [re.split(r"[^\w-]", each)[0] for each in PROJECT["project"]["dependencies"]]
    modules = {name: MODULES.get(name, name.replace("-", "_")) for name in names}
    idle = [name for name, module in modules.items() if not re.search(rf"^\s*(import|from) {module}\b", code, re.M)]
    assert idle == []
