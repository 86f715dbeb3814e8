"""Runs the checks on one platform, one trial after the other, and writes down what each gave."""

import importlib
import itertools
import math
import pkgutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from quintet.common.plugins import load_plugins
from quintet.common.suggestions import refuse_unknown
from quintet.common.tools_package import MISSING, has_tools
from quintet.conformance import sections
from quintet.conformance.check import CHECKS, Check, ContractViolation, NotSupported, Trial, evenly_chosen
from quintet.conformance.harness.subject import Subject
from quintet.conformance.report import ConformanceReport, TrialOutcome, TrialResult, shortened
from quintet.conformance.sections import with_models

ORDER = (
    "probe", "device", "memory", "ops", "attention", "cache", "communicator", "graphs", "sampling", "models", "numbers",
    "adapters", "oracle", "faults",
)  # fmt: skip


@dataclass(frozen=True)
class TrialSelection:
    """Trials of a check that run: by default, all."""

    quick: bool = False  # as many as the square root of all, from the first to the last
    family: str = ""  # those of this model family's features alone

    @property
    def partial(self) -> bool:
        return self.quick or bool(self.family)

    def of(self, trials: Iterable[Trial]) -> list[Trial]:
        """Returns those of a check's trials."""
        known = list(trials)
        if self.family:
            known = [each for each in known if self.family in {name.partition("/")[2] for name in each.features}]
        return evenly_chosen(known, math.ceil(math.sqrt(len(known)))) if self.quick else known


ALL_TRIALS = TrialSelection()


def section_names() -> list[str]:
    """Returns the sections in the order that they run: those that others depend on come first."""
    return list(ORDER)


def checks(wanted: Sequence[str] = ()) -> list[Check]:
    """Returns the checks of the wanted sections, or all. ValueError: all of them run models, and quintet-llm-tools is
    missing."""
    refuse_unknown("section", wanted, ORDER)
    for package in (sections, with_models) if has_tools() else (sections,):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    kept = [each for each in CHECKS if not wanted or each.section in wanted]
    if not kept:
        raise ValueError(f"every check of {', '.join(wanted)} runs a model; {MISSING}")
    return sorted(kept, key=lambda each: ORDER.index(each.section))


def untried(wanted: Sequence[str] = ()) -> list[str]:
    """Returns those of the wanted sections, or of all, with checks that need quintet-llm-tools, where it is missing."""
    names = [] if has_tools() else [module.name for module in pkgutil.iter_modules(with_models.__path__)]
    return [name for name in ORDER if name in names and (not wanted or name in wanted)]


def run(
    subject: Subject,
    wanted: Sequence[str] = (),
    show: Callable[[TrialResult], None] = lambda result: None,
    begin: Callable[[str], None] = lambda section: None,
    start: Callable[[Check, Trial], None] = lambda check, trial: None,
    selection: TrialSelection = ALL_TRIALS,
) -> ConformanceReport:
    """Every trial of every check; one that fails stops none of the others. `begin` hears of each section before it,
    `start` of each trial before it, `show` of what it gave. ValueError: no trial is selected."""
    load_plugins()  # they may add families
    results: list[TrialResult] = []
    sections = []
    for section, group in itertools.groupby(checks(wanted), lambda each: each.section):
        sections.append(section)
        begin(section)
        for each in group:
            for trial in selection.of(list_trials(each, subject)):
                start(each, trial)
                results.append(run_trial(each, trial))
                show(results[-1])
    if not results and selection.family:
        raise ValueError(
            f"no trial of family {selection.family!r}: it is neither a model_type of docs/models.md nor one that an "
            "installed package adds (quintet.models)"
        )
    return ConformanceReport.of(subject, sections, results, selection.partial, untried(wanted))


def first_failure(subject: Subject, clause: str, among: str = "") -> str | None:
    """Returns the message of a clause's first failed trial; None if all hold. `among`: prefix of the trials' names."""
    for each in checks([clause.partition(".")[0]]):
        for trial in list_trials(each, subject) if each.clause == clause else ():
            if trial.what.startswith(among):
                result = run_trial(each, trial)
                if result.outcome is TrialOutcome.FAILED:
                    return f"{result.what}: {result.detail}"
    return None


def list_trials(of: Check, subject: Subject) -> Iterator[Trial]:
    """Its trials. A check that cannot even list them is one failed trial."""
    try:
        yield from of.trials(subject)
    except Exception as error:
        failure = error

        def again() -> None:
            raise failure

        yield Trial("listing its trials", again)


def run_trial(of: Check, trial: Trial) -> TrialResult:
    """Calls it, and raises nothing."""
    began = time.perf_counter()
    outcome, detail = TrialOutcome.PASSED, ""
    try:
        trial.call()
    except NotSupported as reason:
        outcome, detail = TrialOutcome.UNSUPPORTED, str(reason) or "no reason was given"
        detail += f" ({reason.claim})" if reason.claim else ""
    except ContractViolation as broken:
        outcome, detail = TrialOutcome.FAILED, str(broken)
    except Exception as error:  # whatever a vendor's code raises is its result
        outcome, detail = TrialOutcome.FAILED, f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - began
    return TrialResult(
        of.section, of.clause, of.name, shortened(trial.what), outcome, shortened(detail), seconds, trial.features
    )
