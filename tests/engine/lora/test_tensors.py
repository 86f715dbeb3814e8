"""Adapters that came as tensors leave no files behind: those without a name go when no request has them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quintet.config import EngineConfig
from quintet.engine.lora.references import LoRAReferences
from quintet.lora.errors import AdapterError
from quintet.lora.request import LoRARequest
from tests.engine.lora.shelves import Shelf, asked, engine_of
from tests.engine.test_overlap import Served


def tensors_of(name: str, scale: float) -> LoRARequest:
    tensors = {"q_proj.lora_A.weight": torch.full((1, 4), scale), "q_proj.lora_B.weight": torch.ones(4, 1)}
    return LoRARequest(name, lora_tensors=tensors, peft_config={"peft_type": "LORA", "r": 1, "lora_alpha": 1})


@pytest.fixture
def served() -> Served:
    return engine_of(Shelf(), 1, 2)


@pytest.fixture
def references(served: Served) -> Iterator[LoRAReferences]:
    made = LoRAReferences(EngineConfig(model="bundled", enable_lora=True), Path, served.engine.lora)
    yield made
    made.close()


def test_removed_files_are_deleted(references: LoRAReferences) -> None:
    folder = Path(references.reference(tensors_of("a", 1.0)).path)
    assert references.reference(tensors_of("a", 1.0)).path == str(folder)
    assert references.reference(tensors_of("b", 1.0)).path == str(folder)
    assert [*folder.parent.iterdir()] == [folder]
    references.remove("a")
    assert folder.is_dir()  # b has the same
    references.remove("b")
    assert not [*folder.parent.iterdir()]


def test_other_tensors_under_a_name_replace_the_files(references: LoRAReferences) -> None:
    first, second = (Path(references.reference(tensors_of("a", scale)).path) for scale in (1.0, 2.0))
    assert [*second.parent.iterdir()] == [second] != [first]


def test_files_stay_as_long_as_a_request_has_the_adapter(served: Served, references: LoRAReferences) -> None:
    reference = references.reference(tensors_of("a", 1.0))
    served.engine.add(replace(asked("r", "a"), lora=reference))
    served.engine.step()
    references.remove("a")
    assert Path(reference.path).is_dir()
    while served.engine.busy:
        assert not [each.error for each in served.engine.step() if each.error]
    assert not Path(reference.path).exists()


def test_a_name_that_comes_back_keeps_the_files(served: Served, references: LoRAReferences) -> None:
    reference = references.reference(tensors_of("a", 1.0))
    served.engine.add(replace(asked("r", "a"), lora=reference))
    references.remove("a")
    assert references.reference(tensors_of("a", 1.0)).path == reference.path
    while served.engine.busy:
        served.engine.step()
    assert Path(reference.path).is_dir()
    references.remove("a")
    assert not Path(reference.path).exists()


def test_what_is_refused_leaves_nothing(references: LoRAReferences) -> None:
    parent = Path(references.reference(tensors_of("kept", 1.0)).path).parent
    wrong = tensors_of("a", 2.0)
    with pytest.raises(AdapterError):
        references.reference(replace(wrong, peft_config={"peft_type": "IA3"}))
    shelf_refuses = tensors_of("bad", 3.0)
    assert references._manager is not None
    references._manager._ranks.bad.add("bad")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="the adapter 'bad' cannot be served: no file of bad"):
        references.reference(shelf_refuses)
    assert len([*parent.iterdir()]) == 1
