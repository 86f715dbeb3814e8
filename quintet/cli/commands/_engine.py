"""Shared parts of the commands that run a model: the engine's flags, sampling flags, opening and timing."""

import argparse
import dataclasses
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.clients.token_speed import TokenSpeed as TokenSpeed
from quintet.common.suggestions import unknown_name_error
from quintet.common.terminal import print_stderr as print_stderr
from quintet.config import BUNDLED, INSIDE, EngineConfig, read_environment
from quintet.config.schema import flags
from quintet.hub.model_names import HUB_ID, is_local, is_model_name, is_only_model_name
from quintet.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quintet import LLM

# Commands print text: token ids alone, and how streamed outputs are cut, are for programs.
_NO_FLAG = (
    "detokenize", "output_kind", "extra_args", "repetition_detection", "stream_interval", "flat_logprobs",
    "trace_decode_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start", "routed_experts_prompt_start",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser, exclude: Collection[str] = (), **defaults: Any) -> None:
    """The engine's flags; `defaults` are those of the command, for the help."""
    flags.add_arguments(parser, EngineConfig, ("skip_tokenizer_init", *exclude), defaults=defaults)


def add_sampling_arguments(parser: argparse.ArgumentParser, exclude: Collection[str] = (), **defaults: Any) -> None:
    """The sampling flags. A command that has them leaves out the engine's own --seed: one is enough."""
    flags.add_arguments(parser, SamplingParams, (*_NO_FLAG, *exclude), "this request", defaults)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The optional MODEL, before other positional arguments."""
    parser.add_argument("MODEL", nargs="?", help="folder, hub id or GGUF file, instead of --model")


def take_model(arguments: argparse.Namespace, words: list[str], has_text: bool = False) -> list[str]:
    """Sets arguments.MODEL to the first word, if that names a model; returns the other words.

    With --model all words are texts, and so are those after "--". A word such as "and/or" is the text if no other text
    follows, is piped in, or is there by another flag (`has_text`). ValueError: a bundled model that is not there.
    """
    arguments.MODEL = None
    given = "model" in flags.given_settings(arguments, EngineConfig)
    if given or len(words) == len(arguments.after_dashes):
        return words
    if words[0].startswith(f"{BUNDLED}-") and " " not in words[0] and words[0] not in INSIDE:
        raise ValueError(f"{unknown_name_error('bundled model', words[0], INSIDE)}; if it is text, put it after --")
    absent = len(words) > 1 and words[0].startswith(("/", "./", "../", "~/")) and " " not in words[0]  # a wrong path
    if not absent and not is_model_name(words[0]):
        return words
    if len(words) == 1 and not has_text and sys.stdin.isatty() and not is_only_model_name(words[0]):
        return words
    return _take_first(arguments, words)


def take_first_as_model(arguments: argparse.Namespace, words: list[str]) -> list[str]:
    """Sets arguments.MODEL as take_model() does, also to names such as gpt2, and to paths that are absent."""
    rest = take_model(arguments, words, has_text=True)
    given = "model" in flags.given_settings(arguments, EngineConfig)
    if given or arguments.MODEL or len(words) == len(arguments.after_dashes):
        return rest
    can_be_model = HUB_ID.fullmatch(words[0]) or (is_local(words[0]) and " " not in words[0])
    return _take_first(arguments, words) if can_be_model else rest


def _take_first(arguments: argparse.Namespace, words: list[str]) -> list[str]:
    arguments.MODEL = words[0]
    if not is_only_model_name(words[0]):
        arguments.not_found_hint = f"; if {words[0]!r} is text, put it after --"
    return words[1:]


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings that the user gave, with the model that MODEL names."""
    settings = flags.given_settings(arguments, EngineConfig)
    if (model := getattr(arguments, "MODEL", None)) is not None:
        if settings.get("model", model) != model:
            raise ValueError(f"two models: {model!r} and --model {settings['model']!r}; give one")
        settings["model"] = model
    return settings


def config(kwargs: dict[str, Any]) -> EngineConfig:
    """Checked, with what the environment settles."""
    return read_environment().apply(EngineConfig.from_kwargs(**kwargs))


def open_engine(arguments: argparse.Namespace, quiet: bool = False) -> "LLM":
    """Loads the model. Wrong settings are refused before anything slow is imported."""
    return load(engine_settings(arguments), quiet, getattr(arguments, "not_found_hint", ""))


def load(kwargs: dict[str, Any], quiet: bool, not_found_hint: str = "") -> "LLM":
    """Checks the settings, prints which model is loaded, and loads it. The hint ends the error of an unknown model."""
    checked = config(kwargs)
    is_missing = is_local(checked.model) and not Path(checked.model).expanduser().exists()
    if not quiet and not is_missing:
        print_stderr(loading_message(checked.model))  # before the imports, which take a second
    from quintet.tokenizers import cache_process

    beside = cache_process.start(checked)
    from quintet import LLM

    try:
        return LLM(**kwargs, use_tqdm=sys.stderr.isatty() and not quiet)
    except (FileNotFoundError, ConnectionError) as error:
        raise type(error)(f"{error}{not_found_hint}") from error
    finally:
        if beside is not None:
            beside.kill()  # it has ended, or the start has failed
            beside.close()


def loading_message(model: str) -> str:
    """Returns the first line of a start: the model, and the size of its file."""
    file = Path(model)
    return f"loading {model} ({file.stat().st_size / 2**20:.0f} MiB)" if file.is_file() else f"loading {model}"


def sampling_params(llm: "LLM", wanted: dict[str, Any], **defaults: Any) -> SamplingParams:
    """The model's own defaults, then the command's where the model has none, then what the user gave."""
    params = llm.get_default_sampling_params()
    plain = SamplingParams()
    for name, value in {**defaults, **wanted}.items():
        if name in wanted or getattr(params, name) == getattr(plain, name):
            setattr(params, name, value)
    return SamplingParams(**{each.name: getattr(params, each.name) for each in dataclasses.fields(SamplingParams)})


def prompt_from_stdin(command: str, model: str | None = None) -> str:
    """All of standard input as one prompt. `model`: the word that was taken as the model."""
    if sys.stdin.isatty():
        taken = "" if model is None else f" ({model!r} is the model; `-- {model}` makes it the prompt)"
        raise ValueError(f'no prompt{taken}: give one (`quintet {command} "Once upon a time"`), or pipe text in')
    text = decode_utf8(sys.stdin.buffer.read(), "standard input").removesuffix("\n")
    if not text:
        raise ValueError("standard input held no prompt")
    return text


def prompts_of(file: str) -> list[str]:
    """A prompt on each line of a file, or of standard input (-); empty lines are none."""
    raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    prompts = [
        line for line in decode_utf8(raw, "standard input" if file == "-" else file).splitlines() if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{file} holds no prompts; put one on each line")
    return prompts


def decode_utf8(raw: bytes, where: str) -> str:
    """ValueError if it is no UTF-8: a prompt with wrong letters would be answered all the same."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is no UTF-8 text (byte {error.start} is {raw[error.start]:#04x}); convert it first, as with "
            "`iconv -f latin1 -t utf-8`"
        ) from None
