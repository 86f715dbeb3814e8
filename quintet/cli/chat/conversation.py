"""One conversation in the terminal: what the typed lines do, and the calls that are run between."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from quintet.cli.chat.params import changed_params, with_param
from quintet.cli.chat.pictures import Content as MessageContent
from quintet.cli.chat.pictures import content_of, picture_part
from quintet.cli.chat.saved import read_messages, write_messages
from quintet.cli.chat.screen import Screen
from quintet.cli.commands import _engine as engine
from quintet.common.suggestions import unknown_name_error
from quintet.outputs import RequestOutput
from quintet.parsers import Content
from quintet.parsers.events import MessageBuilder

if TYPE_CHECKING:
    from quintet.cli.chat.permission import Toolbox

_HELP = """/help              this list
/clear             forget the conversation, keep the system message; also /reset
/retry             answer the last message again
/system [TEXT]     set the system message and start afresh; without TEXT, remove it
/set NAME VALUE    set a sampling parameter, such as temperature 0.7; alone, show those that are set
/image FILE        send a picture with the next message
/save FILE         write the conversation to a file (JSON)
/load FILE         go on with the conversation of such a file
/exit              leave; so do /bye and Ctrl-D
Lines between two \"\"\" are one message, and a line that ends with \\ goes on in the next.
Ctrl-C stops an answer, what has come of it stays."""


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
    pictures: list[dict[str, Any]] = field(default_factory=list)  # parts of the next message


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
            self.ask(text)
        return True

    def ask(self, text: str) -> bool:
        """Answers a message with the pictures that wait for it; they wait on if there is no answer."""
        pictures = self.options.pictures
        answered = self.answer(content_of(text, pictures))
        if answered:
            pictures.clear()
        return answered

    def _obey(self, text: str) -> bool:
        command, _, rest = text.partition(" ")
        if command in ("/exit", "/bye"):
            return False
        commands: dict[str, Callable[[str], str | None]] = {
            "/help": lambda _: _HELP, "/clear": self._clear, "/reset": self._clear, "/retry": self._retry,
            "/system": self._set_system, "/set": self._set, "/image": self._attach, "/save": self._save,
            "/load": self._load,
        }  # fmt: skip
        try:
            if command not in commands:
                raise ValueError(unknown_name_error("command", command, [*commands, "/exit", "/bye"]))
            if (shown := commands[command](rest.strip())) is not None:
                engine.print_stderr(shown)
        except ValueError as error:
            engine.print_stderr(str(error))
        return True

    def _clear(self, _: str) -> str | None:
        self.options.pictures.clear()
        self.begin(self.system)
        return "(a fresh conversation)" if self.interactive else None

    def _set_system(self, text: str) -> str | None:
        self.begin(text or None)
        return self._clear("")

    def _retry(self, _: str) -> None:
        asked = [place for place, each in enumerate(self.messages) if each["role"] == "user"]
        if not asked:
            raise ValueError("no message to answer again; type one")
        before, last = self.messages, self.messages[asked[-1]]
        self.messages = before[: asked[-1]]
        if not self.answer(last["content"]):
            self.messages = before

    def _set(self, words: str) -> str | None:
        name, _, value = words.removeprefix("parameter ").strip().partition(" ")  # Ollama: /set parameter NAME VALUE
        if not name:
            given = changed_params(self.params)
            return "\n".join(f"{each} {value}" for each, value in given.items()) or "no sampling parameter is set"
        self.params = with_param(self.params, name.replace("-", "_"), value.strip())
        return None

    def _attach(self, name: str) -> str:
        if not name:
            raise ValueError("no file: give one (/image picture.png)")
        self.options.pictures.append(picture_part(name))
        return f"({name} goes with the next message)"

    def _save(self, path: str) -> str:
        if not path:
            raise ValueError("no file: give one (/save talk.json)")
        write_messages(path, self.messages)
        return f"saved {len(self.messages)} messages to {path}"

    def _load(self, path: str) -> str:
        if not path:
            raise ValueError("no file: give one (/load talk.json)")
        self.messages = read_messages(path)
        first = self.messages[0] if self.messages else {}
        self.system = str(first["content"]) if first.get("role") == "system" else None
        return f"loaded {len(self.messages)} messages from {path}"

    def answer(self, content: MessageContent) -> bool:
        """Answers a message, with calls and their results between; False if there is no answer.

        A message without an answer is taken back, so that the next one can be answered.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        tools, rounds = self.options.tools, 0
        while (message := self._hear(messages)) is not None:
            messages = [*messages, message]
            if tools is None or not message.get("tool_calls"):
                self.messages = messages
                return True
            results, stopped = tools.run_calls(message)
            messages, rounds = [*messages, *results], rounds + 1
            if stopped and not self.interactive:
                raise KeyboardInterrupt
            if stopped or rounds >= self.options.rounds:
                self.messages = messages
                engine.print_stderr(
                    "[stopped]" if stopped else f"[stopped after {rounds} rounds of calls; --max-tool-rounds]"
                )
                return True
        return False

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
            engine.print_stderr(f"\nerror: {error}\n(/clear starts afresh)")
            return None
        screen.end()
        if self.interactive and not self.quiet:
            engine.print_stderr(f"[{speed}]")
        return heard.message()
