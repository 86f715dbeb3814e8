"""Refuses unknown names with the nearest known one: a typo must not become a default."""

import difflib
import itertools
from collections.abc import Iterable, Mapping

_MAX_SHOWN = 3  # names in one refusal, and
_CUTOFF = 0.65  # similarity from 0 to 1: at 0.6 `features` is close to `temperature`
_MAX_NAME = 64  # characters of each: who sends more is not helped by it, and comparing takes time


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like it, or None where none is close."""
    if len(name) > _MAX_NAME:
        return None
    table = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), table, n=1, cutoff=_CUTOFF)
    return table[found[0]] if found else None


def unknown_name_error(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns the error text for an unknown name; `kind` reads like "model type" or "sampling parameter"."""
    known = list(known)
    match = nearest_name(name, known)
    name = name if len(name) <= _MAX_NAME else name[:_MAX_NAME] + "..."
    if match is not None:
        return f"unknown {kind} {name!r}; did you mean {match!r}?"
    return f"unknown {kind} {name!r}; known: {', '.join(sorted(known)) or 'none'}"


def refuse_unknown(kind: str, names: Iterable[str], known: Iterable[str], lacks: Mapping[str, str] = {}) -> None:
    """Raises ValueError that lists the first names that are not known, each with its nearest; or the first that other
    engines have, with what `lacks` says of it."""
    names, known = list(names), list(known)
    for name in names:
        if name in lacks and name not in known:
            raise ValueError(f"{kind} {name!r} is not there: {lacks[name]}")
    wrong = (unknown_name_error(kind, name, known) for name in names if name not in known)
    if shown := list(itertools.islice(wrong, _MAX_SHOWN)):
        raise ValueError("; ".join(shown))
