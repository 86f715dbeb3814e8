"""Checks and trials of the kit: a check proves one clause of the contract, in one trial or many."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from quintet.conformance.clauses import CLAUSES

if TYPE_CHECKING:
    from quintet.conformance.harness.subject import Subject

T = TypeVar("T")


class NotSupported(Exception):
    """Raised by a trial of something that the platform says it does not have; the message is its reason. `claim`: the
    method that would turn it on, where the reason does not name one."""

    def __init__(self, reason: str, claim: str = "") -> None:
        super().__init__(reason)
        self.claim = claim


class ContractViolation(AssertionError):
    """Raised by a trial that the platform fails; the message says what was wanted, and what came."""


def require(holds: bool, message: str) -> None:
    """An `assert` that stays under `python -O`."""
    if not holds:
        raise ContractViolation(message)


class Trial(NamedTuple):
    """One call of a check. It returns if the clause holds, and raises Lacking, Broken, or whatever goes wrong."""

    what: str  # what is tried, in a few words; unique within its check
    call: Callable[[], None]
    features: tuple[str, ...] = ()  # what a platform supports if this holds: rows of the table of support


@dataclass(frozen=True)
class Check:
    """Made by @check."""

    section: str  # the file that it stands in
    clause: str  # of CLAUSES
    name: str
    trials: Callable[["Subject"], Iterator[Trial]]


CHECKS: list[
    Check
] = []  # in the order of their files and lines; filled when the modules of quintet.conformance.sections are imported


def check(clause: str) -> Callable[[Callable[["Subject"], Iterator[Trial]]], Callable[["Subject"], Iterator[Trial]]]:
    """Registers a generator of trials. Making them must be cheap, and fail for nothing that a platform does wrong."""
    if clause not in CLAUSES:
        raise ValueError(f"no clause {clause!r}; add it to quintet/conformance/clauses.py")

    def register(trials: Callable[["Subject"], Iterator[Trial]]) -> Callable[["Subject"], Iterator[Trial]]:
        section = trials.__module__.rpartition(".")[2]
        CHECKS.append(Check(section, clause, trials.__name__, trials))
        return trials

    return register


def evenly_chosen(items: Sequence[T], count: int) -> list[T]:
    """Returns at most `most` of the items, evenly from the first to the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]
