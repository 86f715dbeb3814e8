"""What an answer is made of while it grows: its items, and the steps in which a stream tells of them."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from quintet.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from quintet.server.http.ids import new_id
from quintet.server.http.logprobs import listed
from quintet.server.http.responses.seal import seal
from quintet.server.http.responses.shapes import (
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)


class Step(NamedTuple):
    """An event without its number. Source: OpenAI's API reference, "Streaming events"."""

    kind: str  # without "response."
    fields: dict[str, Any]


class _Words:
    """A message that is being said."""

    def __init__(self) -> None:
        self.id = f"msg_{new_id()}"
        self._text: list[str] = []
        self._scores: list[bytes] = []  # as JSON

    def item(self, status: str) -> OutputMessage:
        said = status != "in_progress" or self._text
        return OutputMessage(id=self.id, status=status, content=[self._part()] if said else [])

    def begun(self, where: dict[str, Any]) -> list[Step]:
        return [Step("content_part.added", {**where, "content_index": 0, "part": OutputText(text="")})]

    def more(self, text: str, scores: list[bytes], where: dict[str, Any]) -> Step:
        self._text.append(text)
        self._scores += scores
        return Step("output_text.delta", {**where, "content_index": 0, "delta": text, "logprobs": listed(scores)})

    def ended(self, scores: list[bytes], where: dict[str, Any]) -> list[Step]:
        """`scores`: of tokens without text of their own, such as the one that ended it."""
        self._scores += scores
        part, where = self._part(), {**where, "content_index": 0}
        done = Step("output_text.done", {**where, "text": part.text, "logprobs": part.logprobs})
        return [done, Step("content_part.done", {**where, "part": part})]

    def _part(self) -> OutputText:
        return OutputText(text="".join(self._text), logprobs=listed(self._scores))


class _Thought:
    """A thought that is being thought. The part's events are OpenAI's, not vLLM's reasoning_part: clients know them."""

    def __init__(self, sealed: bool) -> None:
        self.id = f"rs_{new_id()}"
        self._sealed = sealed
        self._text: list[str] = []

    def item(self, status: str) -> ReasoningItem:
        text = "".join(self._text)
        content = [ReasoningText(text=text)] if text else []
        sealed = seal(text) if self._sealed and status != "in_progress" else None
        return ReasoningItem(id=self.id, status=status, content=content, encrypted_content=sealed)

    def begun(self, where: dict[str, Any]) -> list[Step]:
        return [Step("content_part.added", {**where, "content_index": 0, "part": ReasoningText(text="")})]

    def more(self, text: str, where: dict[str, Any]) -> Step:
        self._text.append(text)
        return Step("reasoning_text.delta", {**where, "content_index": 0, "delta": text})

    def ended(self, where: dict[str, Any]) -> list[Step]:
        part, where = ReasoningText(text="".join(self._text)), {**where, "content_index": 0}
        return [
            Step("reasoning_text.done", {**where, "text": part.text}),
            Step("content_part.done", {**where, "part": part}),
        ]


class _Call:
    """A call that is being written."""

    def __init__(self, begin: CallBegin) -> None:
        self.id = f"fc_{new_id()}"
        self._call_id, self._name = begin.id or "", begin.name
        self._text: list[str] = []

    def item(self, status: str) -> FunctionCall:
        return FunctionCall(
            id=self.id, status=status, call_id=self._call_id, name=self._name, arguments="".join(self._text)
        )

    def more(self, text: str, where: dict[str, Any]) -> Step:
        self._text.append(text)
        return Step("function_call_arguments.delta", {**where, "delta": text})

    def ended(self, where: dict[str, Any]) -> list[Step]:
        return [Step("function_call_arguments.done", {**where, "arguments": "".join(self._text)})]


class Output:
    """Takes what a model was heard to say; its items stand in the order in which they were said."""

    def __init__(self, sealed: bool = False) -> None:
        """`sealed`: thoughts have encrypted_content."""
        self._sealed = sealed
        self._done: list[OutputItem] = []
        self._open: _Words | _Thought | _Call | None = None
        self._held: list[bytes] = []  # log-probabilities of tokens whose text has not come out yet

    @property
    def ids(self) -> tuple[str, ...]:
        """Of the items so far."""
        return tuple(each.id for each in (*self._done, *([] if self._open is None else [self._open])))

    def items(self, status: str) -> list[OutputItem]:
        """As they are now; `status` is that of one which is not done."""
        return [*self._done, *([] if self._open is None else [self._open.item(status)])]

    def take(self, heard: Iterable[Event], scores: Sequence[bytes] = ()) -> list[Step]:
        """What comes next. `scores`, of all its tokens, go to the message that is said, or to the next one."""
        self._held += scores
        steps: list[Step] = []
        for event in heard:
            steps += self._told(event)
        return steps

    def end(self, status: str) -> list[Step]:
        """All was taken. An answer of nothing is a message that says nothing."""
        steps = []
        if not self._done and self._open is None:
            steps = self._enter(_Words())
        return steps + self._leave(status)

    def _told(self, event: Event) -> list[Step]:
        if isinstance(event, CallBegin):
            return self._leave("completed") + self._enter(_Call(event))
        if isinstance(event, CallEnd):
            return self._leave("completed" if event.complete else "incomplete")
        if isinstance(event, CallArguments):
            assert isinstance(self._open, _Call)
            return [self._open.more(event.text, self._where(self._open))]
        return self._worded(event)

    def _worded(self, event: Content | Reasoning) -> list[Step]:
        steps = []
        if isinstance(event, Content):
            if not isinstance(self._open, _Words):
                steps = self._leave("completed") + self._enter(_Words())
            assert isinstance(self._open, _Words)
            held, self._held = self._held, []
            return [*steps, self._open.more(event.text, held, self._where(self._open))]
        if not isinstance(self._open, _Thought):
            steps = self._leave("completed") + self._enter(_Thought(self._sealed))
        assert isinstance(self._open, _Thought)
        return [*steps, self._open.more(event.text, self._where(self._open))]

    def _enter(self, item: _Words | _Thought | _Call) -> list[Step]:
        self._open = item
        added = Step("output_item.added", {"output_index": len(self._done), "item": item.item("in_progress")})
        return [added] if isinstance(item, _Call) else [added, *item.begun(self._where(item))]

    def _leave(self, status: str) -> list[Step]:
        item, self._open = self._open, None
        if item is None:
            return []
        where = self._where(item)
        if isinstance(item, _Words):
            held, self._held = self._held, []
            steps = item.ended(held, where)
        else:
            steps = item.ended(where)
        done = item.item(status)
        steps.append(Step("output_item.done", {"output_index": len(self._done), "item": done}))
        self._done.append(done)
        return steps

    def _where(self, item: _Words | _Thought | _Call) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._done)}
