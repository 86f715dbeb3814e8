"""Output items of MCP tool servers: lists of tools, tool calls, and calls that need approval."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from quintet.server.http.ids import new_id
from quintet.server.http.responses.protocol import McpApprovalRequest, McpCall, McpListTools, McpTool
from quintet.server.mcp.results import ToolResult
from quintet.server.mcp.server import ServedTool

MAX_CALLS = 64  # per response, even if max_tool_calls is larger


class ResponseEvent(NamedTuple):
    """An event without its number. Source: OpenAI's API reference, "Streaming events"."""

    kind: str  # without "response."
    fields: dict[str, Any]


class ToolList(NamedTuple):
    """The tools of one server that a request may call."""

    label: str
    tools: Sequence[ServedTool]
    needs_approval: frozenset[str] = frozenset()  # names of tools that need approval

    def item(self) -> McpListTools:
        tools = [
            McpTool(
                name=each.name, description=each.description, input_schema=each.schema, annotations=each.annotations
            )
            for each in self.tools
        ]
        return McpListTools(id=f"mcpl_{new_id()}", server_label=self.label, tools=tools)


def tool_list_events(item: McpListTools, place: int) -> list[ResponseEvent]:
    """Returns the events of a tool list, which was fetched before the answer began."""
    where = {"item_id": item.id, "output_index": place}
    return [
        ResponseEvent("output_item.added", {"output_index": place, "item": msgspec.structs.replace(item, tools=[])}),
        ResponseEvent("mcp_list_tools.in_progress", where),
        ResponseEvent("mcp_list_tools.completed", where),
        ResponseEvent("output_item.done", {"output_index": place, "item": item}),
    ]


class McpCallBuilder:
    """A call that the model is writing; a tool server then carries it out."""

    def __init__(self, name: str, label: str, approval: str | None = None) -> None:
        """`approval`: id of the approval request."""
        self.id, self.name, self.label, self._approval = f"mcp_{new_id()}", name, label, approval
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """Its arguments so far."""
        return "".join(self._text)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a complete call; the parsers ensure that they are a JSON object."""
        found: dict[str, Any] = msgspec.json.decode(self.text or "{}")
        return found

    def item(self, status: str) -> McpCall:
        return McpCall(
            id=self.id, server_label=self.label, name=self.name, arguments=self.text, status=status,
            approval_request_id=self._approval,
        )  # fmt: skip

    def start_events(self, where: dict[str, Any]) -> list[ResponseEvent]:
        return [ResponseEvent("mcp_call.in_progress", where)]

    def delta_event(self, text: str, where: dict[str, Any]) -> ResponseEvent:
        self._text.append(text)
        return ResponseEvent("mcp_call_arguments.delta", {**where, "delta": text})

    def end_events(self, where: dict[str, Any]) -> list[ResponseEvent]:
        return [ResponseEvent("mcp_call_arguments.done", {**where, "arguments": self.text})]

    def result_events(self, result: ToolResult, status: str, place: int) -> tuple[McpCall, list[ResponseEvent]]:
        """Builds the finished item and its events. `status`: completed, failed, or incomplete (malformed, not run)."""
        item = self.item(status)
        if result.failed:
            item.error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": result.text}]}
        else:
            item.output = result.text
        kind = "mcp_call.completed" if status == "completed" else "mcp_call.failed"
        done = ResponseEvent("output_item.done", {"output_index": place, "item": item})
        return item, [ResponseEvent(kind, {"item_id": self.id, "output_index": place}), done]


class ApprovalCallBuilder:
    """A call that the model is writing and that needs approval. It is shown only if complete."""

    def __init__(self, name: str, label: str) -> None:
        self.id, self.name, self.label = f"mcpr_{new_id()}", name, label
        self.written: list[str] = []

    @property
    def text(self) -> str:
        """Its arguments so far."""
        return "".join(self.written)

    def item(self) -> McpApprovalRequest:
        return McpApprovalRequest(id=self.id, server_label=self.label, name=self.name, arguments=self.text)
