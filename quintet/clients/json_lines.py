"""Files with an object of JSON on each line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def read_lines(file: str, entry: Callable[[Any], T], lacking: str) -> list[T]:
    """Returns `entry` of each line that is not empty. ValueError names the line; `lacking`: its message for a file
    without any."""
    entries = []
    with Path(file).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    entries.append(entry(json.loads(line)))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{file}, line {number}: {error}") from None
    if not entries:
        raise ValueError(f"{file} {lacking}")
    return entries
