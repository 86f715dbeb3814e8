"""Prove that a platform keeps the contract: run the conformance kit, and print what holds and what does not.

Exit code 0: every trial passed; 1: something failed; 2: the kit, or a part of it, could not run.
"""

import argparse
import faulthandler
import logging
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.cli.commands._crash_reporter import CrashReporter
from quintet.cli.commands._engine import print_stderr
from quintet.common.tools_package import MISSING
from quintet.common.value_parsers import boolean, list_of, optional, text
from quintet.config import AUTO, EngineConfig, option, read_environment
from quintet.config.schema import flags

if TYPE_CHECKING:
    from quintet.conformance.check import Check, Trial
    from quintet.conformance.report import ConformanceReport, TrialResult

PASSED, FAILED, COULD_NOT_RUN = 0, 1, 2
WIDTH = 14  # columns of a section's name
_SHARED = ("device", "tensor_parallel_size")  # fields of EngineConfig that are flags here too


@dataclass(frozen=True)
class ConformanceRequest:
    """Sections to run, and files for the results."""

    section: tuple[str, ...] = option(
        (), list_of(text), "run this section alone; --list names them", group="kit", metavar="SECTION"
    )
    quick: bool = option(
        False, boolean, "some trials of each check, within a minute: for while you work, and no proof", group="kit"
    )
    family: str = option(
        "", text, "the trials of this model family alone (a model_type), such as one that a package adds", group="kit"
    )
    json: str | None = option(
        None, optional(text), "write every result to this file, as JSON", group="kit", metavar="FILE"
    )
    support: str | None = option(
        None, optional(text), "write the table of support, which a platform's package ships, to this file",
        group="kit", metavar="FILE",
    )  # fmt: skip

    def check_output_files(self) -> None:
        """Refuses files that could not be written when the kit ends, minutes later."""
        for what, given in (("section", self.section), ("quick", self.quick), ("family", self.family)):
            if given and self.support:
                raise ValueError(
                    f"--support needs every trial: a table of some would leave out the others; drop --{what}"
                )
        for path in map(Path, filter(None, (self.json, self.support))):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
                raise ValueError(f"{path} cannot be written; name another file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_arguments(parser, ConformanceRequest)
    others = [each.name for each in EngineConfig.__dataclass_fields__.values() if each.name not in _SHARED]
    flags.add_arguments(parser, EngineConfig, others)
    parser.add_argument("--list", action="store_true", help="print the sections and their clauses, and run nothing")


def run(arguments: argparse.Namespace) -> int:
    """Progress goes to standard error, the report to standard output."""
    if arguments.list:
        print(_listing())
        return PASSED
    request = flags.from_arguments(arguments, ConformanceRequest)
    if not faulthandler.is_enabled():
        faulthandler.enable()  # where a device's library takes the process down: the lines of Python that were running
    try:
        request.check_output_files()
        report = _report(request, read_environment().apply(flags.from_arguments(arguments, EngineConfig)))
    except (ValueError, OSError, MemoryError) as error:
        print_stderr(f"quintet conformance: could not run: {error or type(error).__name__}")
        return COULD_NOT_RUN
    print(report)
    _save_report(report, request)
    if report.failures:
        return FAILED
    return PASSED if report.passed else COULD_NOT_RUN


def _report(request: ConformanceRequest, config: EngineConfig) -> "ConformanceReport":
    from quintet.conformance import kit
    from quintet.conformance.harness.subject import Subject

    logging.getLogger("transformers").setLevel(logging.ERROR)  # the reference's remarks on its own settings
    if config.tensor_parallel_size == AUTO:
        raise ValueError("tensor_parallel_size='auto': a report is of a number of ranks; give it")
    kit.checks(request.section)  # refuses what is no section before a device is opened
    if request.support and kit.untried():
        raise ValueError(f"--support needs every trial; {MISSING}")
    subject = Subject(config.device, config.tensor_parallel_size)
    subject.make()  # settings that the platform refuses are no trial's fault
    with CrashReporter() as witness:
        progress = ConformanceProgress(witness)
        selection = kit.TrialSelection(request.quick, request.family)
        report = kit.run(subject, request.section, progress.show, progress.begin, progress.start, selection)
        progress.end()
    return report


def _save_report(report: "ConformanceReport", request: ConformanceRequest) -> None:
    """Writes the report to the requested files; and for `quintet platforms --features`, if the run was complete."""
    from quintet.conformance import features
    from quintet.engine.platform_support import local_table_path

    if request.json:
        report.write(Path(request.json))
    if request.section or request.quick or report.untried:
        return
    table = features.support(report)
    if request.support:
        table.write(Path(request.support))
    place = local_table_path(report.platform, request.family)
    try:
        table.write(place)
    except OSError as error:  # a read-only home takes nothing from the report
        print_stderr(f"not kept for `quintet platforms --features`: {place} cannot be written ({error.strerror})")


class ConformanceProgress:
    """One line for each section as it runs, on a terminal with the trial of the moment, and every failure in full as
    soon as it is there."""

    def __init__(self, witness: CrashReporter) -> None:
        self._witness, self._live = witness, sys.stderr.isatty()
        self._section = ""
        self._results: list[TrialResult] = []
        self._failed: TrialResult | None = None  # the last of the section: its name stands far above then

    def begin(self, section: str) -> None:
        self.end()
        self._section = section
        print(f"{section:{WIDTH}}", end="", file=sys.stderr, flush=True)

    def start(self, check: "Check", trial: "Trial") -> None:
        running = f"{check.name}: {trial.what}"
        self._witness.set_line(f"quintet conformance: the process died in section {check.section}, trial {running}")
        if self._live:
            self._rewrite(f"{self._section:{WIDTH}}{len(self._results)} trials, now {running}")

    def show(self, result: "TrialResult") -> None:
        from quintet.conformance.report import TrialOutcome

        self._results.append(result)
        if result.outcome is not TrialOutcome.FAILED:
            return
        if self._live:
            self._rewrite("" if self._failed else f"{self._section:{WIDTH}}")
        last = self._failed
        if last and (last.check, last.detail) == (result.check, result.detail):
            print_stderr(f"  so did {result.check}: {result.what}")
        else:
            print_stderr(f"{result}" if last else f"\n{result}")
        self._failed = result

    def end(self) -> None:
        """The numbers of the section that ran, on its own line if nothing failed."""
        from quintet.conformance.report import SectionTally

        if self._section and self._live:
            self._rewrite(f"{self._section:{WIDTH}}{SectionTally.of(self._results)}")
            print_stderr("")
        elif self._section:
            again = f"{self._section:{WIDTH}}" if self._failed else ""
            print_stderr(again + str(SectionTally.of(self._results)))
        self._section, self._results, self._failed = "", [], None

    def _rewrite(self, line: str) -> None:
        """Puts this in the place of the line that the cursor is on."""
        room = shutil.get_terminal_size().columns - 1
        print(f"\r{line[:room]}\x1b[K", end="", file=sys.stderr, flush=True)


def _listing() -> str:
    from quintet.conformance import kit
    from quintet.conformance.clauses import CLAUSES

    width = max(map(len, CLAUSES))
    lines = []
    for section in kit.section_names():
        lines += [section, *(f"  {c:{width}}  {text}" for c, text in CLAUSES.items() if c.split(".")[0] == section)]
    return "\n".join(lines)
