"""Writes docs/reference/ from the declarations of the code: python scripts/reference.py

Commands, engine arguments, sampling parameters, environment variables, metrics, HTTP routes, tried model types and
vLLM's names.
tests/rules/test_reference.py checks that the pages are current.
"""

import argparse
import dataclasses
import enum
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quintet.cli.main import COMMANDS
from quintet.config import EngineConfig, Environment, setting_fields
from quintet.config.schema.flags import Parser, flags_of
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from quintet.server.metrics.catalogue import ALL_METRICS
from scripts.reference_pages.http_page import http_page
from scripts.reference_pages.markdown import cell, code, table
from scripts.reference_pages.tried_page import tried_page
from scripts.vllm_names.page import vllm_page

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- written by scripts/reference.py -->\n"
SHARED = {  # dataclass whose flags several commands share -> the page that lists them
    "EngineConfig": "[engine arguments](engine-arguments.md)",
    "SamplingParams": "[sampling parameters](sampling-params.md)",
}


# ------------------------------------------------------------------------------------------------------ commands


def _flags(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        names = [name.replace("--", "--[no-]", 1) for name in action.option_strings if not name.startswith("--no-")]
    else:
        names = list(action.option_strings) or [str(action.metavar or action.dest)]
    value = action.metavar if action.option_strings and action.nargs != 0 else None
    if isinstance(action, argparse.BooleanOptionalAction) or not value:
        return code(", ".join(names))
    return code(f"{', '.join(names)} {value if isinstance(value, str) else ' '.join(value)}")


def _shared(action: argparse.Action) -> str | None:
    owner = action.dest.partition(".")[0]
    return owner if owner in SHARED else None


def command_parser(name: str) -> Parser:
    module: Any = importlib.import_module(COMMANDS[name].module)
    parser = Parser(prog=f"quintet {name}", description=module.__doc__)
    module.add_arguments(parser)
    return parser


def command(name: str) -> str:
    """The section of one command."""
    parser = command_parser(name)
    text = f"## quintet {name}\n\n{cell(' '.join((parser.description or '').split()))}\n\n"
    text += f"```text\n{parser.format_help().splitlines()[0]}\n```\n"
    for group in parser._action_groups:
        shown = [
            each
            for each in group._group_actions
            if each.help is not argparse.SUPPRESS and "--help" not in each.option_strings and not _shared(each)
        ]
        if shown:
            rows = [[_flags(each), cell((each.help or "").replace("%%", "%"))] for each in shown]
            text += f"\n{table([group.title or 'flag', 'meaning'], rows)}"
    owners = sorted({owner for each in parser._actions if (owner := _shared(each))})
    if owners:
        text += f"\nAlso the {' and the '.join(SHARED[owner] for owner in owners)}, as flags.\n"
    return text


def cli_page() -> str:
    intro = (
        "# Command line\n\n" + NOTE + "\nEach command has `--help`. `--max_tokens` is the same as `--max-tokens`; an "
        "unknown flag is an error that names the nearest one. `--[no-]x` stands for `--x` and `--no-x`. Exit codes: "
        "0 success, 1 failure, 2 wrong usage, 130 interrupted.\n\n"
    )
    rows = [
        [f"[{code(f'quintet {name}')}](#quintet-{name.replace(' ', '-')})", each.help]
        for name, each in COMMANDS.items()
    ]
    return intro + table(["command", "does"], rows) + "\n" + "\n".join(command(name) for name in COMMANDS)


# ---------------------------------------------------------------------------------------------------- dataclasses


def _default(setting: Any) -> str:
    value = setting.default if setting.default_factory is dataclasses.MISSING else setting.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, enum.Enum):
        return code(value.name)
    return "" if dataclasses.is_dataclass(value) else code(repr(value))


def _choices(setting: Any) -> str:
    choices = setting.metadata.get("choices")
    return f". One of {', '.join(code(str(each)) for each in choices)}." if choices else ""


def engine_page() -> str:
    text = (
        "# Engine arguments\n\n" + NOTE + "\nFields of `EngineConfig`: keyword arguments of `LLM`, `AsyncLLM` and "
        "`EngineArgs`, flags of the commands that run a model, and keys of the file of `quintet serve --config`. "
        "The flag of `max_model_len` is `--max-model-len`. A field that holds a configuration also has a flag for each "
        "entry: `--speculative-config.method`.\n"
    )
    groups: dict[str, list[Any]] = {}
    for each in setting_fields(EngineConfig):
        groups.setdefault(each.metadata.get("group", "options"), []).append(each)
    for title, settings in groups.items():
        rows = []
        for each in settings:
            more = [flag for flag in flags_of(each) if flag != "--" + each.name.replace("_", "-")]
            names = code(each.name) + "".join(f", {code(flag)}" for flag in more)
            rows.append([names, _default(each), cell(each.metadata["help"]) + _choices(each)])
        text += f"\n## {title[:1].upper()}{title[1:]}\n\n{table(['argument', 'default', 'meaning'], rows)}"
        for each in settings:
            if held := each.metadata.get("nested"):
                entries = [
                    [code(entry.name), _default(entry), cell(entry.metadata.get("help", "")) + _choices(entry)]
                    for entry in dataclasses.fields(held)
                ]
                text += f"\nEntries of `{each.name}`:\n\n{table(['entry', 'default', 'meaning'], entries)}"
    return text


def params_page() -> str:
    parts = [
        "# SamplingParams\n\n"
        + NOTE
        + "\nFields of `quintet.SamplingParams`, with vLLM's names, defaults and meanings. "
        "They are also flags of `quintet generate` and `quintet chat`, and fields of HTTP requests where "
        "[the server](../server.md#what-a-request-may-say) lists them.\n"
    ]
    for cls in (SamplingParams, StructuredOutputsParams, RepetitionDetectionParams, PoolingParams):
        rows = [
            [code(each.name), _default(each), cell(each.metadata.get("help", ""))] for each in dataclasses.fields(cls)
        ]
        parts.append(f"## {cls.__name__}\n\n{table(['field', 'default', 'meaning'], rows)}")
    return "\n".join(parts)


def environment_page() -> str:
    rows = [[code(name), cell(help)] for name, help in Environment.descriptions().items()]
    return (
        "# Environment variables\n\n"
        + NOTE
        + "\nAll variables that quintet reads. Flags and arguments take precedence. "
        "An unknown `QUINTET_*` variable is an error that names the nearest one. Libraries have others, "
        "such as `HF_TOKEN`.\n\n" + table(["variable", "meaning"], rows)
    )


def metrics_page() -> str:
    rows = [
        [
            code(each.name), each.kind, ", ".join(map(code, each.all_labels)), cell(each.help),
            ", ".join(f"{bound:g}" for bound in each.buckets),
        ]
        for each in ALL_METRICS
    ]  # fmt: skip
    return (
        "# Metrics\n\n"
        + NOTE
        + "\nAll that `GET /metrics` shows. [Metrics and traces](../metrics.md) compares each with "
        "vLLM's and explains the labels.\n\n" + table(["metric", "type", "labels", "meaning", "buckets"], rows)
    )


def pages() -> dict[str, str]:
    """File of docs/reference -> its text."""
    return {
        "cli.md": cli_page(),
        "engine-arguments.md": engine_page(),
        "sampling-params.md": params_page(),
        "environment.md": environment_page(),
        "metrics.md": metrics_page(),
        "http.md": http_page(NOTE),
        "tried-models.md": tried_page(NOTE),
        "vllm-names.md": vllm_page(NOTE),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
