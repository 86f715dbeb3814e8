"""Talk with a model, here or on a server. /help lists what can be typed; Ctrl-C stops an answer, Ctrl-D leaves."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from quintet.cli.chat.conversation import ConversationOptions, TerminalConversation
from quintet.cli.chat.pictures import picture_part
from quintet.cli.commands import _engine as engine
from quintet.cli.commands import generate
from quintet.clients import server_address as target
from quintet.config.schema import flags
from quintet.sampling_params import SamplingParams

_PROMPT, _QUOTES = "> ", '"""'
_PARSERS = ("tool_call_parser", "reasoning_parser")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_model_argument(parser)
    add_conversation_arguments(parser)


def add_conversation_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a conversation, with its model or server."""
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="the system message")
    group.add_argument("--quiet", "-q", action="store_true", help="print no figures after an answer")
    group.add_argument(
        "--chat-template-kwargs", metavar="JSON", help="variables for the chat template: '{\"enable_thinking\": true}'"
    )
    generate.add_adapter_argument(group, "answers")
    generate.add_image_argument(group, "first message")
    _add_tool_arguments(parser.add_argument_group("tools"))
    target.add_arguments(parser)
    engine.add_sampling_arguments(
        parser, exclude=("n", "logprobs", "prompt_logprobs", "logprob_token_ids", "structured_outputs"), max_tokens=None
    )
    engine.add_arguments(parser, exclude=("seed",))


def _add_tool_arguments(group: Any) -> None:
    group.add_argument(
        "--tools", metavar="FILE",
        help="what the model may call: the functions of a .py file, or the programs that a .json, .yaml or .toml file "
        "names; each call is shown, and asked about before it runs",
    )  # fmt: skip
    group.add_argument(
        "--allow-tool", metavar="NAME", action="append", default=[], help="run this one unasked; may be repeated"
    )
    group.add_argument(
        "--max-tool-rounds", type=int, default=8, metavar="N", help="calls and results in a row, at most (%(default)s)"
    )
    group.add_argument("--tool-call-parser", metavar="NAME", help="how a model here writes calls, if it is not found")
    group.add_argument("--reasoning-parser", metavar="NAME", help="how it writes thoughts, if it is not found")


def run(arguments: argparse.Namespace, prompt: str | None = None) -> int:
    """Reads messages until the input ends; answers the prompt alone if there is one."""
    wanted = flags.given_settings(arguments, SamplingParams)
    SamplingParams(**{"max_tokens": None, **wanted})  # refuses before the model is loaded
    server = target.target(arguments)
    arguments.prompt = prompt
    return _remote(server, wanted, arguments) if server.is_given else _local(wanted, arguments)


def _local(wanted: dict[str, Any], arguments: argparse.Namespace) -> int:
    extras = _conversation_options(arguments)  # a wrong file is refused before the model is loaded
    extras.template |= _parsers(arguments)
    generate.check_adapter(arguments)
    llm = engine.open_engine(arguments, arguments.quiet)
    try:
        if (lora := generate.adapter_of(arguments)) is not None:
            llm.add_lora(lora)  # what is wrong with it ends the command, and not the first answer
            extras.template["lora_request"] = lora
        text_alone = not arguments.system and not arguments.image
        if arguments.prompt is not None and not llm.get_tokenizer().chat_template and text_alone:
            engine.print_stderr("the model has no chat template: the prompt is continued as text")
            arguments.chat = False
            params = engine.sampling_params(llm, wanted, max_tokens=generate.MAX_TOKENS)
            return generate.stream_one(llm, arguments.prompt, params, arguments)
        talk = TerminalConversation(
            llm, engine.sampling_params(llm, wanted, max_tokens=None), arguments.quiet, extras=extras
        )
        return _run_conversation(talk, llm.config.model, arguments)
    finally:
        llm.close()


def _parsers(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the parsers that are named; ValueError if one does not exist."""
    from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS

    named = {name: getattr(arguments, name) for name in _PARSERS if getattr(arguments, name) is not None}
    for registry, name in ((TOOL_PARSERS, "tool_call_parser"), (REASONING_PARSERS, "reasoning_parser")):
        if named.get(name, "none") != "none":
            registry.check(named[name])
    return named


