"""Report of comparisons: checks with their outcomes, as text and as JSON."""

from dataclasses import dataclass, field
from typing import Any

from quintet.verification.scores import Comparison, Limits, Split

EQUAL, CLOSE, DIFFERENT, NOT_RUN = "equal", "close", "different", "not run"


@dataclass(frozen=True)
class Check:
    """One comparison: `name` is what was compared, `outcome` one of those above, `reason` why it was not run."""

    name: str
    outcome: str
    comparison: Comparison | None = None
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome != DIFFERENT

    def to_dict(self) -> dict[str, Any]:
        numbers = {} if self.comparison is None else self.comparison.to_dict()
        return {"name": self.name, "outcome": self.outcome, **numbers} | (
            {"reason": self.reason} if self.reason else {}
        )

    def lines(self) -> list[str]:
        """The check in words: one line, and where the largest differences are."""
        if self.comparison is None:
            return [f"{self.name}: {self.outcome}: {self.reason}"]
        found = self.comparison
        head = f"{self.name}: {self.outcome}, {found.positions} positions"
        if found.equal:
            return [head]
        head += (
            f", |difference| mean {found.mean:.2g} p99 {found.p99:.2g} max {found.max:.2g} nats, bias {found.bias:+.1g}"
        )
        head += "" if found.kl is None else f", KL {found.kl:.1g}"
        if found.likeliest_differ is not None:
            head += f", likeliest token differs at {found.likeliest_differ:.2%}"
        return [head, *map(_split_line, found.splits), *self._worst_lines()]

    def _worst_lines(self) -> list[str]:
        if self.outcome != DIFFERENT or self.comparison is None:
            return []
        return [
            f"  sequence {each.sequence}, position {each.position}, token {each.token} {each.text!r}: "
            f"{each.here:.4f} here, {each.there:.4f} there"
            for each in self.comparison.worst
        ]


def _split_line(split: Split) -> str:
    gap = "" if split.gap is None else f", {split.gap:.2g} nats less likely here"
    return (
        f"  sequence {split.sequence}, position {split.position}: {split.here} {split.texts[0]!r} here, {split.there} "
        f"{split.texts[1]!r} there{gap}"
    )


def checked(name: str, comparison: Comparison, limits: Limits) -> Check:
    """Returns the check of a comparison."""
    if comparison.positions == 0 and not comparison.splits:
        return Check(name, NOT_RUN, None, "no position is known to both")
    outcome = EQUAL if comparison.equal else CLOSE if comparison.is_within(limits) else DIFFERENT
    return Check(name, outcome, comparison)


@dataclass
class Report:
    """Checks of one run. `engine`: settings that decide numbers; `against`: the other side's name."""

    model: str
    engine: dict[str, Any]
    against: str
    limits: Limits
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if no check found a difference, and one was run."""
        return all(check.passed for check in self.checks) and any(check.outcome != NOT_RUN for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "engine": self.engine,
            "against": self.against,
            "tolerance": {"mean": self.limits.mean, "max": self.limits.max},
            "passed": self.passed,
            "checks": [check.to_dict() for check in self.checks],
        }

    def __str__(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.engine.items() if value is not None)
        lines = [f"{self.model} ({settings}) against {self.against}"]
        for check in self.checks:
            lines += check.lines()
        return "\n".join([*lines, "passed" if self.passed else "failed"])
