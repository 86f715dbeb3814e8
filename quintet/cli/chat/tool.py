"""A tool that runs here, and what a call of it gives: always text, also where it fails."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from quintet.common.suggestions import unknown_name_error

MAX_NAME = 64  # characters, as OpenAI has it
MAX_RESULT = 16_384  # characters of a result that go back to the model


class UserTool(Protocol):
    """Tool that a call runs."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""

    def run(self, arguments: dict[str, Any]) -> str:
        """Returns the result for the model. The model also gets any error that it raises."""


class ToolInvocation(NamedTuple):
    """A call that the model makes."""

    name: str
    arguments: str  # JSON text

    @property
    def one_line(self) -> str:
        """The call on one line, without characters that a terminal would obey or hide."""
        return printable(f"{self.name} {self.arguments}")


def tool_definition(tool: UserTool) -> dict[str, Any]:
    """Returns the tool definition in OpenAI's format."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def run_tool(tools: Mapping[str, UserTool], call: ToolInvocation) -> str:
    """Runs an allowed call and returns its result, or its error, for the model."""
    tool = tools.get(call.name)
    if tool is None:
        return f"error: {unknown_name_error('tool', call.name[:MAX_NAME], tools)}"
    try:
        arguments = json.loads(call.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("the arguments must be a JSON object")
        result = tool.run(arguments)
    except (Exception, SystemExit) as error:
        result = f"error: {type(error).__name__}: {error}"
    more = len(result) - MAX_RESULT
    return result if more <= 0 else f"{result[:MAX_RESULT]}\n[{more} characters more were cut off]"


def printable(text: str) -> str:
    """Escapes characters that do not print: control characters, and marks that turn the direction of text."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
