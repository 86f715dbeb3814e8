"""`quintet new-platform` writes a package that installs, passes the probe section and generates text at once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from quintet.cli import main as cli
from quintet.cli.commands import new_platform
from quintet.common import distribution
from quintet.conformance import kit
from quintet.interface.platform import CONTRACT_VERSION
from tests.helpers.logs import as_before

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def _log() -> Iterator[None]:
    """A command sets the log up for the whole process; the one that makes `site` runs before any test."""
    with as_before():
        yield


@pytest.mark.parametrize("name", ["", "Auto", "3x", "a-b", "_a", "class", "ünicode", "a b", "../x", "x" * 31])
def test_a_name_that_would_not_work_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new-platform", "--path", str(tmp_path), "--", name]) == 1
    assert "is no name for a platform" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("name", "why"), [("cpu", "a part of quintet"), ("rocm", "a part"), ("auto", "--device")])
def test_a_name_that_is_taken_is_refused(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new-platform", name, "--path", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{name!r} is taken" in said and why in said
    assert [*tmp_path.iterdir()] == []


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "quintet-tinyvec").mkdir()
    assert cli.main(["new-platform", "tinyvec", "--path", str(tmp_path)]) == 1
    assert "is there already" in capsys.readouterr().err
    assert [*(tmp_path / "quintet-tinyvec").iterdir()] == []


def test_every_file_is_filled_in_and_in_the_house_style(tmp_path: Path) -> None:
    files = new_platform.package("my_chip")
    for path, content in files.items():
        for word in ("name", "module", "Title", "quintet", "contract"):
            assert f"@{word}@" not in path + content, path
        assert max(map(len, content.splitlines())) <= 120 or not path.endswith(".py"), path
        new_platform._write(tmp_path, path, content)
    assert "class MyChip(Platform):" in files["quintet_my_chip/platform.py"]
    assert f"contract = {CONTRACT_VERSION} " in files["quintet_my_chip/platform.py"]
    checked = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--select=E,F,I,W,B,UP,C4"]
    style = subprocess.run([*checked, tmp_path], capture_output=True, text=True)
    assert style.returncode == 0, style.stdout


def test_it_names_the_guide_at_the_documentations_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "docs/vendors.md, in quintet's source, is the guide" in " ".join(
        new_platform.package("x")["README.md"].split()
    )
    named = Message()
    named["Project-URL"] = "Source, https://example.org/quintet"
    named["Project-URL"] = "Documentation, https://example.org/docs/"
    monkeypatch.setattr(new_platform, "metadata", lambda name: named)
    assert "https://example.org/docs/vendors.html is the guide" in " ".join(
        new_platform.package("x")["README.md"].split()
    )


@pytest.mark.parametrize(
    ("source", "command"),
    [
        (None, "pip install quintet-llm"),
        ("/my own/engine", "pip install '/my own/engine' '/my own/engine/tools'"),
    ],
)
def test_its_readme_installs_the_engine_from_where_this_one_comes(
    source: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (new_platform, distribution):
        monkeypatch.setattr(module, "checkout", lambda: source)
    lines = [line.partition("  ")[0] for line in new_platform.package("x")["README.md"].splitlines()]
    assert command in lines


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the generated package, installed by pip without a network."""
    folder = tmp_path_factory.mktemp("vendor")
    assert cli.main(["new-platform", "tinyvec", "--path", str(folder)]) == 0
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    options = ["--no-deps", "--no-build-isolation", "--target", folder / "site"]
    done = subprocess.run([*pip, *options, folder / "quintet-tinyvec"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def quintet(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, where the package is installed and nothing was ever proven."""
    path = os.pathsep.join([str(site), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(site / "cache"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-m", "quintet", *words], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_it_passes_the_probe_section_at_once(site: Path) -> None:
    done = quintet(site, "conformance", "--device", "tinyvec", "--section", "probe")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"quintet-tinyvec 0.1.0, contract {CONTRACT_VERSION}" in done.stdout
    assert " 0 failed" in done.stdout and "every clause that was tried holds" in done.stdout


@pytest.mark.slow
def test_it_generates_text_and_says_that_nothing_is_proven(site: Path) -> None:
    done = quintet(site, "generate", "--device", "tinyvec", "--max-tokens", "8", "Once upon a time")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 4
    assert (
        "unverified on tinyvec: family/llama, dtype/bfloat16; run `quintet conformance --device tinyvec`" in done.stderr
    )


def test_its_own_tests_cover_every_section(site: Path) -> None:
    content = new_platform.package("tinyvec")["tests/test_conformance.py"]
    assert "kit.section_names()" in content and kit.section_names()[0] == "probe"
