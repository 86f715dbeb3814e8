"""docs/models.md says what the families' files and their small models say."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from quintet.media.families import FAMILIES, REFUSED
from quintet.models import families

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    found = importlib.util.spec_from_file_location("models_script", ROOT / "scripts" / "models.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_nobody_wrote_the_page_by_hand(script: Any) -> None:
    assert (ROOT / script.FILE).read_text(encoding="utf-8") == script.page(), "write it anew: python scripts/models.py"


def test_each_wrapper_with_media_is_on_its_page(script: Any) -> None:
    wrappers = script.media_wrappers
    lines = (ROOT / wrappers.FILE).read_text(encoding="utf-8").splitlines()
    shown = {line.split("`")[1]: line for line in lines if line.startswith("| `") and "`model_type`" not in line}
    assert shown.keys() == wrappers.wrappers().keys()
    for kind, line in shown.items():
        assert ("| served: " in line) == (kind in FAMILIES), kind
        assert kind not in REFUSED or REFUSED[kind] in line
        assert "it was not tried" not in line, f"{kind}: say why its media are refused, or serve them"


def test_what_is_left_out_is_not_there(script: Any) -> None:
    named = {word for what in script.LEFT_OUT for word in what.split("`")[1::2]}
    assert named and not named & set(families())
