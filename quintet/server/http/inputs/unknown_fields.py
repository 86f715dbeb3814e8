"""Unknown fields of a request: ignored and named in a header and the log, or refused (--strict-requests)."""

import functools
import logging
import re
from collections.abc import Collection, Iterable
from urllib.parse import quote

from quintet.common.suggestions import nearest_name, unknown_name_error
from quintet.server.http.errors import ApiError

logger = logging.getLogger(__name__)

HEADER = "x-quintet-ignored-fields"
_MAX_NAME = 80  # characters of a field's name in messages
_MAX_FIELDS = 16  # fields of one request that are named; the rest are counted
_MAX_HEADER = 1000  # characters of the header
_MAX_SETS = 256  # sets of fields that are logged; clients with random names must not fill the disk
_MAX_SHOWN = 3  # fields that a refusal names


class UnknownFields:
    """Unknown fields of one request. `strict`: the first one refuses the request."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._met: dict[str, str | None] = {}  # a field's path -> the nearest known name, or None
        self._more = 0

    def __len__(self) -> int:
        return len(self._met) + self._more

    def add(self, where: str, names: Collection[str], known: Iterable[str]) -> None:
        """Records unknown fields of the object at `where` ("" is the body). Raises ApiError 400 if strict."""
        if not names:
            return
        if self.strict:
            raise refusal(where, names, known)
        among = frozenset(known)
        for name in names:
            if len(self._met) == _MAX_FIELDS:
                self._more += 1  # counts repeated fields too
                continue
            name = name[:_MAX_NAME]  # a stored name must not be as large as a body
            place = f"{where}.{name}" if where else name
            match = _nearest_name(name, among)  # names of template variables may have any characters, too
            self._met[quote(place, safe="[]$")] = match and quote(match[:_MAX_NAME])

    def header_value(self) -> str:
        """Returns all fields for a header: ASCII without line breaks; names only, never values."""
        header, left = "", len(self)
        for place, match in self._met.items():
            part = (", " if header else "") + place + (f" (did you mean {match}?)" if match else "")
            if len(header) + len(part) > _MAX_HEADER:
                break
            header, left = header + part, left - 1
        return f"{header}, and {left} more" if left else header

    @property
    def log_key(self) -> str:
        """A key for logging: equal for requests with the same fields, ignoring list indices."""
        return re.sub(r"\[\d+\]", "[]", " ".join(sorted(self._met)))


class UnknownFieldLog:
    """Logs unknown fields of one process, without repetition."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def log(self, path: str, strays: UnknownFields) -> None:
        """Logs once for each path and set of fields, at most _SETS times."""
        what = path, strays.log_key
        if what in self._told or len(self._told) >= _MAX_SETS:
            return
        self._told.add(what)
        last = "; further ones are not logged" if len(self._told) == _MAX_SETS else ""
        logger.warning(
            "%s: fields that are not known were ignored: %s%s", quote(path)[:_MAX_NAME], strays.header_value(), last
        )


def refuse_query(given: Iterable[str], known: Collection[str]) -> None:
    """Raises ApiError 400 for unknown query parameters: users type those, so they are never just ignored."""
    UnknownFields(strict=True).add("query", [name for name in given if name not in known], known)


@functools.lru_cache(maxsize=1024)  # clients repeat the same names
def _nearest_name(name: str, known: frozenset[str]) -> str | None:
    return nearest_name(name, sorted(known))


def refusal(where: str, names: Collection[str], known: Iterable[str]) -> ApiError:
    """Returns the error for unknown fields of the object at `where` ("" is the body)."""
    known = list(known)
    reasons = [
        unknown_name_error("field", name[:_MAX_NAME], known) for name, _ in zip(names, range(_MAX_SHOWN), strict=False)
    ]
    if not where:
        first = next(iter(names))[:_MAX_NAME]
        return ApiError(400, reasons[0], param=first, code="unknown_field")
    rest = f", and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ApiError(
        400, f"{where} has what it may not have: {'; '.join(reasons)}{rest}", param=where, code="unknown_field"
    )
