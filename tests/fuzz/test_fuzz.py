"""Readers refuse in one line what is wrong, and take no memory for what a file only says: a little of tests.fuzz."""

import collections
import functools
import json
import random
from typing import Any

import pytest
from safetensors import safe_open

from quintet.interface.weights import StoredTensor
from quintet.layers.quantization.checkpoint_config import read_quantization_config
from quintet.model_loader.weight_files import DTYPES
from tests.fuzz.__main__ import arguments
from tests.fuzz.mutations import changed
from tests.fuzz.runs import bounded, run
from tests.fuzz.targets import DATA, TARGETS, allowed

INPUTS = {
    "gguf": (1500, 100),
    "safetensors": (200, 20),
    "torch": (300, 2),
}  # files, of which one in so many is read whole


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_spoilt_files_are_refused_or_read(name: str) -> None:
    target, (inputs, whole) = TARGETS[name](), INPUTS[name]
    with bounded():
        found = run(target, range(inputs), whole)
    assert found.total() == inputs
    assert found["read"] > inputs // 100 and found["refused"] > inputs // 3


@pytest.mark.parametrize("folder", sorted(each.parent.name for each in DATA.glob("*/model.safetensors")))
def test_spoilt_configurations_are_refused_or_read(folder: str) -> None:
    said = json.loads((DATA / folder / "config.json").read_text()).get("quantization_config")
    with safe_open(DATA / folder / "model.safetensors", "pt") as file:
        there = {name: _listed(file.get_slice(name)) for name in list(file.keys())}
    found = collections.Counter[str]()
    for seed in range(100):
        spoilt = changed({"it": said}, random.Random(seed)).get("it")
        found[
            "read" if allowed(functools.partial(read_quantization_config, spoilt, lambda: there)) is None else "refused"
        ] += 1
    assert found.total() == 100
    assert found["read"] > 0 and found["refused"] > 0, found


@pytest.mark.parametrize(("words", "targets"), [([], [*TARGETS]), (["gguf"], ["gguf"])])
def test_the_program_takes_all_readers_or_those_that_are_named(words: list[str], targets: list[str]) -> None:
    assert arguments(words).targets == targets


def _listed(tensor: Any) -> StoredTensor:
    kind = DTYPES.get(tensor.get_dtype())
    return StoredTensor(tuple(tensor.get_shape()), () if kind is None else (kind,))
