"""Runs tests with one fault after the other, two side by side, until a test fails or the time is up."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CAUGHT, SURVIVED, CAPPED = "caught", "survived", "survived within the cap"
MARKS = "not slow and not sweep and not network"
SHARE = ("--share", "long=1/10")  # of the long tests, as one run of make test
FIRST_BATCH = 4  # files; each next batch has twice as many: a start costs seconds, and killers come early
HANGS = 120  # seconds after which a test has hung: quick tests take ten
CUT, HUNG = -1000, -1001  # in the place of an exit code


@dataclass(frozen=True)
class Fault:
    """One change of one line, and what loads it in the place of the module."""

    path: str  # below the root
    line: int
    text: str  # of that line
    change: str
    package: str  # row of the table
    module: str  # loaded with the fault
    file: str  # that is loaded
    number: int | None = None  # of the fault in a Python file

    @property
    def key(self) -> str:
        return f"{self.path}:{self.line}: {self.change} [{self.number}]"


@dataclass(frozen=True)
class Outcome:
    """The end of a fault's trial."""

    fault: Fault
    status: str
    by: str = ""  # the test that failed
    files: int = 0  # of tests that were begun
    left: int = 0  # files that the cap left out
    seconds: float = 0.0


class Bench:
    """A virtual environment whose interpreters have the fault; tests run in it, and nothing is installed."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder, self.root = folder, root
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", folder], check=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        shutil.copy(HERE / "report_plugin.py", site / "quintet_fault_report.py")
        outer = sysconfig.get_path("purelib")
        load = (
            "import importlib.util as u; "
            f"s = u.spec_from_file_location('_quintet_instead', {str(HERE / 'instead.py')!r}); "
            f"m = u.module_from_spec(s); s.loader.exec_module(m); m.install({str(folder / 'fault.json')!r})"
        )
        lines = [f"import site; site.addsitedir({outer!r})", load]
        (site / "zz_quintet_fault.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def load(self, fault: Fault | None) -> None:
        """From now on its interpreters have the fault, or none."""
        plan = self.folder / "fault.json"
        plan.unlink(missing_ok=True)
        if fault is not None:
            chosen = {"module": fault.module, "file": fault.file, "number": fault.number}
            plan.write_text(json.dumps(chosen), encoding="utf-8")

    def run(self, tests: Sequence[str], seconds: float, skipped: Sequence[str] = ()) -> tuple[list[str], list[str]]:
        """Returns the files that were begun and the tests that failed, crashed or hung; [""]: pytest itself did."""
        report = self.folder / "report.jsonl"
        report.write_text("", encoding="utf-8")
        command = [self.folder / "bin" / "python", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "quintet_fault_report", "-m", MARKS, f"--timeout={HANGS}", f"--basetemp={self.folder / 't'}"]
        command += [f"--deselect={test}" for test in skipped]
        path = os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        with (self.folder / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, *tests], cwd=self.root, env={**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            code = self._waited(process, time.monotonic() + seconds)
            with _gone():
                os.killpg(process.pid, signal.SIGKILL)  # also what a killed test leaves behind
            process.wait()
        shutil.rmtree(self.folder / "t", ignore_errors=True)
        lines = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        failed = [line["failed"] for line in lines if "failed" in line]
        if code not in (CUT, 0, 5) and not failed:  # 5: no test was chosen
            failed = [next((line["test"] for line in reversed(lines) if "test" in line), "")]
        return list(dict.fromkeys(line["begun"] for line in lines if "begun" in line)), failed

    def _waited(self, process: "subprocess.Popen[bytes]", end: float) -> int:
        """The exit code; CUT at the end; HUNG if compiled code holds the interpreter, and so its time limit."""
        report = self.folder / "report.jsonl"
        while time.monotonic() < end:
            try:
                return process.wait(timeout=min(5, max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                if time.time() - report.stat().st_mtime > HANGS + 30:
                    return HUNG
        return CUT


@contextmanager
def _gone() -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        pass


class Killers:
    """Test files that have caught faults of a source file before: they are tried first."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._known: dict[str, list[str]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def first(self, path: str, tests: Sequence[str]) -> list[str]:
        known = [test for test in self._known.get(path, []) if (ROOT / test).exists()]
        return list(dict.fromkeys([*known, *tests]))

    def add(self, path: str, test: str) -> None:
        with self._lock:
            files = [test.partition("::")[0], *self._known.get(path, [])]
            self._known[path] = list(dict.fromkeys(files))[:5]
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._known, indent=1), encoding="utf-8")


