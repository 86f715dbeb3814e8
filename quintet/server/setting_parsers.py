"""Parsers of a server's settings."""

from typing import Any

from quintet.chat.reasoning_effort import EFFORTS
from quintet.common.value_parsers import Parse, count, json_object, list_of, one_of


def seconds(least: float = 0.0) -> Parse:
    """Returns a parser of seconds."""

    def parse(value: Any) -> float:
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not least <= number <= 1e6:
            raise ValueError(f"must be seconds, a number from {least:g} to 1000000, not {value!r}")
        return number

    return parse


def port_number(value: Any) -> int:
    """Reads a port; 0 is one that is free."""
    number = int(count(0)(value))
    if number > 65535:
        raise ValueError(f"must be a port from 0 (any that is free) to 65535, not {value!r}")
    return number


def url_paths(value: Any) -> tuple[str, ...]:
    """A list, or text with commas; vLLM's form."""
    texts = [value] if isinstance(value, str) else list_of(str)(value)
    found = tuple(each.strip() for one in texts for each in one.split(",") if each.strip())
    for each in found:
        if not each.startswith("/"):
            raise ValueError(f"must be paths such as /health, not {each!r}")
    return found


def effort_map(value: Any) -> dict[str, str]:
    """An object of efforts and what the template gets for each."""
    given = json_object(value)
    for effort, instead in given.items():
        one_of(*EFFORTS)(effort)
        if not isinstance(instead, str):
            raise ValueError(f"must map efforts to text, not {effort!r} to {instead!r}")
    return dict(given)


def client_cert_mode(value: Any) -> int:
    """Python's numbers, as ssl.CERT_NONE, CERT_OPTIONAL and CERT_REQUIRED."""
    return int(one_of("0", "1", "2")(str(value)))
