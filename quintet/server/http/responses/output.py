"""Builds the output items of a response from parser events, and the stream events (steps) for them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from quintet.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from quintet.server.http.ids import new_id
from quintet.server.http.openai.logprobs import json_list
from quintet.server.http.responses.encrypted_content import seal
from quintet.server.http.responses.mcp.items import ApprovalCallBuilder, McpCallBuilder, ResponseEvent, ToolList
from quintet.server.http.responses.mcp.items import tool_list_events as listed_steps
from quintet.server.http.responses.protocol import (
    FunctionCall,
    Item,
    McpApprovalRequest,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from quintet.server.mcp.results import ToolResult


class _MessageBuilder:
    """A message that the model is writing."""

    def __init__(self) -> None:
        self.id = f"msg_{new_id()}"
        self._text: list[str] = []
        self._scores: list[bytes] = []  # as JSON

    def item(self, status: str) -> OutputMessage:
        has_content = status != "in_progress" or self._text
        return OutputMessage(id=self.id, status=status, content=[self._part()] if has_content else [])

    def start_events(self, where: dict[str, Any]) -> list[ResponseEvent]:
        return [ResponseEvent("content_part.added", {**where, "content_index": 0, "part": OutputText(text="")})]

    def delta_event(self, text: str, scores: list[bytes], where: dict[str, Any]) -> ResponseEvent:
        self._text.append(text)
        self._scores += scores
        return ResponseEvent(
            "output_text.delta", {**where, "content_index": 0, "delta": text, "logprobs": json_list(scores)}
        )

    def end_events(self, scores: list[bytes], where: dict[str, Any]) -> list[ResponseEvent]:
        """`scores`: log-probabilities of tokens that have no text, such as the stop token."""
        self._scores += scores
        part, where = self._part(), {**where, "content_index": 0}
        done = ResponseEvent("output_text.done", {**where, "text": part.text, "logprobs": part.logprobs})
        return [done, ResponseEvent("content_part.done", {**where, "part": part})]

    def _part(self) -> OutputText:
        return OutputText(text="".join(self._text), logprobs=json_list(self._scores))


class _ReasoningBuilder:
    """Reasoning that the model is writing. Clients know OpenAI's content_part events, not vLLM's reasoning_part."""

    def __init__(self, sealed: bool) -> None:
        self.id = f"rs_{new_id()}"
        self._sealed = sealed
        self._text: list[str] = []

    def item(self, status: str) -> ReasoningItem:
        text = "".join(self._text)
        content = [ReasoningText(text=text)] if text else []
        sealed = seal(text) if self._sealed and status != "in_progress" else None
        return ReasoningItem(id=self.id, status=status, content=content, encrypted_content=sealed)

    def start_events(self, where: dict[str, Any]) -> list[ResponseEvent]:
        return [ResponseEvent("content_part.added", {**where, "content_index": 0, "part": ReasoningText(text="")})]

    def delta_event(self, text: str, where: dict[str, Any]) -> ResponseEvent:
        self._text.append(text)
        return ResponseEvent("reasoning_text.delta", {**where, "content_index": 0, "delta": text})

    def end_events(self, where: dict[str, Any]) -> list[ResponseEvent]:
        part, where = ReasoningText(text="".join(self._text)), {**where, "content_index": 0}
        return [
            ResponseEvent("reasoning_text.done", {**where, "text": part.text}),
            ResponseEvent("content_part.done", {**where, "part": part}),
        ]


class _FunctionCallBuilder:
    """A function call that the model is writing."""

    def __init__(self, begin: CallBegin) -> None:
        self.id = f"fc_{new_id()}"
        self._call_id, self._name = begin.id or "", begin.name
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """Its arguments so far."""
        return "".join(self._text)

    def item(self, status: str) -> FunctionCall:
        return FunctionCall(id=self.id, status=status, call_id=self._call_id, name=self._name, arguments=self.text)

    def delta_event(self, text: str, where: dict[str, Any]) -> ResponseEvent:
        self._text.append(text)
        return ResponseEvent("function_call_arguments.delta", {**where, "delta": text})

    def end_events(self, where: dict[str, Any]) -> list[ResponseEvent]:
        return [ResponseEvent("function_call_arguments.done", {**where, "arguments": self.text})]


_ItemBuilder = _MessageBuilder | _ReasoningBuilder | _FunctionCallBuilder | McpCallBuilder


class OutputBuilder:
    """Converts parser events to output items, in the order of the events."""

    def __init__(
        self, sealed: bool = False, served: Mapping[str, str] | None = None, asks: Collection[str] = ()
    ) -> None:
        """`sealed`: reasoning has encrypted_content. `served`: labels of tool servers by tool name. `asks`: tools that
        need approval."""
        self._sealed, self._served, self._asks = sealed, served or {}, asks
        self._done: list[OutputItem] = []
        self._begun = 0  # place of the first item of this round
        self._open: _ItemBuilder | None = None
        self._asked: ApprovalCallBuilder | None = None  # is open instead
        self.waiting_calls: dict[int, McpCallBuilder] = {}  # output index -> a complete call to carry out
        self._held: list[bytes] = []  # log-probabilities of tokens without text so far

    @property
    def needs_client(self) -> bool:
        """True if this round called a tool that the client runs or must approve."""
        return any(isinstance(each, FunctionCall | McpApprovalRequest) for each in self._done[self._begun :])

    def begin_round(self) -> None:
        """Starts a new round, after the previous calls were carried out."""
        self._begun = len(self._done)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the items so far."""
        return tuple(each.id for each in (*self._done, *([] if self._open is None else [self._open])))

    def items(self, status: str) -> list[OutputItem]:
        """Returns the current items; `status` is used for the unfinished one."""
        return [*self._done, *([] if self._open is None else [self._open.item(status)])]

    def add_events(self, heard: Iterable[Event], scores: Sequence[bytes] = ()) -> list[ResponseEvent]:
        """Adds parser events. `scores`: log-probabilities of their tokens, for the open message or the next one."""
        self._held += scores
        steps: list[ResponseEvent] = []
        for event in heard:
            steps += self._told(event)
        return steps

    def add_tool_lists(self, lists: Iterable[ToolList]) -> list[ResponseEvent]:
        """Adds tool lists, before any other item."""
        steps: list[ResponseEvent] = []
        for each in lists:
            steps += listed_steps(item := each.item(), len(self._done))
            self._done.append(item)
        return steps

    def add_call(self, approved: Item) -> list[ResponseEvent]:
        """Adds a call that the request approved, before the model's output."""
        call = McpCallBuilder(approved["name"], approved["server_label"], approved["id"])
        steps = self._enter(call)
        return [*steps, call.delta_event(approved["arguments"], self._where(call)), *self._leave("completed")]

    def pause(self) -> list[ResponseEvent]:
        """Closes the open item at the end of a round."""
        return self._leave("completed")

    def add_result(self, place: int, result: ToolResult, status: str = "") -> list[ResponseEvent]:
        """Stores the result of a waiting call."""
        item, steps = self.waiting_calls.pop(place).result_events(result, status or _status(result), place)
        self._done[place] = item
        return steps

    def end(self, status: str) -> list[ResponseEvent]:
        """Ends the output. An empty answer becomes one empty message. Waiting calls are not carried out."""
        steps: list[ResponseEvent] = []
        for place in [*self.waiting_calls]:
            steps += self.add_result(place, ToolResult("the answer ended before this call", failed=True))
        if not self._done and self._open is None and self._asked is None:
            steps = self._enter(_MessageBuilder())
        return steps + self._leave(status)

    def _told(self, event: Event) -> list[ResponseEvent]:
        if isinstance(event, CallBegin):
            return self._leave("completed") + self._begin_call(event)
        if self._asked is not None and isinstance(event, CallArguments):
            self._asked.written.append(event.text)
            return []
        if isinstance(event, CallEnd):
            return self._leave("completed" if event.complete and self._is_readable() else "incomplete")
        if isinstance(event, CallArguments):
            assert isinstance(self._open, _FunctionCallBuilder | McpCallBuilder)
            return [self._open.delta_event(event.text, self._where(self._open))]
        return self._worded(event)

    def _begin_call(self, begin: CallBegin) -> list[ResponseEvent]:
        label = self._served.get(begin.name)
        if label is None:
            return self._enter(_FunctionCallBuilder(begin))
        if begin.name in self._asks:
            self._asked = ApprovalCallBuilder(begin.name, label)
            return []
        return self._enter(McpCallBuilder(begin.name, label))

    def _worded(self, event: Content | Reasoning) -> list[ResponseEvent]:
        steps = []
        if isinstance(event, Content):
            if not isinstance(self._open, _MessageBuilder):
                steps = self._leave("completed") + self._enter(_MessageBuilder())
            assert isinstance(self._open, _MessageBuilder)
            held, self._held = self._held, []
            return [*steps, self._open.delta_event(event.text, held, self._where(self._open))]
        if not isinstance(self._open, _ReasoningBuilder):
            steps = self._leave("completed") + self._enter(_ReasoningBuilder(self._sealed))
        assert isinstance(self._open, _ReasoningBuilder)
        return [*steps, self._open.delta_event(event.text, self._where(self._open))]

    def _enter(self, item: _ItemBuilder) -> list[ResponseEvent]:
        self._open = item
        added = ResponseEvent("output_item.added", {"output_index": len(self._done), "item": item.item("in_progress")})
        return [added] if isinstance(item, _FunctionCallBuilder) else [added, *item.start_events(self._where(item))]

    def _leave(self, status: str) -> list[ResponseEvent]:
        if self._asked is not None:
            asked, self._asked = self._asked, None
            return self._ask(asked, status)
        item, self._open = self._open, None
        if item is None:
            return []
        where = self._where(item)
        if isinstance(item, _MessageBuilder):
            held, self._held = self._held, []
            steps = item.end_events(held, where)
        else:
            steps = item.end_events(where)
        if isinstance(item, McpCallBuilder):
            return steps + self._kept(item, status)
        done = item.item(status)
        steps.append(ResponseEvent("output_item.done", {"output_index": len(self._done), "item": done}))
        self._done.append(done)
        return steps

    def _ask(self, asked: ApprovalCallBuilder, status: str) -> list[ResponseEvent]:
        """Adds an approval request; a malformed call becomes an incomplete mcp_call instead."""
        if status != "completed":
            call = McpCallBuilder(asked.name, asked.label)
            steps = self._enter(call)
            return [*steps, call.delta_event(asked.text, self._where(call)), *self._leave(status)]
        item = asked.item()
        where = {"output_index": len(self._done), "item": item}
        self._done.append(item)
        return [ResponseEvent("output_item.added", where), ResponseEvent("output_item.done", where)]

    def _is_readable(self) -> bool:
        """True if the arguments of the ending call decode: the grammar allows some invalid text or numbers."""
        call = self._open if self._asked is None else self._asked
        assert isinstance(call, _FunctionCallBuilder | McpCallBuilder | ApprovalCallBuilder)
        try:
            msgspec.json.decode(call.text or "{}")
        except (msgspec.DecodeError, RecursionError):
            return False
        return True

    def _kept(self, call: McpCallBuilder, status: str) -> list[ResponseEvent]:
        """Queues the call for execution, unless it is malformed."""
        place = len(self._done)
        self.waiting_calls[place] = call
        self._done.append(call.item("in_progress"))
        if status == "completed":
            return []
        return self.add_result(place, ToolResult("the call is broken, or was cut off", failed=True), "incomplete")

    def _where(self, item: _ItemBuilder) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._done)}


def _status(result: ToolResult) -> str:
    return "failed" if result.failed else "completed"
