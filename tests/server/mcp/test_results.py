"""What a model reads of a tool's result."""

from typing import Any

import pytest

from quintet.server.mcp.results import ToolResult, result_of

types = pytest.importorskip("mcp.types", reason="needs the extra mcp")

IMAGE = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
PAGE = {"type": "resource", "resource": {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "hello"}}
BLOB = {"type": "resource", "resource": {"uri": "file:///a.bin", "blob": "aGk="}}
LINK = {"type": "resource_link", "name": "a", "uri": "https://a.example/"}


def read(*content: Any, most: int = 1000, **rest: Any) -> ToolResult:
    return result_of(types.CallToolResult.model_validate({"content": list(content), **rest}), most)


def test_text_is_text_and_what_is_none_is_named() -> None:
    said = read({"type": "text", "text": "one"}, IMAGE, PAGE, BLOB, LINK)
    assert said.text.splitlines() == [
        "one", "[image/png, which is no text]", "hello", "[bytes of file:///a.bin, which is no text]",
        "[a: https://a.example/]",
    ]  # fmt: skip
    assert not said.failed


def test_structure_alone_is_json() -> None:
    assert read(structuredContent={"sum": 5, "of": "ä"}) == ('{"sum": 5, "of": "ä"}', False)
    assert read({"type": "text", "text": "5"}, structuredContent={"sum": 5}) == ("5", False)


def test_a_failure_without_a_word_says_that() -> None:
    assert read(isError=True) == ("the tool failed and did not say why", True)
    assert read({"type": "text", "text": "no"}, isError=True) == ("no", True)


def test_bytes_are_counted_and_not_characters() -> None:
    assert not read({"type": "text", "text": "ä" * 5}, most=10).failed
    assert read({"type": "text", "text": "ä" * 6}, most=10).failed
