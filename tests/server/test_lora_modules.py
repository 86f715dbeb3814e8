"""--lora-modules: the forms that are read, and those that are refused."""

from typing import Any

import pytest

from quintet.server.config import ServerConfig, check_adapters
from quintet.server.lora_modules import LoRAModule, parse_lora_modules


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a=x/y"], [LoRAModule("a", "x/y")]),
        (["a=x=y", "b=z"], [LoRAModule("a", "x=y"), LoRAModule("b", "z")]),
        (['{"name": "a", "path": "x", "base_model_name": "m"}'], [LoRAModule("a", "x", "m")]),
        (['[{"name": "a", "path": "x"}, {"name": "b", "path": "y"}]'], [LoRAModule("a", "x"), LoRAModule("b", "y")]),
        ([{"name": "a", "path": "x"}], [LoRAModule("a", "x")]),
        ([LoRAModule("a", "x")], [LoRAModule("a", "x")]),
        ("a=x", [LoRAModule("a", "x")]),
    ],
)
def test_forms(given: Any, expected: list[LoRAModule]) -> None:
    assert parse_lora_modules(given) == tuple(expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["bundled"], "must be NAME=FOLDER"), (["=x"], "must be NAME=FOLDER"), (["a="], "must be NAME=FOLDER"),
        (["{"], "must be NAME=FOLDER"), ([{"name": "a"}], "path is None"), ([3], "must be NAME=FOLDER"),
        ([{"name": "a", "path": "x", "rank": 2}], "rank"), (["a=x", "a=y"], "'a' twice"), ([" a=x"], "printed"),
    ],
)  # fmt: skip
def test_refusals(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_lora_modules(given)


def test_adapters_must_be_on_and_have_names_of_their_own() -> None:
    served = ServerConfig(lora_modules=["a=x"])
    check_adapters(served, True, ("m",))
    with pytest.raises(ValueError, match="lora_modules needs enable_lora"):
        check_adapters(served, False, ("m",))
    with pytest.raises(ValueError, match="'a', which is the model's own name"):
        check_adapters(served, True, ("a",))