def _remote(server: target.ServerTarget, wanted: dict[str, Any], arguments: argparse.Namespace) -> int:
    target.refuse_engine_flags(arguments, but=("model",))
    if arguments.lora_path:
        raise ValueError("--lora-path has no effect with a server; give the adapter's name there as --model")
    for name in _PARSERS:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with a server, which has its own; leave it out")

    from quintet.clients.remote_engine import RemoteEngine, ServerSpeed

    remote = RemoteEngine(server, engine.engine_settings(arguments).get("model"))
    talk = TerminalConversation(remote, wanted, arguments.quiet, ServerSpeed, _conversation_options(arguments))
    return _run_conversation(talk, f"{remote.model} at {server.display_name}", arguments)


def _conversation_options(arguments: argparse.Namespace) -> ConversationOptions:
    extras = ConversationOptions(rounds=arguments.max_tool_rounds)
    extras.pictures = [picture_part(each) for each in arguments.image]
    if extras.rounds < 1:
        raise ValueError(f"--max-tool-rounds must be 1 or more, not {extras.rounds}")
    if arguments.chat_template_kwargs is not None:
        with contextlib.suppress(ValueError):
            extras.template["chat_template_kwargs"] = json.loads(arguments.chat_template_kwargs)
        if not isinstance(extras.template.get("chat_template_kwargs"), dict):
            raise ValueError("--chat-template-kwargs must be a JSON object")
    if arguments.tools is None:
        if arguments.allow_tool:
            raise ValueError("--allow-tool has no effect without --tools; leave it out")
        return extras

    from quintet.cli.chat.permission import Toolbox
    from quintet.cli.chat.tool_files import read_tools

    ask = _ask_user if sys.stdin.isatty() else None
    extras.tools = Toolbox(read_tools(arguments.tools), arguments.allow_tool, engine.print_stderr, ask)
    extras.template["tools"] = extras.tools.specs
    return extras


def _ask_user(question: str) -> str:
    """Returns what the user types; Ctrl-D means no."""
    try:
        return input(question)
    except EOFError:
        engine.print_stderr("")
        return "no"


def _run_conversation(talk: TerminalConversation, name: str, arguments: argparse.Namespace) -> int:
    talk.begin(arguments.system)
    if arguments.prompt is not None:
        talk.interactive = False
        talk.ask(arguments.prompt)
        return 1 if talk.failed else 0
    if talk.interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
        engine.print_stderr(f"{name}: type a message, or /help")
    for line in _lines(talk.interactive):
        if not talk.handle_line(line):
            break
    return 1 if talk.failed and not talk.interactive else 0


def _lines(interactive: bool) -> Iterator[str]:
    """Yields messages: lines, joined where one ends with a backslash or stands between two \"\"\".

    Ctrl-C at the prompt clears what was typed.
    """
    parts: list[str] = []
    quoted = False
    while True:
        try:
            line = input(("... " if parts or quoted else _PROMPT) if interactive else "")
        except EOFError:
            if parts:
                yield "\n".join(parts)
            if interactive:
                engine.print_stderr("")
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            parts, quoted = [], False
            engine.print_stderr("\n(/exit or Ctrl-D leaves)")
            continue
        if not quoted and not parts and line.lstrip().startswith(_QUOTES):
            quoted, line = True, line.lstrip().removeprefix(_QUOTES)
        more = line.endswith("\\")
        if quoted:
            quoted = more = not line.rstrip().endswith(_QUOTES)
            line = line if more else line.rstrip().removesuffix(_QUOTES)
        elif more:
            line = line[:-1]
        parts.append(line)
        if not more:
            yield "\n".join(parts)
            parts = []
