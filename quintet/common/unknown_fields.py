"""Unknown names in a caller's objects: a server may gather them, and then they are left out."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

UnknownFieldHandler = Callable[
    [str, Collection[str], Collection[str]], None
]  # of (place, names, those that are known); may raise

_handler: ContextVar[UnknownFieldHandler | None] = ContextVar("gather", default=None)


@contextmanager
def collect_unknown(gather: UnknownFieldHandler) -> Iterator[None]:
    """Passes unknown names to `gather` within the block, and in threads that it starts by asyncio.to_thread."""
    token = _handler.set(gather)
    try:
        yield
    finally:
        _handler.reset(token)


def report_unknown(where: str, names: Collection[str], known: Collection[str]) -> bool:
    """Passes unknown names of the object at `where` ("": the whole request) to gathering(); False outside it."""
    gather = _handler.get()
    if gather is None:
        return False
    if names:
        gather(where, names, known)
    return True


def drop_unknown(given: dict[str, Any], known: Collection[str], where: str = "") -> list[str]:
    """Removes unknown names from `given` within gathering(), so that no code reads what counts as left out.

    Returns the unknown names that are not gathered and stay in `given`.
    """
    names = [name for name in given if name not in known]
    if not names or not report_unknown(where, names, known):
        return names
    for name in names:
        del given[name]
    return []
