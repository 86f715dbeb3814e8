"""Fields of a request that nobody knows: left out and named in a header and the log, or refused (--strict-requests)."""

import functools
import logging
import re
from collections.abc import Collection, Iterable
from urllib.parse import quote

from quintet.names import nearest, unknown
from quintet.server.http.errors import ApiError

logger = logging.getLogger(__name__)

HEADER = "x-quintet-ignored-fields"
_NAME = 80  # characters of a field's name that are shown
_KEPT = 16  # fields of one request that are named; the others are counted
_LONGEST = 1000  # characters of the header
_SETS = 256  # of fields that the log tells of; a caller that makes up names fills no disk
_SHOWN = 3  # fields that a refusal names


class Strays:
    """Those of one request. `strict`: the first refuses it."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._met: dict[str, str | None] = {}  # a field's place -> the known name that was perhaps meant
        self._more = 0

    def __len__(self) -> int:
        return len(self._met) + self._more

    def meet(self, where: str, names: Collection[str], known: Iterable[str]) -> None:
        """Fields of the object at `where` ("": the body) that are none of `known`. Raises ApiError 400 if strict."""
        if not names:
            return
        if self.strict:
            raise refusal(where, names, known)
        among = frozenset(known)
        for name in names:
            if len(self._met) == _KEPT:
                self._more += 1  # one that has a place already is counted, too
                continue
            name = name[:_NAME]  # what is remembered of it must not be as large as a body
            place = f"{where}.{name}" if where else name
            match = _nearest(name, among)  # names of a template's variables may have any letters, too
            self._met[quote(place, safe="[]$")] = match and quote(match[:_NAME])

    def told(self) -> str:
        """All of them in ASCII without line breaks, as a header takes it: never a value."""
        said, left = "", len(self)
        for place, match in self._met.items():
            part = (", " if said else "") + place + (f" (did you mean {match}?)" if match else "")
            if len(said) + len(part) > _LONGEST:
                break
            said, left = said + part, left - 1
        return f"{said}, and {left} more" if left else said

    @property
    def kind(self) -> str:
        """The same for requests with the same fields, in whatever entry of a list they are."""
        return re.sub(r"\[\d+\]", "[]", " ".join(sorted(self._met)))


class Notices:
    """What the log has been told, by one process."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def tell(self, path: str, strays: Strays) -> None:
        """Once for each path and set of fields, and never without end."""
        what = path, strays.kind
        if what in self._told or len(self._told) >= _SETS:
            return
        self._told.add(what)
        last = "; further ones are not told" if len(self._told) == _SETS else ""
        logger.warning("%s: fields that are not known were ignored: %s%s", quote(path)[:_NAME], strays.told(), last)


def refuse_query(given: Iterable[str], known: Collection[str]) -> None:
    """Raises ApiError 400 for what is not known in the query of a path: that is typed, not made by a library."""
    Strays(strict=True).meet("query", [name for name in given if name not in known], known)


@functools.lru_cache(maxsize=1024)  # a client sends the same ones again and again
def _nearest(name: str, known: frozenset[str]) -> str | None:
    return nearest(name, sorted(known))


def refusal(where: str, names: Collection[str], known: Iterable[str]) -> ApiError:
    """Of the object at `where`, the body if it is ""."""
    known = list(known)
    said = [unknown("field", name[:_NAME], known) for name, _ in zip(names, range(_SHOWN), strict=False)]
    if not where:
        first = next(iter(names))[:_NAME]
        return ApiError(400, said[0], param=first, code="unknown_field")
    rest = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ApiError(
        400, f"{where} has what it may not have: {'; '.join(said)}{rest}", param=where, code="unknown_field"
    )
