"""Builds an answer from events as they arrive, and its message for a conversation."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quintet.parsers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning, ToolCall


@dataclass
class MessageBuilder:
    """An answer so far."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallBegin(_, name, call_id):
                    self.calls.append(ToolCall(name, "", call_id, complete=False))
                case CallArguments(index, text):
                    self.calls[index] = replace(self.calls[index], arguments=self.calls[index].arguments + text)
                case CallEnd(index, complete):
                    self.calls[index] = replace(self.calls[index], complete=complete)

    def message(self) -> dict[str, Any]:
        """Returns the message in OpenAI's format. Calls that broke off are left out: they cannot be answered."""
        whole = [each for each in self.calls if each.complete]
        message: dict[str, Any] = {"role": "assistant", "content": self.content if self.content or not whole else None}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if whole:
            message["tool_calls"] = [
                {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
                for each in whole
            ]
        return message
