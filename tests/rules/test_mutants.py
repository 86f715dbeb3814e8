"""`make mutants`: faults are drawn, reach every process that a test starts, and are counted honestly."""

import ast
import subprocess
from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutation import csrc_faults, python_faults, table
from scripts.mutation.trials import CAPPED, CAUGHT, ROOT, SURVIVED, Bench, Fault, Killers, Outcome, Trials

SCANNER = "quintet/parsers/scanner.py"


@pytest.mark.slow
def test_a_seed_draws_the_same_faults_from_each_package() -> None:
    faults = mutants.drawn(12, 3)
    assert [fault.key for fault in faults] == [fault.key for fault in mutants.drawn(12, 3)]
    assert [fault.key for fault in faults] != [fault.key for fault in mutants.drawn(12, 4)]
    assert [fault.package for fault in faults] == [name for name in mutants.CORE for _ in range(2)]
    assert not any(
        "kv_cache" in fault.path or "sampling" in fault.path for fault in faults if fault.package == "engine"
    )


def test_a_fault_reaches_processes_without_environment_and_no_source(tmp_path: Path) -> None:
    fault = next(fault for fault in mutants.places("parsers", SCANNER) if "self._at = text, 0" in fault.text)
    code = "from quintet.parsers.scanner import Scanner; print(Scanner('x')._at)"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-I', '-c', {code!r}], env={{}}, check=True)"
    before, bench = (ROOT / SCANNER).read_bytes(), Bench(tmp_path / "bench")
    printed = []
    for chosen in (None, fault):
        bench.load(chosen)
        command = [bench.folder / "bin" / "python", "-c", inner]
        printed.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert printed == ["0\n", "1\n"]
    assert (ROOT / SCANNER).read_bytes() == before


@pytest.mark.slow
def test_a_fault_is_caught_by_what_fails_with_it_alone(tmp_path: Path) -> None:
    fault = next(fault for fault in mutants.places("parsers", SCANNER) if "self._at = text, 0" in fault.text)
    looks = "from quintet.parsers.scanner import Scanner\n\ndef test_it() -> None:\n    assert Scanner('x')._at == 0\n"
    texts = {"test_broken.py": "def test_no() -> None:\n    assert False\n", "test_blind.py": "def test_it(): pass\n"}
    for name, text in {**texts, "test_looks.py": looks}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    trials, bench = (
        Trials(tmp_path / "journal", 10_000, Killers(tmp_path / "killers")),
        Bench(tmp_path / "bench", tmp_path),
    )
    caught = trials.tried(fault, [*texts, "test_looks.py"], bench)
    assert (caught.status, caught.by, caught.left) == (CAUGHT, "test_looks.py::test_it", 0)
    assert trials.broken == {"test_broken.py::test_no"}
    assert trials.tried(fault, ["test_blind.py"], bench).status == SURVIVED
    assert list(trials.done()) == [fault.key]


class CutOff:
    """Bench on which pytest ends before its first test, at first."""

    def __init__(self, times: int) -> None:
        self.times = times

    def load(self, fault: Fault | None) -> None:
        self.faulty = fault is not None

    def run(self, tests: list[str], seconds: float, skipped: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
        self.times -= self.faulty
        return ([], [""]) if self.faulty and self.times >= 0 else (tests, [])


@pytest.mark.parametrize(("times", "status"), [(1, SURVIVED), (2, CAUGHT)])
def test_pytest_that_ends_before_a_test_has_begun_counts_if_it_happens_again(
    times: int, status: str, tmp_path: Path
) -> None:
    trials = Trials(tmp_path / "journal", 10_000, Killers(tmp_path / "killers"))
    fault = Fault("a.py", 1, "x", "0 -> 1", "engine", "a", "a.py", 0)
    assert trials.tried(fault, ["test_a.py"], CutOff(times)).status == status  # type: ignore[arg-type]


def test_survivors_and_those_of_the_cap_are_counted_apart() -> None:
    faults = [Fault("a.py", line, "x", "0 -> 1", "engine", "a", "a.py", line) for line in range(3)]
    ends = [Outcome(faults[0], CAUGHT), Outcome(faults[1], SURVIVED), Outcome(faults[2], CAPPED, left=7)]
    lines = [{"fault": vars(end.fault), "status": end.status, "left": end.left} for end in ends]
    result = table.summary(lines, [], seed=0)
    assert result["packages"] == {"engine": {"faults": 3, "caught": 1, "capped": 1}}
    assert (result["faults"], result["caught"]) == (3, 1)


def test_each_fault_of_python_is_one_change_that_compiles() -> None:
    source = "def f(a, b=2):\n    return a < 1 and not b + 2\n"
    found = python_faults.faults(ast.parse(source))
    assert [what for _, what, _ in found] == [
        "1 -> 2",
        "2 -> 3",
        "Add -> Sub",
        "And -> Or",
        "Lt -> LtE",
        "not -> not not",
    ]
    made = [python_faults.broken(source, number, "f.py") for number in range(len(found))]
    functions = [next(each for each in code.co_consts if hasattr(each, "co_code")) for code in made]
    assert len({(code.co_code, code.co_consts) for code in functions}) == len(found)


def test_faults_of_kernels_leave_comments_strings_and_templates_alone() -> None:
    text = (
        "#define LESS(a, b) a < b \\\n    + 1\n"
        '// a < b\nconst char* s = "x + 1"; /* 2 * 3\n 4 */\n'
        "template <typename T>\nint f(T* a, int b) { return !a || b + 1 <= 0x20 ? b * 2 : b * 2.5; }\n"
    )
    found = csrc_faults.places(text)
    assert [place.change for place in found] == [
        "! -> nothing", "|| -> &&", "+ -> -", "1 -> 2", "<= -> <", "* -> +", "2 -> 3", "* -> + #2",
    ]  # fmt: skip
    assert {place.line for place in found} == {7}
    assert "!a && b + 1" in found[1].applied(text)


def test_faults_that_change_nothing_name_lines_that_are_there() -> None:
    for path, text, change in table.equivalents():
        lines = [line.strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
        assert text in lines, f"scripts/mutants_equivalent.txt: {path} has no line {text!r} any more: remove the entry"
        assert "->" in change
