"""Rules to read the entries of a model type in the words of another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Entries = dict[str, Any]


def _unchanged(entries: Entries) -> Entries:
    return entries


@dataclass(frozen=True)
class ConfigAdapter:
    """Rules to read the entries of a type."""

    target_type: str  # the type of the class that reads them
    names: Mapping[str, str] = field(default_factory=dict)  # theirs -> that class's
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the published class's defaults for missing entries
    read: Callable[[Entries], Entries] = _unchanged  # after renaming: converts entries of another form
