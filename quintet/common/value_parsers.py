"""Reads one setting's value, from Python or from a command line, and returns it in its one true form."""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from quintet.common.suggestions import nearest_name

Parse = Callable[[Any], Any]  # raises ValueError that says what was wanted; the caller adds the field's name

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(iB|B)?")
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def integer(value: Any) -> int:
    """An int, or its readable form: "4k" is 4000, "4K" is 4096, "2GiB" is 2 * 2**30, "2GB" is 2 * 10**9."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"must be a whole number such as 512, 4k (4000) or 4K (4096), not {value!r}")
    number, letter, unit = match.groups()
    if unit == "B":
        scale = _DECIMAL[letter.lower()]
    elif unit == "iB":
        scale = _BINARY.get(letter.upper(), 1)
    else:
        scale = _BINARY[letter] if letter in _BINARY else _DECIMAL[letter]
    result = float(number) * scale if "." in number else int(number) * scale
    if result != int(result):
        raise ValueError(f"must be a whole number, and {value!r} is {result}")
    return int(result)


def count(minimum: int = 1, *also: Any) -> Parse:
    """A whole number of at least `minimum`, or one of the values in `also`."""

    def parse(value: Any) -> Any:
        if not isinstance(value, bool) and value in also:
            return value
        try:
            number = integer(value)
        except ValueError as error:
            raise ValueError(f"{error}{_or_choices(also)}") from None
        if number < minimum and number not in also:
            raise ValueError(f"must be at least {minimum}{_or_choices(also)}, not {value!r}")
        return number

    return parse


def _or_choices(also: tuple[Any, ...]) -> str:
    return "".join(f" or {value!r}" for value in also)


def fraction(value: Any) -> float:
    """A number in (0, 1]."""
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"must be a number over 0 and up to 1, not {value!r}") from None
    if not 0 < number <= 1:
        raise ValueError(f"must be over 0 and up to 1 (a share), not {value!r}")
    return number


def boolean(value: Any) -> bool:
    """A bool, or the words that mean one."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _BOOLEANS:
        return _BOOLEANS[value.strip().lower()]
    raise ValueError(f"must be true or false, not {value!r}")


def text(value: Any) -> str:
    """A string that is not empty; a path is turned into one."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be text that is not empty, not {value!r}")
    return value


def one_of(*choices: str, **synonyms: str) -> Parse:
    """One of the choices; a synonym is turned into its choice."""

    def parse(value: Any) -> str:
        if isinstance(value, str) and value in synonyms:
            return synonyms[value]
        if value not in choices:
            match = nearest_name(value, choices) if isinstance(value, str) else None
            hint = f"; did you mean {match!r}?" if match else ""
            raise ValueError(f"must be one of {', '.join(choices)}, not {value!r}{hint}")
        return str(value)

    return parse


def json_object(value: Any) -> dict[str, Any]:
    """A mapping, or the JSON text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"must be a JSON object such as '{{\"key\": 1}}': {error}") from None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"must be a mapping with text keys (a JSON object), not {value!r}")
    return dict(value)


def list_of(parse: Parse) -> Parse:
    """A list or tuple of such values; one string alone is refused, for it would be taken letter by letter."""

    def parse_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"must be a list, not {value!r}")
        return tuple(parse(item) for item in value)

    return parse_all


def optional(parse: Parse) -> Parse:
    """None, or such a value."""
    return lambda value: None if value is None else parse(value)


def finite_number(value: Any) -> float:
    """A finite number."""
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not math.isfinite(number):
        raise ValueError(f"must be a finite number, not {value!r}")
    return number


def id_list(value: Any) -> tuple[int, ...]:
    """Whole numbers from 0 on: a list, or text such as "3,7"."""
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not listed:
        raise ValueError(f"must be a list of token ids, not {value!r}")
    return tuple(count(0)(each) for each in listed)
