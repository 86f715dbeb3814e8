"""Names in a caller's objects that nobody knows: whoever serves callers may gather them, and they are left out then."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Gather = Callable[[str, Collection[str], Collection[str]], None]  # of (place, names, those that are known); may raise

_gather: ContextVar[Gather | None] = ContextVar("gather", default=None)


@contextmanager
def gathering(gather: Gather) -> Iterator[None]:
    """For what runs within, in threads that it starts by asyncio.to_thread, too."""
    token = _gather.set(gather)
    try:
        yield
    finally:
        _gather.reset(token)


def left_out(where: str, names: Collection[str], known: Collection[str]) -> bool:
    """Whether somebody gathers these names of the object at `where` ("": the whole request)."""
    gather = _gather.get()
    if gather is None:
        return False
    if names:
        gather(where, names, known)
    return True


def sift(given: dict[str, Any], known: Collection[str], where: str = "") -> list[str]:
    """Takes what is not known out of `given` if somebody gathers it: nobody shall read what counts as left out.

    Returns what nobody gathers, and what is still there.
    """
    names = [name for name in given if name not in known]
    if not names or not left_out(where, names, known):
        return names
    for name in names:
        del given[name]
    return []
