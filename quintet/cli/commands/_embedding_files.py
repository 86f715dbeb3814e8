"""Shared parts of `quintet embed` and `quintet rerank`: texts of files, a pooling model, files written whole."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from quintet.cli.commands import _engine as engine
from quintet.common.suggestions import unknown_name_error
from quintet.config import BUNDLED_EMBED

if TYPE_CHECKING:
    from quintet import LLM

STDIN = "-"
BATCH = 1024  # texts that are given to the engine at once: what is done of a long file is seen


@dataclass(frozen=True)
class TextLine:
    """One text of a file."""

    text: str
    number: int  # of the line, from 1
    other_fields: dict[str, Any]  # what else an object held


def read(file: str, field: str) -> Iterator[TextLine]:
    """Yields lines that are not empty: of .jsonl a string, or an object with the text in `field`; else each is a text.

    ValueError names the line that is neither.
    """
    name = "standard input" if file == STDIN else file
    need_file(file)
    with contextlib.ExitStack() as stack:
        source: IO[bytes] = sys.stdin.buffer if file == STDIN else stack.enter_context(open(file, "rb"))
        as_json = file.endswith((".jsonl", ".ndjson"))
        for number, raw in enumerate(source, 1):
            line = engine.decode_utf8(raw, f"{name}, line {number}").rstrip("\r\n")
            if not line.strip():
                continue
            if as_json or (file == STDIN and line.lstrip()[:1] in ('"', "{")):
                yield _line(line, field, f"{name}, line {number}", number)
            else:
                yield TextLine(line, number, {})


def need_file(file: str | None) -> None:
    """ValueError where texts are to come of a file that is not there."""
    if file not in (None, STDIN) and not Path(file).exists():
        raise ValueError(f"there is no file {file!r}; give the path of one, or - for standard input")


def _line(line: str, field: str, name: str, number: int) -> TextLine:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} is not JSON: {error}; correct it, or name the file .txt for a text on each line"
        ) from None
    if isinstance(value, str):
        return TextLine(value, number, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be text or an object with text, not {type(value).__name__}")
    if not isinstance(value.get(field), str):
        hint = unknown_name_error("field", field, [key for key, each in value.items() if isinstance(each, str)])
        raise ValueError(f"{name} has no text: {hint}; --field names the one that holds it")
    return TextLine(value[field], number, value)


def open_model(arguments: argparse.Namespace) -> "LLM":
    """Loads it, for numbers; the bundled one if none is named.

    Wrong settings are refused before anything slow is imported.
    """
    kwargs = engine.engine_settings(arguments)
    kwargs.setdefault("model", BUNDLED_EMBED)
    kwargs.setdefault("runner", "pooling")
    return engine.load(kwargs, arguments.quiet, getattr(arguments, "not_found_hint", ""))


@contextlib.contextmanager
def atomic_file(file: str) -> Iterator[Path]:
    """A file that is written beside, and is there when it is whole."""
    target, part = Path(file), Path(file + ".part")
    if target.is_dir():
        raise ValueError(f"{target} is a folder; --output must name a file")
    try:
        yield part
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def batches(lines: Iterator[TextLine]) -> Iterator[list[TextLine]]:
    """BATCH at a time."""
    found: list[TextLine] = []
    for line in lines:
        found.append(line)
        if len(found) == BATCH:
            yield found
            found = []
    if found:
        yield found
