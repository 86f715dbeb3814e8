"""A hardware vendor's package in an environment of its own: found, run and proven; each fault in it is found.

The environment sees this one's packages, and builds with setuptools, which torch requires: nothing is downloaded.
"""

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "examples" / "vendor-platform"
PROMPT = "Once upon a time"
LEAST_FAULTS = 70

pytestmark = pytest.mark.timeout(900)  # some commands take more than a minute where nothing else runs


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the package, and a home of its own."""

    home: Path

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """python WORDS, away from the repository."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "QUINTET_DEVICE")}
        kept |= {"XDG_CACHE_HOME": str(self.home / "cache"), "HF_HUB_OFFLINE": "1", **variables}
        python = self.home / "bin" / "python"
        return subprocess.run([python, *words], capture_output=True, text=True, timeout=840, env=kept, cwd=self.home)

    def said(self, *words: str, **variables: str) -> str:
        """Standard output of a command that goes well."""
        done = self.run(*words, **variables)
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="session")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    home = tmp_path_factory.mktemp("vendor")
    venv.create(home, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # addsitedir, since a path alone would leave out what .pth files there add: an editable quintet
    lines = [f"import site; site.addsitedir({each!r})" for each in sorted(ours)]
    (own / "ours.pth").write_text("\n".join([*lines, str(ROOT / "tools"), ""]))
    source = home / "source"  # setuptools builds in the folder
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    made = Environment(home)
    made.said(
        *("-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
        *("--no-index", "--no-deps", "--no-build-isolation", str(source)),
    )
    shutil.rmtree(source / "acme")  # what is tested is what was installed
    return made


def _generated(vendor: Environment, *words: str) -> str:
    return vendor.said(
        *("-m", "quintet", "generate", PROMPT, "--dtype", "float32", "--temperature", "0", "--max-tokens", "40"),
        *("--quiet", *words),
    )


@pytest.mark.slow
def test_it_is_found_once_it_is_installed(vendor: Environment) -> None:
    where = vendor.said("-c", "import acme; print(acme.__file__)")
    assert Path(where.strip()).is_relative_to(vendor.home / "lib")
    listed = vendor.said("-m", "quintet", "platforms")
    (line,) = [each for each in listed.splitlines() if each.startswith("acme")]
    assert line.split()[1] == "available" and "4 emulated devices of 1024 MiB" in line
    assert "auto → acme" not in listed, "an emulation is asked for by name"


@pytest.fixture(scope="session")
def wanted(vendor: Environment) -> str:
    return _generated(vendor, "--device", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8"]], ids=str)
def test_it_generates_what_the_cpu_generates(more: list[str], wanted: str, vendor: Environment) -> None:
    """Greedily, in float32; fp8 in the cache changes the text, but not its beginning."""
    same = 20 if "fp8" in more else len(wanted)
    assert len(wanted) > 60 and _generated(vendor, "--device", "acme", *more)[:same] == wanted[:same]


def test_its_chip_can_be_described(vendor: Environment, tmp_path: Path) -> None:
    chip = tmp_path / "chip.json"
    chip.write_text(json.dumps({"devices": 1, "memory": 2**22}))
    done = vendor.run("-m", "quintet", "generate", PROMPT, "--device", "acme", ACME_CHIP=str(chip))
    assert done.returncode != 0 and "Traceback" not in done.stderr, "the model does not fit, and that is said in words"
    assert "KV cache needs" in done.stderr or "free on acme:0" in done.stderr, done.stderr[-500:]


@pytest.mark.slow
def test_its_own_tests_pass(vendor: Environment) -> None:
    said = vendor.said("-m", "pytest", "-q", "-p", "no:cacheprovider", str(vendor.home / "source" / "tests"))
    assert " passed" in said


@pytest.mark.parametrize(
    ("more", "trials"),
    [
        pytest.param(["--quick"], 100, id="some trials", marks=pytest.mark.slow),
        pytest.param([], 800, id="all", marks=[pytest.mark.sweep, pytest.mark.timeout(3000)]),
    ],
)
def test_it_keeps_the_contract(more: list[str], trials: int, vendor: Environment, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    vendor.said("-m", "quintet", "conformance", "--device", "acme", "--json", str(path), *more)
    report = json.loads(path.read_text())
    assert report["platform"] == "acme" and len(report["results"]) > trials


@pytest.mark.sweep  # tests/contract has the kit find faults in every run
def test_the_kit_finds_every_fault_and_names_its_clause(vendor: Environment) -> None:
    table = vendor.said("-m", "acme.conformance")
    caught = [line.split()[0] for line in table.splitlines() if not line.startswith(" ")]
    assert len(set(caught)) >= LEAST_FAULTS and " missed " not in table
