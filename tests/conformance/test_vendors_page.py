"""docs/vendors.md says what the contract says: its clauses, its names and the methods that it shows."""

import ast
import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintet import contract
from quintet.conformance.clauses import CLAUSES
from quintet.conformance.harness.worker_runner import WorkerRunner, random_prompts
from quintet.contract import (
    CONTRACT_VERSION,
    AttentionSpec,
    Capabilities,
    CheckpointSlice,
    Device,
    MaxShape,
    ShapeBucket,
    Unavailable,
    Weight,
)
from quintet.interface.weights import Matrix
from quintet.models.llama import LlamaForCausalLM
from quintet.ops import bind
from quintet.ops.linear import linear
from quintet.platforms.cpu import PLATFORM as CPU
from quintet.platforms.null import PLATFORM as NULL
from quintet_tools.checkpoints.tiny import variant

PAGE = (Path(__file__).parents[2] / "docs" / "vendors.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def parsed() -> Iterator[ast.Module]:
    yield from map(ast.parse, BLOCKS)


HEAD = """
import torch
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from quintet.contract import *
from torch import Tensor, nn

tiled = Tensor.contiguous

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


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the one block with these words as a module of its own, with what it takes as given beside it."""

    def ran(words: str, **given: Any) -> ModuleType:
        (block,) = [each for each in BLOCKS if words in each]
        beside = ModuleType("vendors_given")
        vars(beside).update(given)
        monkeypatch.setitem(sys.modules, beside.__name__, beside)
        (tmp_path / "vendors_block.py").write_text(f"{HEAD}\nfrom vendors_given import *\n{block}")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "vendors_block", raising=False)
        return importlib.import_module("vendors_block")

    return ran


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
    known = {*vars(contract), "Tensor", "Any", "Callable", "Mapping", "Sequence", "StepState", "PRIORITY", "ValueError"}
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
    most = ShapeBucket(64, 3, 64, (8,))
    assert [each.tokens for each in shown["estimate"](None, nn.Module(), [], MaxShape(most, 8, 9)).buckets] == [1, 2]


def test_what_a_probe_returns_is_what_the_contract_takes(tmp_path: Path) -> None:
    (block,) = [each for each in BLOCKS if each.startswith("return Unavailable")]
    path = tmp_path / "probes.py"
    path.write_text(HEAD + block.replace("return Unavailable", "no = Unavailable").replace("return Cap", "yes = Cap"))
    found = runpy.run_path(str(path))
    assert isinstance(found["no"], Unavailable) and found["yes"].devices == 4
    assert isinstance(found["yes"], Capabilities)


def test_the_copy_home_waits_for_its_event_and_has_memory_of_its_own(shown: dict[str, Any]) -> None:
    waited: list[str] = []

    class Queue:
        def copy(self, x: Tensor, target: Tensor) -> Any:
            target.copy_(x)
            return SimpleNamespace(wait=lambda: waited.append("event"))

    device = SimpleNamespace(_queue=Queue(), _pinned_like=torch.empty_like)
    x = torch.ones(3)
    finished = shown["to_host"](device, x)
    assert waited == []
    x.zero_()
    assert finished().tolist() == [1, 1, 1] and waited == ["event"]


def test_weights_are_placed_and_replaced_as_the_page_shows(shown: dict[str, Any]) -> None:
    parts = tuple(CheckpointSlice(name, (2, 3), ((0, 2),)) for name in "ab")
    weight = Weight("w", parts, 0, 0, torch.float32, "linear")
    tensors = {name: torch.full((2, 3), value, dtype=torch.bfloat16) for name, value in (("a", 1.0), ("b", 2.0))}
    platform = SimpleNamespace(_upload=torch.clone)
    placed = shown["place"](platform, weight, tensors)
    assert placed["w"].dtype == torch.float32 and placed["w"][:, 0].tolist() == [1, 1, 2, 2]
    again = shown["place"](platform, weight, {name: 2 * each for name, each in tensors.items()}, placed)
    assert again["w"] is placed["w"] and placed["w"][:, 0].tolist() == [2, 2, 4, 4]


@pytest.mark.parametrize(("has", "served"), [(True, "tinyvec"), (False, "reference")])
def test_a_provider_is_registered_as_the_page_shows(
    has: bool, served: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "providers", dict(linear.providers))
    monkeypatch.setattr(linear, "probes", dict(linear.probes))
    module = run("PRIORITY = ", driver=SimpleNamespace(has=lambda unit: has), Matrix=Matrix)
    choice = bind({"linear": module.PRIORITY["linear"]}).choice("linear")
    assert choice.provider == served and (has or "driver 2.1 emulates one" in choice.rejected[0][1])


def test_the_fused_layer_serves_a_model(run: Any) -> None:
    """With and without biases: the first by the kernel, the other by quintet's own."""
    fused: list[int] = []

    def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        fused.append(len(x))
        gate, up = (x @ gate_up.t()).chunk(2, -1)
        return (nn.functional.silu(gate) * up) @ down.t()

    run("class FusedMLP", tinyvec=SimpleNamespace(mlp=mlp))

    class Plain(CPU):
        """With weights as the checkpoint has them, which this kernel reads."""

        layers = {"GatedMLP": "vendors_block:FusedMLP"}
        op_priority = {}

        def _plain(self, weight: Weight, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            return {weight.name: weight.local(parts).to(weight.dtype, copy=True)}

    for name, kernel in (("plain", True), ("tied, biased", False)):
        fused.clear()
        tiny, (prompt,) = variant("llama", name), random_prompts(1, (9,), 101)
        (got,) = WorkerRunner(tiny, Plain()).prompts([prompt])
        assert torch.allclose(got, tiny.logits(prompt), atol=1e-4) and bool(fused) is kernel


def test_the_model_overrides_what_quintets_has(run: Any) -> None:
    from quintet.layers.layer_state import StepState

    own = run("class TinyvecLlamaForCausalLM(", StepState=StepState).TinyvecLlamaForCausalLM
    assert issubclass(own, LlamaForCausalLM)
    assert inspect.signature(own.trunk).parameters.keys() == inspect.signature(LlamaForCausalLM.trunk).parameters.keys()


def test_every_block_is_run_here() -> None:
    """A new one needs a test of its own: by what it begins with."""
    first = [block.split("(")[0].split("\n")[0] for block in BLOCKS]
    assert first == [
        "return Unavailable", "def to_host", "def place", "def estimate", "from quintet.ops.linear import linear",
        "def mixer", "from quintet.layers.mlp import GatedMLP", "from quintet.models.llama import LlamaForCausalLM",
    ]  # fmt: skip
