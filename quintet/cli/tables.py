"""Plain tables for the terminal: columns line up, and the last one is wrapped to the screen's width."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

_MIN_WIDTH = 30  # columns that the last cell gets, however narrow the screen


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns under their names. Where the output is not a screen nothing is wrapped."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head) - 1)]
    indent = sum(widths) + 2 * len(widths)
    room = max(_MIN_WIDTH, shutil.get_terminal_size().columns - indent) if sys.stdout.isatty() else None
    out = []
    for line in lines:
        start = "".join(f"{cell:{width}}  " for cell, width in zip(line, widths, strict=False))
        last = textwrap.wrap(line[-1], room) if room else [line[-1]]
        out.append((start + ("\n" + " " * indent).join(last)).rstrip())
    return "\n".join(out)


def byte_size(size: float) -> str:
    """Returns bytes in the largest unit of which there is one: 491 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def age(seconds: float) -> str:
    """Returns a time span in its largest unit: 3 hours ago."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (count := int(seconds // length)) > 0:
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"
