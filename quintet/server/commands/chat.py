"""Talk with a model, here or on a server. /help lists what can be typed; Ctrl-C stops an answer, Ctrl-D leaves."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from quintet.names import unknown
from quintet.outputs import RequestOutput
from quintet.sampling_params import SamplingParams
from quintet.server import flags
from quintet.server.clients import target
from quintet.server.commands import engine

_HELP = """/help            this list
/reset           forget the conversation, keep the system message
/system [TEXT]   set the system message and start afresh; without TEXT, remove it
/exit            leave; so does Ctrl-D
A line that ends with \\ goes on in the next. Ctrl-C stops an answer, what has come of it stays."""
_COMMANDS = ("/help", "/reset", "/system", "/exit")
_PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="the system message")
    group.add_argument("--quiet", "-q", action="store_true", help="print no figures after an answer")
    target.add_arguments(parser)
    engine.add_sampling_arguments(
        parser, exclude=("n", "logprobs", "prompt_logprobs", "logprob_token_ids", "structured_outputs"), max_tokens=None
    )
    engine.add_arguments(parser, exclude=("seed",))


def run(arguments: argparse.Namespace) -> int:
    """Reads messages until the input ends."""
    wanted = flags.given(arguments, SamplingParams)
    SamplingParams(**{"max_tokens": None, **wanted})  # refuses before the model is loaded
    server = target.target(arguments)
    return _remote(server, wanted, arguments) if server.given else _local(wanted, arguments)


def _local(wanted: dict[str, Any], arguments: argparse.Namespace) -> int:
    llm = engine.open_engine(arguments, arguments.quiet)
    try:
        talk = Talk(llm, engine.sampling(llm, wanted, max_tokens=None), arguments.quiet)
        return _converse(talk, llm.config.model, arguments.system)
    finally:
        llm.close()


def _remote(server: target.Target, wanted: dict[str, Any], arguments: argparse.Namespace) -> int:
    target.refuse_engine_flags(arguments, but=("model",))

    from quintet.server.clients.remote import Remote, Speed

    remote = Remote(server, engine.given(arguments).get("model"))
    talk = Talk(remote, wanted, arguments.quiet, Speed)
    return _converse(talk, f"{remote.model} at {server.where}", arguments.system)


def _converse(talk: "Talk", name: str, system: str | None) -> int:
    talk.begin(system)
    if talk.interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
        engine.say(f"{name}: type a message, or /help")
    for line in _lines(talk.interactive):
        if not talk.hear(line):
            break
    return 1 if talk.failed and not talk.interactive else 0


def _lines(interactive: bool) -> Iterator[str]:
    """What the user types, line by line. Ctrl-C at the prompt clears the line."""
    held = ""
    while True:
        try:
            line = input(("... " if held else _PROMPT) if interactive else "")
        except EOFError:
            if held:
                yield held
            if interactive:
                engine.say("")
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            held = ""
            engine.say("\n(/exit or Ctrl-D leaves)")
            continue
        if line.endswith("\\"):
            held += line[:-1] + "\n"
            continue
        yield held + line
        held = ""


class Speaker(Protocol):
    """Who answers: an LLM here, or a server somewhere. `params` are what it understands as such."""

    def stream_chat(self, messages: Any, params: Any, /) -> Iterator[RequestOutput]:
        """Deltas of one answer. Closing the iterator ends the work on it; ValueError where there is no answer."""


class Talk:
    """One conversation: its messages, and what the lines that are typed do to it."""

    def __init__(
        self, speaker: Speaker, params: Any, quiet: bool = False, speed: Callable[[], engine.Speed] = engine.Speed
    ) -> None:
        self.speaker = speaker
        self.params = params
        self.quiet = quiet
        self.speed = speed
        self.interactive = sys.stdin.isatty()
        self.failed = False
        self.system: str | None = None
        self.messages: list[dict[str, str]] = []

    def begin(self, system: str | None) -> None:
        """Forgets what was said."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def hear(self, line: str) -> bool:
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
            engine.say(_HELP)
        elif command == "/reset":
            self.begin(self.system)
        elif command == "/system":
            self.begin(rest.strip() or None)
        else:
            engine.say(unknown("command", command, _COMMANDS))
        if command in ("/reset", "/system") and self.interactive:
            engine.say("(a fresh conversation)")
        return True

    def _answer(self, text: str) -> None:
        """Streams one answer. What cannot be answered is taken back, so that the next message can be."""
        messages = [*self.messages, {"role": "user", "content": text}]
        speed, said = self.speed(), ""
        try:
            # Closed at once when interrupted, so that the engine stops working on it.
            with contextlib.closing(speed.watch(self.speaker.stream_chat(messages, self.params))) as outputs:
                for output in outputs:
                    said += output.outputs[0].text
                    sys.stdout.write(output.outputs[0].text)
                    sys.stdout.flush()
                    if output.outputs[0].error:
                        raise ValueError(output.outputs[0].error)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            sys.stdout.write(" [stopped]")
        except ValueError as error:  # too long, refused by the template, or the server is gone
            self.failed = True
            engine.say(f"\nerror: {error}\n(/reset starts afresh)")
            return
        print(flush=True)
        self.messages = [*messages, {"role": "assistant", "content": said}]
        if self.interactive and not self.quiet:
            engine.say(f"[{speed}]")
