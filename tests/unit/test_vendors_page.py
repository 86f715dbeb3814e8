"""docs/vendors.md says what the contract says: its clauses, its names and the methods that it shows."""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quintet import contract
from quintet.conformance.clauses import CLAUSES
from quintet.contract import CONTRACT_VERSION, AttentionSpec, Device, Extent, Variant
from quintet.ops import bind
from quintet.platforms.null import PLATFORM as NULL

PAGE = (Path(__file__).parents[2] / "docs" / "vendors.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def parsed() -> Iterator[ast.Module]:
    yield from map(ast.parse, BLOCKS)


HEAD = """
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from quintet.contract import *
from torch import Tensor, nn

def tiled_bytes(weight):
    return weight.nbytes
"""


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's functions that are methods, by their names."""
    functions = [node for block in parsed() for node in block.body if isinstance(node, ast.FunctionDef)]
    own = [node for node in functions if node.args.args and node.args.args[0].arg == "self"]
    (tmp_path / "vendors_page.py").write_text(HEAD + "\n".join(map(ast.unparse, own)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vendors_page", raising=False)
    module = importlib.import_module("vendors_page")
    return {node.name: getattr(module, node.name) for node in own}


def test_every_clause_is_named_and_no_other() -> None:
    named = set(re.findall(rf"`((?:{'|'.join({each.partition('.')[0] for each in CLAUSES})})\.\w+)`", PAGE))
    assert set(CLAUSES) <= named
    assert named - set(CLAUSES) <= {"cache.batch", "device.py", "attention.py", "ops.py"}


def test_what_is_imported_is_there() -> None:
    found = [node for block in parsed() for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    assert found
    for node in found:
        assert node.module and not [n for n in node.names if not hasattr(importlib.import_module(node.module), n.name)]


def test_every_class_that_is_used_is_the_contracts() -> None:
    known = {*vars(contract), "Tensor", "Any", "Callable", "Mapping", "Sequence", "Cache", "PRIORITY", "ValueError"}
    used = {node.id for block in parsed() for node in ast.walk(block) if isinstance(node, ast.Name)}
    imported = {
        a.asname or a.name
        for block in parsed()
        for n in ast.walk(block)
        if isinstance(n, ast.ImportFrom)
        for a in n.names
    }
    assert {name for name in used if name[0].isupper()} <= known | imported


def test_the_methods_are_the_contracts(shown: dict[str, Any]) -> None:
    of_platform = {name: shown[name] for name in ("place", "estimate", "mixer")}
    assert shown.keys() - of_platform.keys() == {"to_host"}
    assert inspect.signature(shown["to_host"]).parameters.keys() == inspect.signature(Device.to_host).parameters.keys()
    type("Tinyvec", (NULL,), {"contract": CONTRACT_VERSION, **of_platform})  # another parameter is refused


def test_the_mixer_does_what_the_page_says(shown: dict[str, Any]) -> None:
    ops, spec = bind({}), AttentionSpec(4, 2, 16, 0.25, torch.float32, 16)
    assert shown["mixer"](None, spec, ops, 0).layouts[0].shape == (2, 2, 16, 16)
    assert shown["mixer"](None, replace(spec, source="none"), ops, 0).layouts == ()
    with pytest.raises(ValueError, match="adds no slopes.*looks back alone"):
        shown["mixer"](None, replace(spec, alibi=(0.5,) * 4, causal=False), ops, 0)


def test_the_estimate_names_steps_that_fit(shown: dict[str, Any]) -> None:
    most = Variant(64, 3, 64, (8,))
    assert [each.tokens for each in shown["estimate"](None, nn.Module(), [], Extent(most, 8, 9)).variants] == [1, 2]
