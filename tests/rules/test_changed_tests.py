"""`make test-changed`: the import graph finds the tests that reach a change, and git the files that changed."""

import subprocess
from pathlib import Path

import pytest

from scripts import changed_tests, import_graph

FILES = {
    "quintet/__init__.py": "from typing import TYPE_CHECKING\nHOME = {'LLM': 'quintet.api'}\n"
    "if TYPE_CHECKING:\n    from quintet.typed import Typed\n",
    "quintet/api.py": "def late():\n    from quintet.engine import Engine\n",
    "quintet/engine.py": "from . import pages",
    "quintet/pages.py": "",
    "quintet/typed.py": "",
    "quintet/families/__init__.py": "import importlib\ndef load(kind):\n"
    "    importlib.import_module(f'{__name__}.{kind}')",
    "quintet/families/llama.py": "",
    "quintet/families/gemma.py": "",
    "quintet/commands/__init__.py": "HOME = 'quintet.commands.'\nTABLE = {'serve': HOME + 'serve'}",
    "quintet/commands/serve.py": "",
    "quintet/commands/chat.py": "",
    "quintet/worker.py": "",
    "quintet/page/index.html": "",
    "tests/test_api.py": "from quintet import LLM",
    "tests/test_pages.py": "import quintet.pages",
    "tests/test_unrelated.py": "import quintet",
    "tests/test_family.py": "from quintet import families\nfamilies.load('llama')",
    "tests/test_command.py": "from quintet import commands",
    "tests/test_process.py": "CODE = 'from quintet.worker import run; run()'",
    "tests/test_page.py": "PAGE = 'quintet/page/index.html'",
    "tests/deep/conftest.py": "from tests.helper import made",
    "tests/deep/test_deep.py": "",
    "tests/helper.py": "",
    "tests/rules/test_rules.py": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("quintet/pages.py", ["tests/test_pages.py", "tests/test_api.py"]),  # nearest first; inside a function too
        ("quintet/api.py", ["tests/test_api.py"]),  # by the name that the package loads lazily
        ("quintet/typed.py", []),
        ("quintet/families/llama.py", ["tests/test_family.py"]),
        ("quintet/families/gemma.py", []),
        ("quintet/commands/serve.py", ["tests/test_command.py"]),
        ("quintet/commands/chat.py", []),
        ("quintet/worker.py", ["tests/test_process.py"]),
        ("quintet/page/index.html", ["tests/test_page.py"]),
        ("tests/helper.py", ["tests/deep/test_deep.py"]),
        ("tests/test_unrelated.py", ["tests/test_unrelated.py"]),
        ("quintet/removed.py", []),
    ],
)
def test_a_change_reaches_the_tests_that_load_it(tree: Path, changed: str, reached: list[str]) -> None:
    tests, count = changed_tests.selected([changed], tree)
    assert tests == [*reached, "tests/rules/test_rules.py"]
    assert count == 9


def test_what_everything_loads_reaches_every_test_that_loads_the_package(tree: Path) -> None:
    tests, _ = changed_tests.selected(["quintet/__init__.py"], tree)
    assert {"tests/test_api.py", "tests/test_unrelated.py", "tests/test_family.py"} <= set(tests)
    assert "tests/deep/test_deep.py" not in tests


def test_a_module_that_was_removed_reaches_those_that_still_import_it(tree: Path) -> None:
    (tree / "quintet/pages.py").unlink()
    tests, _ = changed_tests.selected(["quintet/pages.py"], tree)
    assert tests[:2] == ["tests/test_pages.py", "tests/test_api.py"]


@pytest.mark.slow
@pytest.mark.slow
def test_the_mirror_folder_comes_first_in_this_repository() -> None:
    graph = import_graph.build(changed_tests.ROOT)
    path = "quintet/engine/scheduler.py"
    assert graph.nearest([import_graph.dotted(path)], [path])[0] == "tests/engine/test_scheduler.py"
    commands = graph.distances(["quintet.cli.commands.serve"])
    assert commands["quintet.cli.main"] <= 2 and "tests.parsers.test_values" not in commands


def test_kernels_reach_the_tests_of_the_cpu_platform() -> None:
    assert list(changed_tests.areas("csrc/cpu/moe/moe.cpp"))[0] == "tests/platforms/cpu"
    assert list(changed_tests.areas("docs/server.md")) == ["tests/rules"]


def git(root: Path, *words: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *names, *words], cwd=root, check=True, capture_output=True)


def commit(root: Path, name: str) -> None:
    (root / name).write_text(name, encoding="utf-8")
    git(root, "add", name)
    git(root, "commit", "-m", name)


def test_changed_are_the_branch_the_working_tree_and_untracked_files(tmp_path: Path) -> None:
    git(tmp_path, "init", "-b", "main")
    commit(tmp_path, "first")
    commit(tmp_path, "second")
    assert changed_tests.changed_files(root=tmp_path) == ["second"]  # nothing is uncommitted: the commit before
    git(tmp_path, "checkout", "-b", "branch")
    commit(tmp_path, "third")
    assert changed_tests.changed_files(root=tmp_path) == ["third"]
    (tmp_path / "first").write_text("changed", encoding="utf-8")
    (tmp_path / "new").write_text("", encoding="utf-8")
    assert changed_tests.changed_files(root=tmp_path) == ["first", "new", "third"]
    assert changed_tests.changed_files("HEAD~1", root=tmp_path) == ["first", "new", "third"]
    assert changed_tests.changed_files("HEAD", root=tmp_path) == ["first", "new"]
    with pytest.raises(ValueError, match="BASE=nothing is no commit here"):
        changed_tests.changed_files("nothing", root=tmp_path)
