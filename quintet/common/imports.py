"""Imports of what is large: torch alone makes half a million objects, which all stay."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Looks for no garbage among what is imported: that takes a fifth of the time. What is there afterwards counts as
    old, so that the next look at what is new does not walk it either."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        resume_garbage_collection()


def resume_garbage_collection() -> None:
    """Looks for garbage from now on, among what is new."""
    if not gc.get_freeze_count():  # else what a program has frozen would be let go
        gc.freeze()
        gc.unfreeze()
    gc.enable()
