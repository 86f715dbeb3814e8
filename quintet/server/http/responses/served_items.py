"""Items of an output that a tool server has a part in: its list of tools, and the calls that it carries out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from quintet.server.http.ids import new_id
from quintet.server.http.responses.shapes import McpApprovalRequest, McpCall, McpListTools, McpTool
from quintet.server.tool_servers.results import Result
from quintet.server.tool_servers.server import ServedTool

MAX_CALLS = 64  # of one response, whatever max_tool_calls says


class Step(NamedTuple):
    """An event without its number. Source: OpenAI's API reference, "Streaming events"."""

    kind: str  # without "response."
    fields: dict[str, Any]


class Listed(NamedTuple):
    """The tools of one server that a request may call."""

    label: str
    tools: Sequence[ServedTool]
    asks: frozenset[str] = frozenset()  # names of those whose calls need approval

    def item(self) -> McpListTools:
        tools = [
            McpTool(
                name=each.name, description=each.description, input_schema=each.schema, annotations=each.annotations
            )
            for each in self.tools
        ]
        return McpListTools(id=f"mcpl_{new_id()}", server_label=self.label, tools=tools)


def listed(item: McpListTools, place: int) -> list[Step]:
    """The events of a list: it was asked for before the answer began."""
    where = {"item_id": item.id, "output_index": place}
    return [
        Step("output_item.added", {"output_index": place, "item": msgspec.structs.replace(item, tools=[])}),
        Step("mcp_list_tools.in_progress", where),
        Step("mcp_list_tools.completed", where),
        Step("output_item.done", {"output_index": place, "item": item}),
    ]


class ServedCall:
    """A call that is being written, and then carried out."""

    def __init__(self, name: str, label: str, approval: str | None = None) -> None:
        """`approval`: the id of the request for it."""
        self.id, self.name, self.label, self._approval = f"mcp_{new_id()}", name, label, approval
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """Its arguments so far."""
        return "".join(self._text)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of one that is whole: the parsers see to it that it is an object."""
        found: dict[str, Any] = msgspec.json.decode(self.text or "{}")
        return found

    def item(self, status: str) -> McpCall:
        return McpCall(
            id=self.id, server_label=self.label, name=self.name, arguments=self.text, status=status,
            approval_request_id=self._approval,
        )  # fmt: skip

    def begun(self, where: dict[str, Any]) -> list[Step]:
        return [Step("mcp_call.in_progress", where)]

    def more(self, text: str, where: dict[str, Any]) -> Step:
        self._text.append(text)
        return Step("mcp_call_arguments.delta", {**where, "delta": text})

    def ended(self, where: dict[str, Any]) -> list[Step]:
        return [Step("mcp_call_arguments.done", {**where, "arguments": self.text})]

    def answered(self, result: Result, status: str, place: int) -> tuple[McpCall, list[Step]]:
        """`status` is completed or failed, or incomplete: it is broken, and nobody has carried it out."""
        item = self.item(status)
        if result.failed:
            item.error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": result.text}]}
        else:
            item.output = result.text
        kind = "mcp_call.completed" if status == "completed" else "mcp_call.failed"
        done = Step("output_item.done", {"output_index": place, "item": item})
        return item, [Step(kind, {"item_id": self.id, "output_index": place}), done]


class AskedCall:
    """A call that is being written and needs approval. It is shown when it is whole: what is cut off asks for none."""

    def __init__(self, name: str, label: str) -> None:
        self.id, self.name, self.label = f"mcpr_{new_id()}", name, label
        self.written: list[str] = []

    @property
    def text(self) -> str:
        """Its arguments so far."""
        return "".join(self.written)

    def item(self) -> McpApprovalRequest:
        return McpApprovalRequest(id=self.id, server_label=self.label, name=self.name, arguments=self.text)
