"""Checks of what is inside of a field: every refusal names the place, the reason, and the nearest name."""

from collections.abc import Collection, Iterable
from typing import Any

from quintet.engine.chat import MAX_MESSAGES
from quintet.names import unknown
from quintet.sampling_params import ParameterError
from quintet.server.http.strays import Strays, sift

_NAME = 80  # characters of a wrong word that are shown


def object_of(given: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """A JSON object, of whose fields these stay."""
    if not isinstance(given, dict):
        raise ParameterError(where, f"must be an object with {', '.join(known)}, not {kind_of(given)}")
    sift(given, known, where)
    return given


def refuse_fields(given: dict[str, Any], known: Collection[str], where: str) -> None:
    """Takes out what is not known; under --strict-requests raises ApiError 400 that has the nearest names."""
    sift(given, known, where)


def refuse_query(given: Iterable[str], known: Collection[str]) -> None:
    """Raises ApiError 400 for what is not known in the query of a path: that is typed, not made by a library."""
    Strays().meet("query", [name for name in given if name not in known], known)


def list_of(given: Any, where: str, what: str) -> list[Any]:
    """Not empty, and not endless; `what` says what it is a list of."""
    if not isinstance(given, list) or not given:
        raise ParameterError(where, f"must be {what}, not {'an empty list' if given == [] else kind_of(given)}")
    if len(given) > MAX_MESSAGES:
        raise ParameterError(where, f"may have {MAX_MESSAGES} entries, not {len(given)}")
    return given


def text_of(given: Any, where: str) -> str:
    if not isinstance(given, str):
        raise ParameterError(where, f"must be text, not {kind_of(given)}")
    return given


def one_of(given: Any, where: str, known: Collection[str]) -> str:
    """One of the known words."""
    word = text_of(given, where)
    if word not in known:
        raise ParameterError(where, f"is wrong: {unknown('value', word[:_NAME], known)}")
    return word


def kind_of(value: Any) -> str:
    """As JSON calls it."""
    names = {type(None): "null", dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "a number")
