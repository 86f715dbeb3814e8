"""Results of a run of the kit, as JSON that others can check and as text for a person."""

import enum
import json
import platform as host
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct

from quintet import __version__
from quintet.common.tools_package import MISSING
from quintet.conformance.clauses import CLAUSES
from quintet.interface.platform import CONTRACT_VERSION
from quintet.platforms import OURS

if TYPE_CHECKING:
    from quintet.conformance.harness.subject import Subject

OUR_NAME = "quintet"  # the distribution of what is built in
FORMAT = 1  # of the JSON; another number is another form
MAX_BYTES = 64 * 2**20  # of a report that is read
SHOWN = 8  # trials that are listed of those that came to the same
MAX_DETAIL = 4000  # characters that are kept of a failure: a traceback of a compiler can be megabytes

Name = Annotated[str, Meta(max_length=200)]
Text = Annotated[str, Meta(max_length=MAX_DETAIL + 10)]


class TrialOutcome(str, enum.Enum):
    """Outcome of one trial."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"  # the platform says that it has no such thing, and why


class TrialResult(Struct, frozen=True, forbid_unknown_fields=True):
    """One trial."""

    section: Name
    clause: Name
    check: Name
    what: Text
    outcome: TrialOutcome
    detail: Text  # why it failed, or is unsupported
    seconds: float
    features: tuple[Name, ...]

    def __str__(self) -> str:
        """Formats the result in full: the clause and its sentence, the trial, its outcome."""
        return summarize_alike([self])


def summarize_alike(alike: Sequence[TrialResult]) -> str:
    """Formats results of one check with the same outcome as one entry."""
    first = alike[0]
    lines = [f"{first.outcome.value}  {first.clause}: {CLAUSES.get(first.clause, 'not a clause of this version')}"]
    lines += [f"  tried  {first.check}: {each.what}" for each in alike[:SHOWN]]
    lines += [f"         and {len(alike) - SHOWN} more"] if len(alike) > SHOWN else []
    return "\n".join([*lines, *_indented_section("  came   ", first.detail)])


class SectionTally(Struct, frozen=True):
    """Trials of a section, and what they took."""

    passed: int = 0
    failed: int = 0
    unsupported: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, results: Sequence[TrialResult]) -> "SectionTally":
        counts = Counter(result.outcome.value for result in results)
        return cls(**counts, seconds=sum(result.seconds for result in results))

    def __str__(self) -> str:
        numbers = ", ".join(f"{getattr(self, each.value)} {each.value}" for each in TrialOutcome)
        return f"{numbers}, {self.seconds:.1f} s"


class ConformanceReport(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All trials on one platform, and where they ran."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)] = FORMAT
    platform: Name
    distribution: Name  # that brings the platform: quintet, or a vendor's
    version: Name  # of the distribution
    quintet: Name  # its version
    contract: int  # CONTRACT_VERSION
    devices: Annotated[int, Meta(ge=1)]  # that models were shared out over
    detail: Text  # what the platform says of the device
    emulated: bool  # it stands in for its device: "auto" never comes to it
    machine: dict[Name, Text]
    date: Name  # when it ended, UTC
    sections: tuple[Name, ...]  # that were run, whether they tried anything or not
    quick: bool = False  # some trials of each check: it vouches for nothing
    untried: tuple[Name, ...] = ()  # sections with checks that were left out, as quintet-llm-tools was missing
    results: Annotated[tuple[TrialResult, ...], Meta(max_length=1_000_000)]

    @classmethod
    def of(
        cls,
        subject: "Subject",
        sections: Sequence[str],
        results: Sequence[TrialResult],
        quick: bool = False,
        untried: Sequence[str] = (),
    ) -> "ConformanceReport":
        ours = subject.chosen.source == OURS
        return cls(
            platform=subject.name,
            distribution=OUR_NAME if ours else subject.chosen.source,
            version=__version__ if ours else subject.chosen.version,
            quintet=__version__,
            contract=CONTRACT_VERSION,
            devices=subject.devices,
            detail=subject.facts.detail,
            emulated=not subject.facts.auto_select,
            machine=_machine(),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            sections=tuple(sections),
            quick=quick,
            untried=tuple(untried),
            results=tuple(results),
        )

    @property
    def passed(self) -> bool:
        return not self.failures and not self.untried

    @property
    def failures(self) -> list[TrialResult]:
        return [result for result in self.results if result.outcome is TrialOutcome.FAILED]

    def _alike(self) -> list[list[TrialResult]]:
        """Failures, those of one check with one reason together."""
        groups: dict[tuple[str, str, str], list[TrialResult]] = {}
        for result in self.failures:
            groups.setdefault((result.clause, result.check, result.detail), []).append(result)
        return [*groups.values()]

    def _unsupported(self) -> list[str]:
        """Formats what is unsupported: a line for each reason, which names the claim that would turn it on."""
        groups: dict[str, list[TrialResult]] = {}
        for result in self.results:
            if result.outcome is TrialOutcome.UNSUPPORTED:
                groups.setdefault(" ".join(result.detail.split()), []).append(result)
        lines = [
            f"  {len(alike):4}  {', '.join(sorted({each.clause for each in alike}))}: {reason}"
            for reason, alike in groups.items()
        ]
        head = "unsupported (trials, clauses, and the claim or method that would turn them on):"
        return ["", head, *lines] if lines else []

    def tallies(self) -> dict[str, SectionTally]:
        """Tallies by section, in the order that they ran."""
        return {each: SectionTally.of([r for r in self.results if r.section == each]) for each in self.sections}

    def __str__(self) -> str:
        """The page that `quintet conformance` prints."""
        tallies, width = self.tallies(), max(map(len, (*self.sections, "all")))
        package = f"{self.distribution} {self.version}, contract {self.contract}"
        if self.distribution != OUR_NAME:
            package += f", quintet {self.quintet}"
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        lines = [
            f"{self.platform}{' (emulated)' * self.emulated}{', some trials of each check' * self.quick}: {package}",
            f"{self.detail or 'no detail'}; {machine}; {self.date}",
            "",
            *(f"{section:{width}}  {tally}" for section, tally in tallies.items()),
            f"{'all':{width}}  {SectionTally.of(self.results)}",
        ]
        for alike in self._alike():
            lines += ["", summarize_alike(alike)]
        lines += self._unsupported()
        clauses = sorted({result.clause for result in self.failures})
        verdict = f"broken: {', '.join(clauses)}" if clauses else "every clause that was tried holds"
        if self.untried:
            verdict += f"\nnot tried: checks of {', '.join(self.untried)} that run models; {MISSING}"
        return "\n".join([*lines, "", verdict])

    def write(self, path: Path) -> None:
        """One result to a line, so that two reports can be compared."""
        head = json.dumps({k: v for k, v in msgspec.to_builtins(self).items() if k != "results"}, indent=1)
        rows = ",\n  ".join(_row(result) for result in self.results)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{head[:-2]},\n "results": [\n  {rows}\n ]\n}}\n', encoding="utf-8")


def read(path: str | Path) -> ConformanceReport:
    """A report that was written before. ValueError says what is wrong with it."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is longer than {MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
        found = msgspec.json.decode(data, type=_Format).format
        if found != FORMAT:
            raise ValueError(
                f"its format is {found}, and this quintet {__version__} reads format {FORMAT}; run it anew"
            )
        report = msgspec.json.decode(data, type=ConformanceReport)
        _check(report)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise ValueError(f"{path} is no report of `quintet conformance`: {error}") from None
    return report


class _Format(Struct):
    """Field that every report has, in any format."""

    format: int


def _check(report: ConformanceReport) -> None:
    """Checks what types do not: each result's section is in the report, and each failure has a reason."""
    for result in report.results:
        if result.section not in report.sections:
            raise ValueError(f"{result.check} is of section {result.section!r}, which is not among its sections")
        if result.outcome is not TrialOutcome.PASSED and not result.detail:
            raise ValueError(f"{result.clause}, {result.what!r}: {result.outcome.value} without a reason")


def shortened(text: str) -> str:
    """A reason at most as long as a report keeps."""
    return text if len(text) <= MAX_DETAIL else text[:MAX_DETAIL] + " [...]"


def _row(result: TrialResult) -> str:
    values: dict[str, Any] = msgspec.to_builtins(result)
    return json.dumps({**values, "seconds": round(result.seconds, 3)})


def _machine() -> dict[str, str]:
    """Facts that a reader wants beside the device's own."""
    return {
        "system": f"{host.system()} {host.machine()}",
        "python": host.python_version(),
        "torch": str(torch.__version__),
    }


def _indented_section(head: str, text: str) -> list[str]:
    first, *rest = text.splitlines() or [""]
    return [head + first, *(" " * len(head) + line for line in rest)]
