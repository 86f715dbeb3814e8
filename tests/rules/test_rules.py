"""The house rules, held against every file of the repository. A failure lists file:line, so it is a to-do list."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rules import rules

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "quintet"


def sources(*folders: str) -> Iterator[Path]:
    """Of the repository: beside checkpoints that were made here, other engines keep their caches."""
    made = ROOT / "benchmarks" / "checkpoints"
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if made not in path.parents)


def breaches(rule: Callable[[str], list[str]], files: Iterator[Path] | list[Path]) -> list[str]:
    return [f"{f.relative_to(ROOT)}:{hit}" for f in files for hit in rule(f.read_text(encoding="utf-8"))]


def is_exempt_from_size(path: Path) -> bool:
    return "kernels" in path.parts or path.stem == "tables" or path.stem.endswith("_tables")


def test_device_words_stay_inside_platforms() -> None:
    platforms = PACKAGE / "platforms"
    files = [f for f in sources("quintet", "tools/quintet_tools") if platforms not in f.parents]
    assert breaches(rules.device_words, files) == []


def test_nothing_outgrew_itself() -> None:
    files = [f for f in sources("quintet", "tools/quintet_tools", "benchmarks") if not is_exempt_from_size(f)]
    assert breaches(rules.outgrown, files) == []


def test_no_c_source_outgrew_itself() -> None:
    files = [f for f in (ROOT / "csrc").rglob("*") if f.is_file() and not is_exempt_from_size(f)]
    assert [f for f in files if len(f.read_text(encoding="utf-8").splitlines()) > rules.MAX_FILE] == []


def test_every_public_module_says_what_it_owns() -> None:
    files = [
        f
        for f in sources("quintet", "tools/quintet_tools", "benchmarks")
        if f.stem == "__init__" or not f.stem.startswith("_")
    ]
    assert breaches(rules.undocumented, files) == []


def test_no_exception_vanishes() -> None:
    assert breaches(rules.swallowed, sources("quintet", "tools/quintet_tools", "benchmarks", "tests")) == []


def test_platforms_read_no_environment_and_unpickle_nothing() -> None:
    assert breaches(rules.environment_or_pickle, sources("quintet/platforms")) == []


def test_no_module_imports_what_the_package_offers() -> None:
    above = {PACKAGE / name for name in ("cli", "router", "server")}  # what they import lies below
    assert breaches(rules.from_root, [f for f in sources("quintet") if not above & set(f.parents)]) == []


def test_tests_build_real_objects() -> None:
    assert breaches(rules.mocked, sources("tests")) == []


def test_structure_page_names_files_that_exist() -> None:
    page = ROOT / "docs" / "structure.md"
    assert page.is_file(), "docs/structure.md is missing: it leads a newcomer through the files"
    named = rules.named_paths(page.read_text(encoding="utf-8"))
    assert len(named) >= 5, f"docs/structure.md names {named} only"
    assert [n for n in named if not (ROOT / n).exists() and not (PACKAGE / n).exists()] == []


def test_importing_the_package_loads_no_heavy_library() -> None:
    heavy = ["torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface_hub"]
    code = f"import sys, quintet; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert breaches(rules.clause_openings, sources("quintet", "tools/quintet_tools", "benchmarks")) == []


def test_no_house_words() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert breaches(rules.house_words, sources("quintet", "tools/quintet_tools")) == []
    assert breaches(rules.house_words_of_page, pages) == []


def test_folders_stay_small() -> None:
    assert rules.crowded(sources("quintet", "tools/quintet_tools", "tests", "scripts")) == []


def test_packages_say_what_they_hold() -> None:
    folders = {path.parent for path in sources("quintet", "tools/quintet_tools")}
    silent = [f for f in folders if not ast.get_docstring(ast.parse((f / "__init__.py").read_text(encoding="utf-8")))]
    assert silent == []


def test_a_class_of_models_and_layers_has_one_meaning() -> None:
    found = [
        node.name
        for folder in ("models", "layers")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted({name for name in found if found.count(name) > 1}) == []


# ------------------------------------------------------------------------------------------ each rule bites


BITES = [
    (rules.clause_openings, 'def f():\n    """Whether it is there."""'),
    (rules.clause_openings, '"""What requests are told."""'),
    (rules.clause_openings, 'class A:\n    """Of two tables, the newer."""'),
    (rules.house_words, "x = 1  # as the file said"),
    (rules.house_words, 'raise ValueError("pages lie elsewhere")'),
    (rules.house_words, 'def f():\n    """Tells what nobody asked."""'),
    (rules.house_words_of_page, "# Page\n\nNobody holds a page."),
    (rules.device_words, 'x = tensor.to("cuda")'),
    (rules.device_words, 'x = tensor.to("cuda:1")'),
    (rules.device_words, 'if device.type == "cpu": pass'),
    (rules.device_words, "if tensor.is_cuda: pass"),
    (rules.device_words, "torch.xpu.synchronize()"),
    (rules.device_words, "def is_rocm(): return True"),
    (rules.device_words, "match d:\n    case 'tpu': pass"),
    (rules.device_words, "load('quintet.platforms.cuda')"),
    (rules.device_words, "from x import is_hip\nif is_hip(): pass"),
    (rules.outgrown, "x = 1\n" * (rules.MAX_FILE + 1)),
    (rules.outgrown, "def f():\n" + "    x = 1\n" * rules.MAX_FUNCTION),
    (rules.outgrown, "async def f():\n" + "    x = 1\n" * rules.MAX_FUNCTION),
    (rules.outgrown, "class A:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(rules.MAX_PUBLIC_METHODS + 1))),
    (rules.undocumented, "x = 1"),
    (rules.undocumented, '"""\nLate.\n"""'),
    (rules.undocumented, '"""Runs over\nthe line."""'),
    (rules.swallowed, "try:\n    f()\nexcept Exception:\n    pass"),
    (rules.swallowed, "try:\n    f()\nexcept:\n    ..."),
    (rules.swallowed, "for x in y:\n    try:\n        f()\n    except BaseException as e:\n        continue"),
    (rules.swallowed, "with contextlib.suppress(Exception): f()"),
    (rules.environment_or_pickle, "import os\nos.environ['A']"),
    (rules.environment_or_pickle, "from os import getenv"),
    (rules.environment_or_pickle, "import pickle"),
    (rules.environment_or_pickle, "from pickle import loads"),
    (rules.environment_or_pickle, "torch.load(path)"),
    (rules.from_root, "from quintet import LLM"),
    (rules.from_root, "def f():\n    from quintet import config, SamplingParams"),
    (rules.mocked, "from unittest.mock import MagicMock"),
    (rules.mocked, "from unittest import mock"),
    (rules.mocked, "import unittest.mock"),
]

PASSES = [
    (rules.device_words, '"""Runs on cuda, rocm and cpu."""\nx.cpu()\nprint("the cpu is slow")'),
    (rules.outgrown, "def f():\n" + "    x = 1\n" * (rules.MAX_FUNCTION - 1)),
    (
        rules.outgrown,
        "class A:\n" + "".join(f"    def _f{i}(self): ...\n" for i in range(rules.MAX_PUBLIC_METHODS + 1)),
    ),
    (rules.undocumented, ""),
    (rules.undocumented, '"""Owns a thing.\n\nAnd says more."""\nx = 1'),
    (rules.swallowed, "try:\n    f()\nexcept KeyError:\n    pass"),
    (rules.swallowed, "try:\n    f()\nexcept Exception as e:\n    log(e)"),
    (rules.environment_or_pickle, "import os\nos.path.join('a')\nself.load(x)"),
    (rules.from_root, "from quintet import _cpu, __version__, config\nimport quintet.engine"),
    (rules.mocked, "import unittest"),
]


@pytest.mark.parametrize(("rule", "sample"), BITES)
def test_rule_bites(rule: Callable[[str], list[str]], sample: str) -> None:
    assert rule(sample)


@pytest.mark.parametrize(("rule", "sample"), PASSES)
def test_rule_lets_pass(rule: Callable[[str], list[str]], sample: str) -> None:
    assert rule(sample) == []


def test_a_crowded_folder_is_refused() -> None:
    crowd = [Path("tests/e2e") / f"test_{number}.py" for number in range(rules.MAX_FOLDER + 1)]
    assert rules.crowded(crowd) == ["tests/e2e: 21 modules; 20 are allowed"]
    families = [Path("quintet/models") / each.name for each in crowd]  # a module for each
    assert rules.crowded([*crowd[1:], *families]) == []


def test_named_paths_are_told_from_words() -> None:
    page = "`engine/engine.py`, `docs/`; not `step()`, `tests/<x>/`, `Engine`, `pip x/y.py`, `config.json`, a/b.py"
    assert rules.named_paths(page) == ["engine/engine.py", "docs/"]
