"""One message while it grows: the object that clients read, and the events that tell of it."""

from quintet.outputs import RequestOutput
from quintet.server.http.anthropic.shapes import MessageAnswer, MessageUsage, TextBlock
from quintet.server.http.errors import ApiError, anthropic_shape
from quintet.server.http.sse import event

_PING = event({"type": "ping"}, "ping")
_BLOCK_START = event({"type": "content_block_start", "index": 0, "content_block": TextBlock("")}, "content_block_start")
_BLOCK_STOP = event({"type": "content_block_stop", "index": 0}, "content_block_stop")
_STOP = event({"type": "message_stop"}, "message_stop")


class Reply:
    """Outputs go in, the message or its events come out. Source: Anthropic's API reference, "Streaming messages"."""

    def __init__(self, message_id: str, model: str, max_tokens: int) -> None:
        self._id, self._model, self._max_tokens = message_id, model, max_tokens
        self._tokens = 0
        self._begun = self._in_text = False
        self._last: RequestOutput | None = None

    def whole(self, output: RequestOutput) -> MessageAnswer:
        """The message, of the only output."""
        self._note(output)
        text = output.outputs[0].text
        answer = self._answer([TextBlock(text)] if text else [])
        answer.stop_reason, answer.stop_sequence = self._stop()
        return answer

    def take(self, output: RequestOutput) -> bytes:
        """The events of one output."""
        made = b""
        self._note(output)
        if not self._begun:
            self._begun = True
            made = event({"type": "message_start", "message": self._answer([])}, "message_start")
        text = output.outputs[0].text
        if not text:
            return made
        if not self._in_text:
            self._in_text = True
            made += _BLOCK_START + _PING
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        return made + event(delta, "content_block_delta")

    def end(self) -> bytes:
        """All outputs were taken."""
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = event({"type": "message_delta", "delta": delta, "usage": self._usage()}, "message_delta")
        return (_BLOCK_STOP if self._in_text else b"") + last + _STOP

    def _note(self, output: RequestOutput) -> None:
        self._last = output
        self._tokens += len(output.outputs[0].token_ids)

    def _answer(self, content: list[TextBlock]) -> MessageAnswer:
        return MessageAnswer(id=self._id, model=self._model, content=content, usage=self._usage())

    def _stop(self) -> tuple[str, str | None]:
        """Why it ended, and the stop sequence that ended it."""
        assert self._last is not None
        completion = self._last.outputs[0]
        if completion.finish_reason == "length":  # the context may end before max_tokens does
            return ("max_tokens" if self._tokens >= self._max_tokens else "model_context_window_exceeded"), None
        if isinstance(completion.stop_reason, str):
            return "stop_sequence", completion.stop_reason
        return "end_turn", None

    def _usage(self) -> MessageUsage:
        assert self._last is not None
        cached = self._last.num_cached_tokens
        return MessageUsage(
            input_tokens=len(self._last.prompt_token_ids) - cached,
            cache_read_input_tokens=cached,
            output_tokens=self._tokens,
        )


def broken_off(error: ApiError) -> bytes:
    """The event of a stream that fails."""
    return event(anthropic_shape(error), "error")
