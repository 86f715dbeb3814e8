"""Checks of what is inside of a field: every refusal names the place, the reason, and the nearest name."""

from collections.abc import Collection
from typing import Any

from quintet.chat.messages import MAX_MESSAGES
from quintet.common.suggestions import unknown_name_error
from quintet.common.unknown_fields import drop_unknown
from quintet.sampling_params import ParameterError

_SHOWN = 3  # names in one message; a body may hold any number
_NAME = 80  # characters of each


def object_of(given: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """A JSON object with these fields and no others."""
    if not isinstance(given, dict):
        raise ParameterError(where, f"must be an object with {', '.join(known)}, not {kind_of(given)}")
    refuse_fields(given, known, where)
    return given


def refuse_fields(given: dict[str, Any], known: Collection[str], where: str) -> None:
    """Raises ParameterError that has the nearest name of each field that is not known, unless such are gathered."""
    wrong = drop_unknown(given, known, where)
    if wrong:
        errors = [unknown_name_error("field", name[:_NAME], known) for name in wrong[:_SHOWN]]
        rest = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ParameterError(where, f"has what it may not have: {'; '.join(errors)}{rest}")


def list_of(given: Any, where: str, what: str) -> list[Any]:
    """Checks a list: not empty, at most MAX_MESSAGES entries; `what` describes it for the error."""
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
        raise ParameterError(where, f"is wrong: {unknown_name_error('value', word[:_NAME], known)}")
    return word


def flag_of(given: Any, where: str) -> bool:
    """True or false; null is false."""
    if given is not None and not isinstance(given, bool):
        raise ParameterError(where, f"must be true or false, not {kind_of(given)}")
    return bool(given)


def kind_of(value: Any) -> str:
    """Returns the JSON type of a value, for errors."""
    names = {type(None): "null", dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "a number")
