"""What events add up to as they come, and the message that a conversation has of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quintet.parsers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning, ToolCall


@dataclass
class Heard:
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
        """As a conversation has it, in OpenAI's words. Calls that broke off are left out: nobody can answer them."""
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
