"""Talk with a model; with a PROMPT, print its answer and end, as Ollama's `run` does. Flags are those of `chat`."""

import argparse
import sys

from quintet.cli.commands import _engine as engine
from quintet.cli.commands import chat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "PROMPT", metavar="[MODEL] PROMPT", nargs="*", default=[],
        help="message to answer; piped text is one, too. A first word without a space is the model (a file, a folder, "
        "OWNER/NAME, OWNER/NAME:QUANTIZATION, bundled); with --model, or after --, all are the message",
    )  # fmt: skip
    chat.add_conversation_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answers one message, or reads messages until the input ends."""
    arguments.PROMPT = engine.take_first_as_model(arguments, arguments.PROMPT)
    if arguments.PROMPT or sys.stdin.isatty():
        return chat.run(arguments, " ".join(arguments.PROMPT) or None)
    return chat.run(arguments, engine.prompt_from_stdin("run"))
