"""Reads a model's JSON files, which may be anybody's: whatever is wrong with one is a ValueError of one line."""

import json
from pathlib import Path
from typing import Any

MAX_DEPTH = 64  # lists and objects within one another: what walks a file by recursion must come to its end


def read_object(file: Path) -> dict[str, Any]:
    """The object that the file holds."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(_too_deep(file)) from None
    except ValueError as error:  # no JSON, not UTF-8, or a number of thousands of digits
        raise ValueError(f"{file} is not JSON: {error}; was the download cut short?") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(content).__name__}; fetch it again")
    if _exceeds_depth(content, MAX_DEPTH):
        raise ValueError(_too_deep(file))
    return content


def _too_deep(file: Path) -> str:
    return f"{file} nests lists or objects more than {MAX_DEPTH} deep, which no model's file does; fetch it again"


def _exceeds_depth(content: Any, most: int) -> bool:
    """True if `content` is nested more than `most` levels deep."""
    level = [content]
    for _ in range(most):
        level = [inner for each in level for inner in _children(each)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in held if isinstance(each, dict | list)]
