"""Splits a model's output into reasoning, content and tool calls: text in, events out, and nothing of the engine.

A parser is a declaration (`tool_formats.py`, `reasoning_formats.py`), and one splitter reads them all.
"""

from quintet.parsers.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Parsed,
    Reasoning,
    Tool,
    ToolCall,
    gather,
)
from quintet.parsers.formats import CallBlock, ReasoningParser, RequiredCalls, ToolParser, call_block
from quintet.parsers.registry import FROM_CHECKPOINT, REASONING_PARSERS, TOOL_PARSERS, detect, load_plugin, register
from quintet.parsers.stream_parser import StreamParser, parse

__all__ = [
    "FROM_CHECKPOINT",
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "CallBlock",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "RequiredCalls",
    "Content",
    "Event",
    "Parsed",
    "Reasoning",
    "ReasoningParser",
    "StreamParser",
    "Tool",
    "ToolCall",
    "ToolParser",
    "call_block",
    "detect",
    "gather",
    "load_plugin",
    "parse",
    "register",
]
