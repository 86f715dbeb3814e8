"""Parsers of request parameters: each returns the value in its canonical form, or raises a ValueError."""

import numbers
import operator
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

Parse = Callable[[Any], Any]  # the value in its one true form; ValueError says what was wanted, without the name

MAX_STRINGS = 64  # stop strings and bad words, each
MAX_STRING = 1024  # characters of each
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 2**18  # larger than any vocabulary today
MAX_EXTRA_ARGS = 64
MAX_NAMED = 128  # tokens in logprob_token_ids, as in vLLM
MAX_TRACE = 2**20  # tokens of an output that is given
MAX_CHOICES = 2**16
INT32 = 2**31 - 1


def number(low: float, high: float, note: str = "", above: bool = False) -> Parse:
    """A finite number in [low, high], or in (low, high]."""

    def parse(value: Any) -> float:
        wanted = f"must be a number {'over' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}{note}"
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"{wanted}, not {shorten(value)}")
        number = _float(value)
        if not low <= number <= high or (above and number == low):  # NaN fails here too
            raise ValueError(f"{wanted}, not {shorten(value)}")
        return number

    return parse


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def integer(low: int, high: int, note: str = "") -> Parse:
    def parse(value: Any) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            raise ValueError(f"must be a whole number{note}, not {shorten(value)}") from None
        if not low <= number <= high:
            raise ValueError(f"must be from {low} to {high}{note}, not {shorten(value)}")
        return number

    return parse


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be True or False, not {shorten(value)}")
    return value


def optional(parse: Parse) -> Parse:
    return lambda value: None if value is None else parse(value)


def list_of(parse: Parse, most: int) -> Parse:
    """A list of at most `most`; None is none."""

    def parse_all(value: Any) -> list[Any]:
        if value is None:
            return []
        if not isinstance(value, list | tuple | set | frozenset):
            raise ValueError(f"must be a list, not {shorten(value)}")
        if len(value) > most:
            raise ValueError(f"may hold {most} entries, not {len(value)}")
        return [_parse_as(f"entry {index}", parse, entry) for index, entry in enumerate(value)]

    return parse_all


def strings(value: Any) -> list[str]:
    return list_of(string, MAX_STRINGS)([value] if isinstance(value, str) else value)


def string(value: Any) -> str:
    given = text(value)
    if not 1 <= len(given) <= MAX_STRING:
        raise ValueError(f"must have from 1 to {MAX_STRING} characters, not {len(given)}")
    return given


def biases(value: Any) -> dict[int, float]:
    """Token id -> what is added to its logit. An id may be its decimal text, as in JSON."""
    if not isinstance(value, Mapping):
        raise ValueError(f"must map token ids to numbers, not {shorten(value)}")
    if len(value) > MAX_BIASES:
        raise ValueError(f"may hold {MAX_BIASES} entries, not {len(value)}")
    found = {}
    for key, bias in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token = _parse_as("a token id", token_id, int(key) if digits else key)
        found[token] = _parse_as(f"the bias of token {token}", number(-100, 100), bias)
    return found


def allowed_token_ids(value: Any) -> list[int]:
    plain = isinstance(value, list) and 0 < len(value) <= MAX_ALLOWED_IDS and set(map(type, value)) == {int}
    if not (plain and 0 <= min(value) and max(value) <= INT32):  # entry by entry for the message alone: it takes time
        value = list_of(token_id, MAX_ALLOWED_IDS)(value)
    if not value:
        raise ValueError("must allow at least one token; leave it out (None) to allow all")
    return sorted(set(value))


def truncation_side(value: Any) -> str:
    if value not in ("left", "right"):
        raise ValueError(f"must be 'left' or 'right', not {shorten(value)}")
    return str(value)


def token_ids(value: Any) -> list[int]:
    """Token ids, each once."""
    ids = list(dict.fromkeys(list_of(token_id, MAX_NAMED)(value)))
    if not ids:
        raise ValueError("must name at least one token; leave it out (None) for none")
    return ids


def trace(value: Any) -> list[int]:
    """Token ids of an output, in order."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"must be a list of at least one token id, not {shorten(value)}; leave it out (None) for none")
    return list_of(token_id, MAX_TRACE)(value)


def candidate_rows(value: Any) -> list[list[int]]:
    """Rows of token ids, from lists or a 2D array of integers; -1 fills a row up."""
    rows = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(rows, list | tuple) or not rows or not all(isinstance(row, list | tuple) and row for row in rows):
        raise ValueError(
            f"must be rows of at least one token id each, not {shorten(value)}; leave it out (None) for none"
        )
    return list_of(list_of(integer(-1, INT32, " (-1 fills a row up)"), MAX_NAMED), MAX_TRACE)(rows)


def budget(value: Any) -> int | None:
    """Tokens; None and -1 are no bound."""
    tokens = None if value is None else integer(-1, INT32, " (-1 is no bound)")(value)
    return None if tokens == -1 else tokens


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {shorten(value)}")
    return value


def dict_or_json(what: str) -> Parse:
    def parse(value: Any) -> Any:
        if not isinstance(value, str | dict):
            raise ValueError(f"must be {what}, as a dict or as JSON text, not {shorten(value)}")
        return value

    return parse


def choices(value: Any) -> list[str]:
    choices = list_of(text, MAX_CHOICES)(value)
    if not choices:
        raise ValueError("must offer at least one text")
    return choices


def only_true(value: Any) -> bool:
    if value is not True:
        raise ValueError(f"must be True or left out, not {shorten(value)}")
    return True


def extra_args(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"must be a dict with text keys, not {shorten(value)}")
    if len(value) > MAX_EXTRA_ARGS:
        raise ValueError(f"may hold {MAX_EXTRA_ARGS} entries, not {len(value)}")
    return dict(value)


def seed(value: Any) -> int | None:
    """-1 is none, as in vLLM."""
    number = integer(-(2**63), 2**64 - 1)(value)
    return None if number == -1 else number


def _parse_as(what: str, parse: Parse, value: Any) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None


def shorten(value: Any) -> str:
    """The value, cut short: it may be hostile and it goes into a message."""
    try:
        return f"{reprlib.repr(value)} ({type(value).__name__})"
    except Exception:  # a repr of the caller's, or an int with more digits than Python will print
        return f"a {type(value).__name__} that cannot be shown"


token_id = integer(0, INT32)
penalty = number(-2, 2)
count = integer(0, INT32)
positive = integer(1, INT32)
logprobs = optional(integer(-1, INT32, " (-1: the whole vocabulary)"))
