"""Builds a message from engine outputs: the message object, or its stream events."""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import UNSET

from quintet.chat.output_parser import OutputParser, is_cut_off
from quintet.outputs import RequestOutput
from quintet.parsers import CallArguments, CallBegin, Content, Event, Reasoning, gather
from quintet.server.http.anthropic.protocol import (
    Block,
    ContextManagement,
    MessageAnswer,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from quintet.server.http.anthropic.request import CreateMessage
from quintet.server.http.cooperative import CooperativeWork
from quintet.server.http.errors import ApiError, anthropic_shape
from quintet.server.http.openai.messages import arguments_object, parse_all
from quintet.server.http.sse import event

_PING = event({"type": "ping"}, "ping")
_STOP = event({"type": "message_stop"}, "message_stop")


class AnthropicReply:
    """Converts outputs to a message or its stream events. Source: Anthropic's API reference, "Streaming messages"."""

    def __init__(
        self, message_id: str, body: CreateMessage, model: str, speech: OutputParser, turns: CooperativeWork
    ) -> None:
        self._id, self._model, self._max_tokens, self._speech = message_id, model, body.max_tokens, speech
        self._turns, self._edited = turns, UNSET if body.context_management is None else ContextManagement([])
        self._tokens = 0
        self._begun = False
        self._block = -1  # index of the last block that has begun
        self._within: type[Block] | None = None  # type of the open block
        self._last: RequestOutput | None = None

    async def message(self, output: RequestOutput) -> MessageAnswer:
        """Returns the message of a non-streamed answer, from its only output."""
        self._note(output)
        [last] = output.outputs
        events = await parse_all(self._speech, last.text, self._turns, is_cut_off(last))
        answer = self._answer(blocks_of(events))
        answer.stop_reason, answer.stop_sequence = self._stop()
        answer.context_management = self._edited
        return answer

    def add_output(self, output: RequestOutput) -> bytes:
        """Returns the events of one output."""
        made = b""
        self._note(output)
        if not self._begun:
            self._begun = True
            made = event({"type": "message_start", "message": self._answer([])}, "message_start")
        last = output.outputs[0]
        heard = self._speech.feed(last.text, last.finish_reason is not None, is_cut_off(last))
        return made + b"".join(part for each in heard for part in self._told(each))

    def end(self) -> bytes:
        """Returns the last events, after all outputs."""
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        message_delta = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        if self._edited is not UNSET:
            message_delta["context_management"] = self._edited
        last = event(message_delta, "message_delta")
        return b"".join(self._leave()) + last + _STOP

    def _told(self, heard: Event) -> Iterator[bytes]:
        if isinstance(heard, Content):
            yield from self._enter(TextBlock(""))
            yield self._delta({"type": "text_delta", "text": heard.text})
        elif isinstance(heard, Reasoning):
            yield from self._enter(ThinkingBlock(""))
            yield self._delta({"type": "thinking_delta", "thinking": heard.text})
        elif isinstance(heard, CallBegin):
            yield from self._leave()
            yield from self._enter(ToolUseBlock(heard.id or "", heard.name, {}))
        elif isinstance(heard, CallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": heard.text})
        else:
            yield from self._leave()

    def _enter(self, block: Block) -> Iterator[bytes]:
        """Begins the block, unless the one that is open is of its type."""
        if self._within is type(block):
            return
        yield from self._leave()
        self._within, self._block = type(block), self._block + 1
        began = {"type": "content_block_start", "index": self._block, "content_block": block}
        yield event(began, "content_block_start")
        if self._block == 0:
            yield _PING

    def _leave(self) -> Iterator[bytes]:
        if self._within is not None:
            self._within = None
            yield event({"type": "content_block_stop", "index": self._block}, "content_block_stop")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._block, "delta": delta}, "content_block_delta")

    def _note(self, output: RequestOutput) -> None:
        self._last = output
        self._tokens += len(output.outputs[0].token_ids)

    def _answer(self, content: list[Block]) -> MessageAnswer:
        return MessageAnswer(id=self._id, model=self._model, content=content, usage=self._usage())

    def _stop(self) -> tuple[str, str | None]:
        """Returns the stop reason and the matched stop sequence, if any."""
        assert self._last is not None
        completion = self._last.outputs[0]
        if completion.finish_reason == "length":  # the context may end before max_tokens does
            return ("max_tokens" if self._tokens >= self._max_tokens else "model_context_window_exceeded"), None
        if isinstance(completion.stop_reason, str):
            return "stop_sequence", completion.stop_reason
        return ("tool_use" if self._speech.calls else "end_turn"), None

    def _usage(self) -> MessageUsage:
        assert self._last is not None
        cached = self._last.num_cached_tokens
        return MessageUsage(
            input_tokens=len(self._last.prompt_token_ids) - cached,
            cache_read_input_tokens=cached,
            output_tokens=self._tokens,
        )


def blocks_of(events: Sequence[Event]) -> list[Block]:
    """Returns the blocks of a whole answer in Anthropic's order: thinking, text, tool use."""
    found = gather(events)
    blocks: list[Block] = [ThinkingBlock(found.reasoning)] if found.reasoning else []
    blocks += [TextBlock(found.content)] if found.content else []
    return blocks + [ToolUseBlock(call.id or "", call.name, arguments_object(call.arguments)) for call in found.calls]


def stream_error(error: ApiError) -> bytes:
    """Returns the error event of a stream that failed."""
    return event(anthropic_shape(error), "error")
