"""Faults that a platform may have, to see that the conformance kit finds them. Each is a change of one place or two.

The package itself has none of them in its code: `inject` puts them in, `injected` takes them out again.
"""

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quintet.common.suggestions import refuse_unknown

Change = Callable[[Any], Any]  # a function of the package -> the faulty one in its place
GROUPS = ("arithmetic", "attention", "copies", "memory", "promises", "steps")


@dataclass(frozen=True)
class Fault:
    """One way to be wrong."""

    name: str
    sentence: str
    clause: str  # of the contract, which the kit must name
    changes: tuple[tuple[str, Change], ...]  # (place, change): "kernels:product", "platform:Acme.probe"


FAULTS: dict[str, Fault] = {}  # filled by the modules beside this one


def fault(name: str, sentence: str, clause: str, *changes: tuple[str, Change]) -> None:
    """Registers one."""
    FAULTS[name] = Fault(name, sentence, clause, changes)


def known() -> dict[str, Fault]:
    """Every fault by its name."""
    for group in GROUPS:
        importlib.import_module(f"{__name__}.{group}")
    return FAULTS


def inject(*names: str) -> None:
    """For the rest of the process."""
    refuse_unknown("fault", names, known())
    for name in names:
        for place, change in FAULTS[name].changes:
            _replace(place, change)


@contextlib.contextmanager
def injected(name: str) -> Iterator[Fault]:
    """While the block runs; in processes that it starts, too."""
    refuse_unknown("fault", [name], known())
    undo = [_replace(place, change) for place, change in FAULTS[name].changes]
    before = os.environ.get("ACME_FAULTS", "")
    os.environ["ACME_FAULTS"] = name
    try:
        yield FAULTS[name]
    finally:
        os.environ["ACME_FAULTS"] = before
        for each in reversed(undo):
            each()


def _replace(place: str, change: Change) -> Callable[[], None]:
    """-> what puts the original back."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(f"acme.{module}")
    for each in owners:
        owner = getattr(owner, each)
    original = inspect.getattr_static(owner, name)
    faulty = classmethod(change(original.__func__)) if isinstance(original, classmethod) else change(original)
    setattr(owner, name, faulty)
    return lambda: setattr(owner, name, original)
