"""LoRA resolvers: what the built-in ones find, and what installed ones must be."""

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.lora import resolver
from quintet.lora.request import LoRARequest
from quintet.lora.resolver import FolderResolver, HubResolver, LoRAResolver, make_resolvers


def adapter(folder: Path, base: Any = "org/Model") -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    return folder


async def test_a_folder_has_the_adapters_that_were_trained_for_the_model(tmp_path: Path) -> None:
    found = FolderResolver(tmp_path)
    adapter(tmp_path / "a"), adapter(tmp_path / "other", "org/another")
    assert await found.resolve_lora("org/model", "a") == LoRARequest("a", 0, str(tmp_path / "a"))
    assert await found.resolve_lora("/models/Model/", "a") is not None
    assert await found.resolve_lora("org/model", "other") is None
    assert await found.resolve_lora("org/model", "b") is None


@pytest.mark.parametrize("name", ["../outside", "/outside", "..", ".", "", "x/../../outside", "a\x00b", "..\\outside"])
async def test_names_do_not_leave_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "inside").mkdir()
    adapter(tmp_path / "outside")
    assert await FolderResolver(tmp_path / "inside").resolve_lora("org/model", name) is None


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"base_model_name_or_path": 3}'])
async def test_a_folder_with_another_file_is_passed_over(tmp_path: Path, text: str) -> None:
    (adapter(tmp_path / "a") / "adapter_config.json").write_text(text)
    assert await FolderResolver(tmp_path).resolve_lora("org/model", "a") is None


async def test_the_hub_is_asked_for_named_repositories_alone() -> None:
    found = HubResolver(["org/adapter"])
    assert await found.resolve_lora("m", "org/adapter") == LoRARequest("org/adapter", 0, "org/adapter")
    assert await found.resolve_lora("m", "org/other") is None


class Installed(LoRAResolver):
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        return None


class Point:
    def __init__(self, made: Any) -> None:
        self.name, self.value, self._made = "point", "package:Resolver", made

    def load(self) -> Any:
        return self._made


def test_installed_resolvers_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "entry_points", lambda group: [Point(Installed)] if group == resolver.GROUP else [])
    made = make_resolvers("folder", ["org/adapter"])
    assert [type(each) for each in made] == [FolderResolver, HubResolver, Installed]


@pytest.mark.parametrize(("made", "message"), [(object, "no resolve_lora"), (LoRAResolver, "failed: TypeError")])
def test_what_is_no_resolver_is_refused(made: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "entry_points", lambda group: [Point(made)])
    with pytest.raises(ValueError, match=message):
        make_resolvers(None, [])
