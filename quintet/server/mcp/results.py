"""Converts a tool's result or failure to text of limited size for the model."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mcp.types import CallToolResult, ContentBlock


class ToolResult(NamedTuple):
    """Result of one tool call."""

    text: str
    failed: bool = False  # the text says why


def result_of(given: "CallToolResult", most: int) -> ToolResult:
    """Converts a result of at most `most` bytes of UTF-8. A longer one is a failure: a cut result may mislead."""
    text = _text(given.content)
    if not given.content and given.structured_content is not None:
        text = json.dumps(given.structured_content, ensure_ascii=False)
    size = len(text.encode(errors="replace"))
    if size > most:
        return ToolResult(f"the tool's result has {size} bytes, and {most} can be read; ask it for less", failed=True)
    return ToolResult(text or ("the tool failed and did not say why" if given.is_error else ""), bool(given.is_error))


def _text(blocks: "Sequence[ContentBlock]") -> str:
    return "\n".join(map(_of_block, blocks))


def _of_block(block: "ContentBlock") -> str:
    """Returns the text of a block. Models here read only text: other blocks become a short description."""
    if block.type == "text":
        return block.text
    if block.type == "resource_link":
        return f"[{block.name}: {block.uri}]"
    if block.type == "resource":
        held = block.resource
        text = getattr(held, "text", None)
        return text if isinstance(text, str) else f"[{held.mime_type or 'bytes'} of {held.uri}, which is no text]"
    return f"[{block.mime_type}, which is no text]"


def one_line(text: object, most: int) -> str:
    """Returns text of a server in one line, without control characters: it goes to the log and to error messages."""
    words = " ".join(str(text)[: 4 * most].split())
    return "".join(each if each.isprintable() else "?" for each in words)[:most]
