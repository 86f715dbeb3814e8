"""The `quintet` command: finds the sub-command, loads it alone, and turns failures into messages and exit codes."""

import atexit
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quintet.cli.common_flags import COMMON_FLAGS
from quintet.common.interrupts import repeated_interrupts
from quintet.common.subprocess_python import leave_working_directory
from quintet.common.tools_package import MISSING, MODULE, has_tools

EXIT_USER, EXIT_USAGE, EXIT_INTERRUPT = 1, 2, 130


@dataclass(frozen=True)
class CliCommand:
    """Command's module, and its help in the list. The module is imported when the command is called, not before."""

    module: str
    help: str
    log_level: str = "WARNING"  # unless QUINTET_LOG_LEVEL says otherwise


_HOME = "quintet.cli.commands."
COMMANDS = {
    "run": CliCommand(_HOME + "run", "talk with a model, or have it answer one prompt"),
    "chat": CliCommand(_HOME + "chat", "talk with a model, here or on a server"),
    "generate": CliCommand(_HOME + "generate", "continue prompts, given as arguments or on standard input"),
    "serve": CliCommand(_HOME + "serve", "serve a model over HTTP, as OpenAI's API does", "INFO"),
    "pull": CliCommand(_HOME + "pull", "download a model of the hub"),
    "list": CliCommand(_HOME + "list_models", "list the models on this machine; also `ls`"),
    "show": CliCommand(_HOME + "show", "show a model's size, context and quantization, and whether it fits"),
    "rm": CliCommand(_HOME + "rm", "remove a downloaded model"),
    "ps": CliCommand(_HOME + "ps", "list the models that a server of several has loaded"),
    "stop": CliCommand(_HOME + "stop", "unload a model of a server of several"),
    "embed": CliCommand(_HOME + "embed", "make vectors of texts, given as arguments or in a file"),
    "rerank": CliCommand(_HOME + "rerank", "order the texts of a file by how well they go with a query"),
    "transcribe": CliCommand(_HOME + "transcribe", "transcribe or translate audio files, with Whisper or Moonshine"),
    "complete": CliCommand(_HOME + "complete", "continue a prompt on a server"),
    "run-batch": CliCommand(_HOME + "run_batch", "answer a file of requests in OpenAI's batch format"),
    "router": CliCommand(_HOME + "router", "stand before several servers as one", "INFO"),
    "platforms": CliCommand(_HOME + "platforms", "list the platforms, with their facts or why they cannot run here"),
    "explain": CliCommand(_HOME + "explain", "show what would run a model here, and what was rejected"),
    "try": CliCommand(_HOME + "try_model", "compare a small random copy of a model with transformers", "ERROR"),
    "verify": CliCommand(_HOME + "verify", "compare log-probabilities with a server, a trainer, or transformers"),
    "conformance": CliCommand(_HOME + "conformance", "prove that a platform keeps the contract", "ERROR"),
    "new-platform": CliCommand(_HOME + "new_platform", "write the package of a platform of your own, to start from"),
    "quantize": CliCommand(_HOME + "quantize", "write a quantized checkpoint, and say what it costs"),
    "merge-lora": CliCommand(_HOME + "merge_lora", "write a checkpoint with a LoRA adapter merged into its base model"),
    "bench latency": CliCommand(_HOME + "bench_latency", "time one batch of requests"),
    "bench throughput": CliCommand(_HOME + "bench_throughput", "time many requests at once"),
    "bench serve": CliCommand(_HOME + "bench_serve", "put a load on a server and time its answers"),
    "bench simulate": CliCommand("quintet_tools.simulate.command", "play a load on engines that are not there"),
    "collect-env": CliCommand(_HOME + "collect_env", "print what a bug report needs"),
}
ALIASES = {"ls": "list"}
_ENVIRONMENT = "environment"  # a topic of `quintet help`


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. 0: done, 1: it failed, 2: it was called wrongly, 130: interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    place = int(words[:1] == ["help"])
    words[place : place + 1] = [ALIASES.get(word, word) for word in words[place : place + 1]]
    try:
        with repeated_interrupts():
            name = _name(words)
            return _usage(words) if name is None else _run(name, words[len(name.split()) :])
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_USER
    finally:  # behind what the command has registered, so that it runs before
        atexit.unregister(_end_quickly)
        atexit.register(_end_quickly)


