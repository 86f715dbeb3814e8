"""The name of the distribution, and the command that installs an extra of it."""

import importlib.metadata
import json
import re
import subprocess
from pathlib import Path

import pytest
import tomllib

from quintet.common import distribution

ROOT = Path(__file__).parents[2]
WRONG = re.compile(r"""pip3? install[^\n#]*?[ '"]quintet(?=[\['" \n]|$)|\bquintet\[[a-z]+\]|"quintet *[><=~]=""")


class Installed:
    """Stands for a distribution that pip installed."""

    def __init__(self, direct_url: str | None) -> None:
        self._direct_url = direct_url

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._direct_url


EDITABLE = json.dumps({"url": "file:///home/me/quintet", "dir_info": {"editable": True}})


@pytest.mark.parametrize(
    ("direct_url", "shown"),
    [
        (None, "pip install 'quintet-llm[structured]'"), (EDITABLE, "pip install '/home/me/quintet[structured]'"),
        (json.dumps({"url": "file:///tmp/quintet", "dir_info": {}}), "pip install 'quintet-llm[structured]'"),
        (json.dumps({"url": "https://host/q.whl", "archive_info": {}}), "pip install 'quintet-llm[structured]'"),
    ],
)  # fmt: skip
def test_the_command_suits_how_quintet_was_installed(
    direct_url: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(direct_url))
    assert distribution.install_hint("structured") == shown


def test_run_from_sources_it_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Installed:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", none)
    assert distribution.install_hint("ray") == "pip install '.[ray]'"


def test_the_project_has_that_name_and_every_extra_that_a_hint_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == distribution.DISTRIBUTION
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "quintet").rglob("*.py"))
    named = re.findall(r"""install_hint\(["']([a-z]+)["']\)""", code)
    assert len(named) >= 9 and set(named) <= set(project["optional-dependencies"])


def test_no_text_installs_the_other_project_of_that_name() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a checkout of git")
    texts = (".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".sh", ".js", ".html")
    found = []
    for name in tracked.stdout.split("\0"):
        if name.endswith(texts) and (ROOT / name).is_file() and name != str(Path(__file__).relative_to(ROOT)):
            text = (ROOT / name).read_text(encoding="utf-8")
            found += [f"{name}: {each.group()}" for each in WRONG.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("pip install quintet", True), ("pip install -U 'quintet[structured]'", True), ("install quintet[cuda]", True),
        ('dependencies = ["quintet>=0.1"]', True), ("pip install quintet-llm", False),
        ("pip install 'quintet-llm[ray]' 'ray[data]'", False), ("pip install '.[structured]'", False),
    ],
)  # fmt: skip
def test_the_rule_knows_the_wrong_names(text: str, refused: bool) -> None:
    assert bool(WRONG.search(text)) is refused
