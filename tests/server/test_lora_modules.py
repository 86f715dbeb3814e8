"""--lora-modules: the forms that are read, and those that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.cli.main import main
from quintet.server.config import ServerConfig, check_adapters
from quintet.server.lora_modules import LoRAModule, check_files, parse_lora_modules


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


def test_files_are_checked_before_a_model_is_loaded(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 32, "lora_alpha": 1}
    for name, entries in {"fine": config, "other": {**config, "peft_type": "IA3"}, "empty": config}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(entries))
        if name != "empty":
            (tmp_path / name / "adapter_model.safetensors").write_bytes(b"")
    check_files([LoRAModule("a", str(tmp_path / "fine")), LoRAModule("b", "org/of-the-hub")], 32)
    wrong = {
        "nowhere": "no folder '.*nowhere' here; check the adapter's path",
        "other": "entry peft_type is 'IA3'",
        "empty": "has no adapter_model.safetensors; give the folder",
        "fine": "raise max_lora_rank to 32",
    }
    for name, message in wrong.items():
        path = str(tmp_path / name)
        with pytest.raises(ValueError, match=f"^lora_modules: a={path}: .*{message}"):
            check_files([LoRAModule("a", path)], 16)


def test_serve_ends_at_once_where_a_path_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--enable-lora", "--lora-modules", "sql=./nowhere"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "sql=./nowhere: no folder './nowhere' here; check the adapter's path" in line
