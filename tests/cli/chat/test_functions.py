"""Functions of a Python file as tools: what the model is told of them, and what a call gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.cli.chat.tool import MAX_RESULT, ToolInvocation, printable, run_tool, tool_definition
from quintet.cli.chat.tool_files import read_tools

FILE = '''
"""Tools."""
from dataclasses import dataclass
from json import dumps
from typing import Literal, Optional

@dataclass
class Place:
    lat: float
    lon: float = 0.0

def weather(city: str, unit: Literal["C", "F"] = "C", days: Optional[list[int]] = None) -> str:
    """Tells the weather.

    Of any city.

    Args:
        city: its name
        unit (str): of the temperature

    Returns:
        words: that nobody needs to describe
    """
    print("asked")
    return f"{city}: 21 {unit} {days}"

def near(place: Place) -> dict:
    """Says what is near."""
    return {"lat": place.lat, "ä": [1]}

def leave(hard: bool = False):
    """Ends badly."""
    raise SystemExit("gone") if hard else KeyError("nothing")

def save(json: str, copy: int = 1, _x: bool = True, model_config: float = 0.5) -> list:
    """Has names that others have, too."""
    return [json, copy, _x, model_config]

def long() -> str:
    """Says much."""
    return "x" * 20_000

def _helper(x): ...
'''


@pytest.fixture
def tools(tmp_path: Path) -> Any:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    return read_tools(str(file))


def call(tools: Any, name: str, **arguments: Any) -> str:
    return run_tool(tools, ToolInvocation(name, json.dumps(arguments)))


def test_public_functions_are_the_tools_and_say_what_they_take(tools: Any) -> None:
    assert list(tools) == ["weather", "near", "leave", "save", "long"]
    function = tool_definition(tools["weather"])["function"]
    assert function["description"] == "Tells the weather.\n\nOf any city."
    parameters = function["parameters"]
    assert parameters["required"] == ["city"] and parameters["additionalProperties"] is False
    assert parameters["properties"]["city"]["description"] == "its name"
    assert parameters["properties"]["unit"] == {
        "default": "C", "description": "of the temperature", "enum": ["C", "F"], "title": "Unit", "type": "string",
    }  # fmt: skip


def test_arguments_come_as_they_are_annotated(tools: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tools, "weather", city="Bern", days=[1]) == "Bern: 21 C [1]"
    assert capsys.readouterr() == ("", "asked\n")  # what it prints is no answer
    assert call(tools, "save", json="{}", _x=False) == '["{}", 1, false, 0.5]'
    assert call(tools, "near", place={"lat": 3}) == '{"lat": 3.0, "ä": [1]}'


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("weather", {}, "error: ValueError: city: Field required"),
        ("weather", {"city": "Bern", "unit": "K"}, "error: ValueError: unit: Input should be 'C' or 'F'"),
        ("weather", {"city": "Bern", "when": 1}, "error: ValueError: when: Extra inputs are not permitted"),
        ("leave", {}, "error: KeyError: 'nothing'"),
        ("leave", {"hard": True}, "error: SystemExit: gone"),
        ("wether", {}, "error: unknown tool 'wether'; did you mean 'weather'?"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model(tools: Any, name: str, arguments: Any, says: str) -> None:
    assert call(tools, name, **arguments) == says


def test_arguments_that_are_no_object_are_told_too(tools: Any) -> None:
    assert run_tool(tools, ToolInvocation("long", "[1]")) == "error: ValueError: the arguments must be a JSON object"
    assert run_tool(tools, ToolInvocation("long", "{")).startswith("error: JSONDecodeError")


def test_a_long_result_is_cut(tools: Any) -> None:
    assert call(tools, "long") == "x" * MAX_RESULT + f"\n[{20_000 - MAX_RESULT} characters more were cut off]"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def f(x: int): return 1", r"f\(\) has no docstring"),
        ('def f(x):\n    "Do."', r"f\(\): x has no annotation"),
        ('def f(*x: int):\n    "Do."', "tools take named arguments alone"),
        ('async def f():\n    "Do."', "is a coroutine"),
        ('def f(x: type(_ for _ in ())):\n    "Do."', "have no JSON schema"),
        ('def f(x: "Nowhere"):\n    "Do."', "name 'Nowhere' is not defined"),
        ("1 / 0", "failed: ZeroDivisionError"),
        ("x = 1", "1 to 128 tools"),
    ],
)
def test_a_file_without_tools_says_why(tmp_path: Path, code: str, says: str) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(code)
    with pytest.raises(ValueError, match=says) as raised:
        read_tools(str(file))
    assert str(raised.value).startswith(f"--tools {file}: ") and "\n" not in str(raised.value)


def test_what_is_shown_obeys_nobody() -> None:
    assert printable("a\x1b[2J\u202eb\nä 世") == "a\\x1b[2J\\u202eb\\nä 世"
