"""Talk with a model; with a PROMPT, print its answer and end, as Ollama's `run` does. Flags are those of `chat`."""

import argparse
import sys

from quintet.cli.commands import _engine as engine
from quintet.cli.commands import chat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_model_argument(parser)
    parser.add_argument("PROMPT", nargs="*", default=[], help="message to answer; piped text is one, too")
    chat.add_conversation_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answers one message, or reads messages until the input ends."""
    if arguments.PROMPT or sys.stdin.isatty():
        return chat.run(arguments, " ".join(arguments.PROMPT) or None)
    return chat.run(arguments, engine.prompt_from_stdin("run"))