@dataclass
class Trials:
    """Runs of all faults. Tests that fail without a fault are left out; outcomes are written down at once."""

    journal: Path
    cap: float = 360.0  # seconds of tests for a fault
    killers: Killers = field(default_factory=lambda: Killers(ROOT / "build" / "mutants" / "killers.json"))
    broken: set[str] = field(default_factory=set)
    share: Sequence[str] = ()  # words for pytest that choose among the tests
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def done(self) -> dict[str, dict[str, object]]:
        """Outcomes of an earlier run that was broken off, by the fault's key."""
        if not self.journal.exists():
            return {}
        lines = [json.loads(line) for line in self.journal.read_text(encoding="utf-8").splitlines()]
        return {Fault(**line["fault"]).key: line for line in lines}

    def tried(self, fault: Fault, tests: Sequence[str], bench: Bench) -> Outcome:
        """Runs the tests in batches, nearest first, until one fails."""
        start, begun = time.monotonic(), 0
        rest, size = self.killers.first(fault.path, tests), FIRST_BATCH
        outcome = Outcome(fault, SURVIVED)
        while rest and outcome.status != CAUGHT:
            left = self.cap - (time.monotonic() - start)
            if left < 5:
                break
            bench.load(fault)
            batch = rest[:size]
            files, failed = bench.run([*self.share, *batch], left, sorted(self.broken))
            if failed == [""]:  # no test has begun: it counts if it happens again, as where the system killed pytest
                files, failed = bench.run([*self.share, *batch], left, sorted(self.broken))
            if failed and self._fails_without(failed[0], batch, bench):
                rest = [test for test in rest if test != failed[0]]  # a file that cannot be read
                continue  # again, without that test
            done = len(batch) if time.monotonic() - start < self.cap or failed else max(len(files) - 1, 0)
            begun, rest, size = begun + len(files), rest[done:], 2 * size
            if failed:
                outcome = replace(outcome, status=CAUGHT, by=failed[0])
        if rest and outcome.status != CAUGHT:
            outcome = replace(outcome, status=CAPPED, left=len(rest))
        outcome = replace(outcome, files=begun, seconds=round(time.monotonic() - start, 1))
        self._note(outcome)
        return outcome

    def _fails_without(self, test: str, batch: Sequence[str], bench: Bench) -> bool:
        """Runs the failed test again without the fault. What fails then too is skipped from now on."""
        bench.load(None)
        _, failed = bench.run([test] if test else batch, HANGS * 2)
        if failed:
            assert test, f"pytest cannot run {' '.join(batch)}:\n{(bench.folder / 'log').read_text()[-2000:]}"
            with self._lock:
                self.broken.add(test)
        return bool(failed)

    def _note(self, outcome: Outcome) -> None:
        with self._lock, self.journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        if outcome.by:
            self.killers.add(outcome.fault.path, outcome.by)
        fault = outcome.fault
        print(
            f"{outcome.status}: {fault.path}:{fault.line}: {fault.change}  ({outcome.by or outcome.left})", flush=True
        )


@contextmanager
def benches(count: int) -> Iterator[list[Bench]]:
    """Environments for so many faults side by side. Short paths: sockets lie below them."""
    with tempfile.TemporaryDirectory(prefix="qm") as folder:
        yield [Bench(Path(folder) / str(number)) for number in range(count)]
