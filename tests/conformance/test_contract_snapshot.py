"""The contract does not change by accident, and a package that was written for another one is told so."""

import importlib.util
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from quintet import contract, platforms
from quintet.interface import platform as interface
from quintet.interface import types, weights
from quintet.interface.platform import CONTRACT_VERSION, Platform, WrongContract
from quintet.platforms import choose, discover
from quintet.platforms.null import PLATFORM as NULL

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("contract_snapshot.txt")
CHANGES = ROOT / "docs" / "contract-changes.md"


def script(name: str) -> Any:
    found = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_contract_is_what_it_was() -> None:
    now, before = script("contract").snapshot().splitlines(), SNAPSHOT.read_text(encoding="utf-8").splitlines()
    gone = [f"- {line.strip()}" for line in before if line not in now]
    new = [f"+ {line.strip()}" for line in now if line not in before]
    assert now == before, (
        "the contract has changed:\n" + "\n".join(gone + new) + "\n"
        "1. could a platform that was written before break (a name gone, another parameter, a new duty)? Then raise "
        "CONTRACT_VERSION in quintet/interface/platform.py.\n"
        "2. say in docs/contract-changes.md what changed and, if it was raised, what a platform does about it.\n"
        "3. .venv/bin/python scripts/contract.py > tests/conformance/contract_snapshot.txt"
    )


def test_every_contract_has_its_note() -> None:
    versions = [int(found) for found in re.findall(r"^## Contract (\d+)", CHANGES.read_text(encoding="utf-8"), re.M)]
    assert versions == [*range(CONTRACT_VERSION, 0, -1)], "the newest first, and none left out"


def test_the_snapshot_sees_what_a_platform_leans_on() -> None:
    lines = [line.strip() for line in script("contract").snapshot().splitlines()]
    assert f"CONTRACT_VERSION = {CONTRACT_VERSION}" in lines
    assert "@abstractmethod open(self, rank: int) -> Device" in lines
    assert "slot_mapping: Tensor" in lines and "window: int | None = None" in lines
    assert "rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor" in lines
    assert not [line for line in lines if line.startswith("_") and not line.startswith("__")]


@pytest.mark.parametrize("module", [interface, types, weights], ids=lambda module: module.__name__)
def test_one_door_has_every_class_of_the_contract(module: Any) -> None:
    made = {n: v for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}
    assert {n: getattr(contract, n, None) for n in made if n[0] != "_"} == {
        n: v for n, v in made.items() if n[0] != "_"
    }
    assert sorted(set(contract.__all__)) == sorted(contract.__all__)
    assert set(contract.__all__) == {n for n in vars(contract) if n[0] != "_"}, "nothing is defined there"


@pytest.mark.parametrize("folder", ["examples/vendor-platform/acme", "quintet/conformance/template"])
def test_packages_come_in_by_the_door(folder: str) -> None:
    sources = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).glob("*.py.txt")]
    beside = [
        f"{path.name}: {line}"
        for path in sources
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"from quintet\.(platforms|types|weights|config|ops) import|from quintet\.platforms\.", line)
    ]
    assert sources and not beside


# ------------------------------------------------------------------------------------------------ packages


class Current(NULL):  # type: ignore[misc, valid-type]
    """A vendor's platform of this contract."""

    name = "current"
    contract = CONTRACT_VERSION


class Silent(NULL):  # type: ignore[misc, valid-type]
    """One that does not say for which contract it was written."""

    name = "silent"


class Distribution:
    """What the metadata of an installed package says."""

    name, version = "acme", "0.3"


def plug(monkeypatch: pytest.MonkeyPatch, value: str) -> str:
    """What discovery says of the package `acme 0.3` with this platform."""
    point = EntryPoint("acme", value, platforms.GROUP)
    point = point._for(Distribution())  # type: ignore[attr-defined]  # as importlib.metadata itself does
    monkeypatch.setattr(platforms, "entry_points", lambda group: [point])
    return str(next(found for found in discover() if found.name == "acme").result)


def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> str:
    name = f"vendor_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return plug(monkeypatch, f"{name}:Acme")


BODY = "from quintet.interface.platform import Platform\nclass Acme(Platform):\n    name = 'acme'\n"


def test_one_of_this_contract_is_available_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    plug(monkeypatch, f"{__name__}:Current")
    chosen = choose("acme")
    assert chosen.platform is Current and (chosen.source, chosen.version) == ("acme", "0.3")


def test_an_older_one_is_told_before_anything_else_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(interface, "CONTRACT_VERSION", 7)
    said = package(monkeypatch, tmp_path, BODY + "    contract = 6\n    def gone(self): ...\n")
    assert said == (
        "acme 0.3: Acme is for contract 6, and this quintet has contract 7; install a newer acme; "
        "docs/contract-changes.md says what changed"
    )


def test_a_newer_one_asks_for_a_newer_quintet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = package(monkeypatch, tmp_path, BODY + f"    contract = {CONTRACT_VERSION + 1}\n")
    assert f"is for contract {CONTRACT_VERSION + 1}, and this quintet has contract {CONTRACT_VERSION}" in said
    assert "install a newer quintet, or an older acme" in said


def test_one_that_does_not_say_is_told_what_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    said = plug(monkeypatch, f"{__name__}:Silent")
    assert "acme 0.3: Silent does not say for which contract" in said and f"`contract = {CONTRACT_VERSION}`" in said


def test_one_that_imports_what_is_gone_reads_which_contract_this_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = package(monkeypatch, tmp_path, "from quintet.interface.platform import NoLongerThere\n")
    assert "cannot import name 'NoLongerThere'" in said and "mend or remove acme 0.3" in said
    assert f"this quintet has contract {CONTRACT_VERSION}" in said


def test_a_class_of_another_contract_cannot_be_made() -> None:
    with pytest.raises(WrongContract, match="Old is for contract 0"):
        type("Old", (Platform,), {"contract": 0, "no_such_hook": 1})
