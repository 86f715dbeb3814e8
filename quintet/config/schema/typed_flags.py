"""Finds which flags were typed, and their spelling, for a command's error messages."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from quintet.config.schema.error_names import NameTranslation, Spelling


def find_typed_flags(
    actions: Mapping[str, argparse.Action], raw: Sequence[str], words: Sequence[str]
) -> dict[str, str]:
    """Destination -> the flag as it was typed; `words` are the `raw` ones in the form that the parser knows."""
    found: dict[str, str] = {}
    for typed, word in zip(raw, words, strict=True):
        flag = typed.split("=")[0]
        action = actions.get(word.split("=")[0])
        if action is None and word[:1] == "-" and word[1:2] != "-":  # a value may stick to a short flag: -O3
            flag, action = typed[:2], actions.get(word[:2])
        if action is not None:
            found[action.dest] = flag
        if word == "--":
            break
    return found


def name_translation(
    actions: Mapping[str, argparse.Action], typed: Mapping[str, str], given: argparse.Namespace | None = None
) -> NameTranslation:
    """Returns the wording of a command's flags; a flag that was not typed has its first long name."""
    spelled: dict[str, Spelling] = {}
    for action in actions.values():
        _, dot, name = action.dest.partition(".")  # the dataclass, and its field or an entry of one
        if dot and (name not in spelled or action.dest in typed):
            spelled[name] = _spelling(action, typed)
    values = {flag: getattr(given, dest, None) for dest, flag in typed.items()}
    return NameTranslation(spelled, {flag: strings_in(value) for flag, value in values.items()})


def strings_in(value: Any) -> tuple[str, ...]:
    """Returns the strings in a setting's value."""
    several = value if isinstance(value, list | tuple) else (value,)
    return tuple(each for each in several if isinstance(each, str))


def _spelling(action: argparse.Action, typed: Mapping[str, str]) -> Spelling:
    plain = next(flag for flag in (*action.option_strings, *action.option_strings[:1]) if flag.startswith("--"))
    switch = isinstance(action, argparse.BooleanOptionalAction)
    flag = as_typed(typed, action.dest, plain)
    return Spelling(flag.replace("--no-", "--", 1) if switch else flag, switch=switch)


def as_typed(typed: Mapping[str, str], dest: str, plain: str) -> str:
    """The flag for a destination; `plain` if it was not typed."""
    owner, _, entry = dest.rpartition(".")
    if dest not in typed and owner in typed:  # within the JSON of a flag that was typed
        return f"{typed[owner]}.{entry}"
    return typed.get(dest, plain)
