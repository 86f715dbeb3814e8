"""A tool that runs here, and what a call of it gives: always text, also where it fails."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from quintet.names import unknown

MAX_NAME = 64  # characters, as OpenAI has it
MAX_RESULT = 16_384  # characters of a result that go back to the model


class UserTool(Protocol):
    """What a call runs."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""

    def run(self, arguments: dict[str, Any]) -> str:
        """What the model is told. Whatever it raises is told as well."""


class Called(NamedTuple):
    """A call that the model makes."""

    name: str
    arguments: str  # JSON text

    @property
    def shown(self) -> str:
        """On one line, with nothing in it that a terminal would obey or hide."""
        return harmless(f"{self.name} {self.arguments}")


def spec(tool: UserTool) -> dict[str, Any]:
    """As OpenAI's API takes it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def run(tools: Mapping[str, UserTool], call: Called) -> str:
    """What the model is told of a call that is allowed."""
    tool = tools.get(call.name)
    if tool is None:
        return f"error: {unknown('tool', call.name[:MAX_NAME], tools)}"
    try:
        arguments = json.loads(call.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("the arguments must be a JSON object")
        result = tool.run(arguments)
    except (Exception, SystemExit) as error:
        result = f"error: {type(error).__name__}: {error}"
    more = len(result) - MAX_RESULT
    return result if more <= 0 else f"{result[:MAX_RESULT]}\n[{more} characters more were cut off]"


def harmless(text: str) -> str:
    """What does not print is written out: control characters, and marks that turn the direction of text."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
