"""Readers refuse in one line what is wrong, and take no memory for what a file only says: a little of tests.fuzz."""

import pytest

from tests.fuzz.runs import bounded, run
from tests.fuzz.targets import TARGETS

INPUTS = {"gguf": (1500, 100), "safetensors": (200, 20)}  # files, of which one in so many is read whole


@pytest.mark.parametrize("name", TARGETS)
def test_spoilt_files_are_refused_or_read(name: str) -> None:
    target, (inputs, whole) = TARGETS[name](), INPUTS[name]
    with bounded():
        found = run(target, range(inputs), whole)
    assert found.total() == inputs
    assert found["read"] > inputs // 100 and found["refused"] > inputs // 3
