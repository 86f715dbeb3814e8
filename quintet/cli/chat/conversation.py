"""One conversation in the terminal: what the typed lines do, and the calls that are run between."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from quintet.cli.chat.screen import Screen
from quintet.cli.commands import _engine as engine
from quintet.common.suggestions import unknown_name_error
from quintet.outputs import RequestOutput
from quintet.parsers import Content
from quintet.parsers.message_builder import MessageBuilder

if TYPE_CHECKING:
    from quintet.cli.chat.permission import Toolbox

_HELP = """/help            this list
/reset           forget the conversation, keep the system message
/system [TEXT]   set the system message and start afresh; without TEXT, remove it
/exit            leave; so does Ctrl-D
A line that ends with \\ goes on in the next. Ctrl-C stops an answer, what has come of it stays."""
_COMMANDS = ("/help", "/reset", "/system", "/exit")


class ConversationModel(Protocol):
    """Source of answers: an LLM in this process, or a server. `params` are sampling parameters that it understands."""

    @property
    def stream_chat(self) -> Callable[..., Iterator[RequestOutput]]:
        """(messages, params, **template) -> deltas of one answer.

        Closing the iterator ends the work on it; ValueError where there is no answer.
        """


@dataclass
class ConversationOptions:
    """Settings of a conversation besides its messages."""

    template: dict[str, Any] = field(default_factory=dict)  # keyword arguments of stream_chat
    tools: "Toolbox | None" = None
    rounds: int = 8  # of calls and results in a row


class TerminalConversation:
    """One conversation: its messages, and what the lines that are typed do to it."""

    def __init__(
        self,
        speaker: ConversationModel,
        params: Any,
        quiet: bool = False,
        speed: Callable[[], engine.TokenSpeed] = engine.TokenSpeed,
        extras: ConversationOptions | None = None,
    ) -> None:
        self.model = speaker
        self.params = params
        self.quiet = quiet
        self.speed = speed
        self.options = extras or ConversationOptions()
        self.interactive = sys.stdin.isatty()
        self.failed = False
        self.system: str | None = None
        self.messages: list[dict[str, Any]] = []

    def begin(self, system: str | None) -> None:
        """Clears the messages and starts with this system prompt."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def handle_line(self, line: str) -> bool:
        """Takes one line; False when it was the last."""
        text = line.strip()
        if text.startswith("/"):
            return self._obey(text)
        if text:
            self._answer(text)
        return True

    def _obey(self, text: str) -> bool:
        command, _, rest = text.partition(" ")
        if command == "/exit":
            return False
        if command == "/help":
            engine.print_stderr(_HELP)
        elif command == "/reset":
            self.begin(self.system)
        elif command == "/system":
            self.begin(rest.strip() or None)
        else:
            engine.print_stderr(unknown_name_error("command", command, _COMMANDS))
        if command in ("/reset", "/system") and self.interactive:
            engine.print_stderr("(a fresh conversation)")
        return True

    def _answer(self, text: str) -> None:
        """Has it answered, with calls and their results between. What cannot be answered is taken back, so that the
        next message can be."""
        messages = [*self.messages, {"role": "user", "content": text}]
        tools, rounds = self.options.tools, 0
        while (message := self._hear(messages)) is not None:
            messages = [*messages, message]
            if tools is None or not message.get("tool_calls"):
                self.messages = messages
                return
            results, stopped = tools.run_calls(message)
            messages, rounds = [*messages, *results], rounds + 1
            if stopped and not self.interactive:
                raise KeyboardInterrupt
            if stopped or rounds >= self.options.rounds:
                self.messages = messages
                engine.print_stderr(
                    "[stopped]" if stopped else f"[stopped after {rounds} rounds of calls; --max-tool-rounds]"
                )
                return

    def _hear(self, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Streams one answer -> its message; None if there is none."""
        speed, screen, heard = self.speed(), Screen(self.quiet), MessageBuilder()
        try:
            # Closed at once when interrupted, so that the engine stops working on it.
            answer = self.model.stream_chat(messages, self.params, **self.options.template)
            with contextlib.closing(speed.watch(answer)) as outputs:
                for output in outputs:
                    heard.take(output.outputs[0].events)
                    screen.show(output.outputs[0].events)
                    if output.outputs[0].error:
                        raise ValueError(output.outputs[0].error)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            heard.calls.clear()
            screen.show([Content(" [stopped]")])
        except ValueError as error:  # too long, refused by the template, or the server is gone
            self.failed = True
            engine.print_stderr(f"\nerror: {error}\n(/reset starts afresh)")
            return None
        screen.end()
        if self.interactive and not self.quiet:
            engine.print_stderr(f"[{speed}]")
        return heard.message()