def _end_quickly() -> None:
    """Ends the process without a look for garbage, which would walk all of torch for 0.1 s, and in spite of Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()


def _name(words: list[str]) -> str | None:
    """The longest command that the words begin with."""
    for length in (2, 1):
        if " ".join(words[:length]) in COMMANDS and len(words) >= length:
            return " ".join(words[:length])
    return None


def _usage(words: list[str]) -> int:
    from quintet import __version__
    from quintet.config.schema.unsupported import COMMANDS as COMMAND_HINTS

    if words[:1] == ["help"] and (name := _name(words[1:])):
        topic = words[1 + len(name.split()) :]
        return _run(name, [f"--help={topic[0]}" if topic else "--help"])
    if words[:1] == ["help"] and words[1:]:
        words = [*words[1:], "--help"]
    if words == [_ENVIRONMENT, "--help"]:
        print("\n".join(_variables()))
        return 0
    group = words[0] if words and any(name.startswith(words[0] + " ") for name in COMMANDS) else ""
    rest = words[1:] if group else words
    if not rest or rest[0] in ("-h", "--help", "help"):
        print(_listing(group))
        return 0 if rest or not words else EXIT_USAGE
    if not group and rest[0] in COMMAND_HINTS:
        print(f"quintet: error: there is no command {rest[0]!r}: {COMMAND_HINTS[rest[0]]}", file=sys.stderr)
        return EXIT_USAGE
    if rest[0] in ("-V", "--version", "version"):
        print(f"quintet {__version__}")
        return 0
    return _unknown(group, rest[0])


def _unknown(group: str, word: str) -> int:
    from quintet.common.suggestions import unknown_name_error

    names = {name.removeprefix(group).split()[0] for name in COMMANDS if name.startswith(group)}
    if word.startswith("-"):
        message = unknown_name_error("flag", word, ["--help", "--version"])
    else:
        message = unknown_name_error("command", word, names)
    print(f"quintet: error: {message}\n`{f'quintet {group}'.strip()} --help` lists what there is.", file=sys.stderr)
    return EXIT_USAGE


def _listing(group: str) -> str:
    shown = {name: command for name, command in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, shown))
    lines = [f"  {name:{width}}  {command.help}" for name, command in shown.items()]
    return "\n".join(
        [
            f"usage: quintet {group or 'COMMAND'} [--help] ...",
            "" if group else "\nRuns language models on any accelerator.\n",
            *lines,
            "",
            f"`quintet help COMMAND` shows its flags, `quintet help {_ENVIRONMENT}` the environment variables.",
        ]
    )


def _variables() -> list[str]:
    from quintet.config import Environment

    return [
        "environment variables, for what no flag says:",
        *(f"  {name:17}  {help}" for name, help in Environment.descriptions().items()),
    ]


def _run(name: str, words: list[str]) -> int:
    from argparse import Namespace

    from quintet.common.logging_setup import install_terminal_log
    from quintet.config import read_environment
    from quintet.config.schema.error_names import NameTranslation
    from quintet.config.schema.flags import Parser

    command = COMMANDS[name]
    debug, arguments = False, Namespace(wording=NameTranslation())
    try:
        environment = read_environment()
        debug = environment.log_level == "DEBUG"
        install_terminal_log(environment.log_level or command.log_level)
        if command.module.startswith(MODULE) and not has_tools():
            raise ValueError(MISSING)
        module: Any = importlib.import_module(command.module)
        parser = Parser(COMMON_FLAGS.get(name, ()), prog=f"quintet {name}", description=module.__doc__)
        module.add_arguments(parser)
        arguments = parser.parse(words)
        return int(module.run(arguments))
    except BrokenPipeError:
        raise
    except (ValueError, OSError, MemoryError) as error:  # what the user can mend; anything else is our bug
        if debug:
            raise
        print(f"quintet {name}: error: {arguments.wording(_message(error))}", file=sys.stderr)
        return EXIT_USER


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__


if __name__ == "__main__":
    leave_working_directory()
    sys.exit(main())
