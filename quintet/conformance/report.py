"""What a run of the kit found, as JSON that others can check and as text for a person."""

import enum
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quintet.conformance.subject import Subject


class Outcome(str, enum.Enum):
    """Of one trial."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"  # the platform says that it has no such thing, and why


@dataclass(frozen=True)
class Result:
    """One trial."""

    section: str
    clause: str
    check: str
    what: str
    outcome: Outcome
    detail: str  # why it failed, or is unsupported
    seconds: float
    features: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All trials on one platform, and where they ran."""

    platform: str
    source: str
    machine: str
    results: tuple[Result, ...]

    @classmethod
    def of(cls, subject: "Subject", results: Sequence[Result]) -> "Report":
        return cls(subject.name, subject.chosen.platform.__module__, platform.machine(), tuple(results))

    @property
    def passed(self) -> bool:
        return all(result.outcome is not Outcome.FAILED for result in self.results)
