"""Writes quintet/api/arguments.pyi: every setting of EngineConfig as a keyword with its type and default.

    python scripts/typed_arguments.py

A test compares the file with what this makes, so that no keyword is typed by hand.
"""

import json
import types
import typing
from dataclasses import Field, InitVar
from pathlib import Path
from typing import Any

from quintet.config import EngineConfig, setting_fields

FILE = Path(__file__).resolve().parent.parent / "quintet" / "api" / "arguments.pyi"
HEAD = '''"""Made by scripts/typed_arguments.py of the settings in quintet/config; change those, and run it."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
'''


def stub() -> str:
    """The file's text."""
    return (
        HEAD
        + _imports()
        + "".join(_class(name, bar) for name, bar in (("LLMArguments", True), ("AsyncLLMArguments", False)))
    )


def _imports() -> str:
    """Of the configurations that are a setting's value."""
    homes: dict[str, list[str]] = {}
    for each in setting_fields(EngineConfig):
        if "nested" in each.metadata:
            homes.setdefault(each.metadata["nested"].__module__, []).append(each.metadata["nested"].__name__)
    return "\n" + "".join(f"from {home} import {', '.join(sorted(names))}\n" for home, names in sorted(homes.items()))


def _class(name: str, bar: bool) -> str:
    (model,) = (each for each in setting_fields(EngineConfig) if each.name == "model")
    lines = ["self", f"model: {_taken(model)} | None = None", "*", f"use_tqdm: bool = {bar}"]
    for each in setting_fields(EngineConfig):
        if each is not model:
            lines.append(f"{each.name}: {_taken(each)} = {_default(each)}")
            lines += [f"{alias}: {_taken(each)} = ..." for alias in each.metadata["aliases"]]
    body = "".join(f"        {line},\n" for line in lines)
    return f"\nclass {name}:\n    def __init__(\n{body}    ) -> None: ...\n"


def _taken(field: Field[Any]) -> str:
    """What may be given: more than what is kept, such as "2G" for a number, or a mapping for a configuration."""
    if "accepts" in field.metadata:
        return str(field.metadata["accepts"])
    if "nested" in field.metadata:
        number = " | int" if field.metadata["nested"].plain else ""
        return f"{field.metadata['nested'].__name__} | Mapping[str, Any] | str{number} | None"
    hint = field.type.type if isinstance(field.type, InitVar) else field.type
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if union else (hint,)
    return " | ".join(dict.fromkeys(name for each in members for name in _names(each)))


def _names(hint: Any) -> list[str]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return [f"Sequence[{inner[0].__name__ if isinstance(inner[0], type) else 'Any'}]"]
    if origin is dict:
        return ["Mapping[str, Any]", "str"]
    if hint is int:
        return ["int", "str"]
    return ["None" if hint is type(None) else hint.__name__]


def _default(field: Field[Any]) -> str:
    default = field.default
    if isinstance(default, str):
        return json.dumps(default)
    return repr(default) if default is None or isinstance(default, bool | int | float | tuple) else "..."


if __name__ == "__main__":
    FILE.write_text(stub(), encoding="utf-8")
