"""`make gpu`'s own logic: what is cut off or fails leaves its results and takes no other's."""

import contextlib
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu as benchmark
from quintet.conformance import kit
from quintet.conformance.check import NotSupported
from quintet.conformance.sections import probe
from quintet.platforms.cpu import PLATFORM as CPU
from scripts import gpu as script
from scripts.on_gpu import jobs, parts, sections, wheels
from scripts.on_gpu.jobs import Job, Part

ROOT = Path(__file__).parents[4]
SAYS = "from pathlib import Path; from scripts.on_gpu.jobs import note; import sys, time; "


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-uc", SAYS + code


def ran(tmp_path: Path, *given: Job, together: int = 2, seconds: float = 60.0) -> dict[str, str]:
    """Job -> how it ended."""
    part = Part("part", "a part", lambda settings: list(given), together, seconds)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    return {each.job: each.how for each in jobs.run(part, given, tmp_path, environment)}


def test_a_job_that_fails_stops_none_and_takes_no_results(tmp_path: Path) -> None:
    results = jobs.results_of(tmp_path, "part")
    noted = f"note(Path({str(results)!r}), kind='figure', of='first'); sys.exit(3)"
    ended = ran(
        tmp_path, Job("first", python(noted)), Job("no such", ("/no/such/command",)),
        Job("last", python("print('ran')")), together=1,
    )  # fmt: skip
    assert ended["first"] == "failed (exit 3)" and ended["last"] == "passed"
    assert ended["no such"].startswith("not started: ")
    lines = jobs.read(results)
    assert {"kind": "figure", "of": "first"} in lines
    assert [line["job"] for line in lines if line["kind"] == "job"] == ["first", "no such", "last"]
    assert "[last] ran" in (tmp_path / "part.log").read_text()


def test_a_second_run_takes_nothing_of_the_first(tmp_path: Path) -> None:
    """Trials of other code would be counted, and a section that is cut off now would pass for whole."""
    for word in ("first", "second"):
        ran(tmp_path, Job("said", python(f"print('{word}')"), 30.0))
    assert [line["job"] for line in jobs.read(jobs.results_of(tmp_path, "part"))] == ["said"]
    assert "first" not in (tmp_path / "part.log").read_text()


@pytest.mark.slow
def test_a_job_that_is_cut_off_leaves_what_it_had_and_where_it_was(tmp_path: Path) -> None:
    results = jobs.results_of(tmp_path, "part")
    code = f"note(Path({str(results)!r}), kind='figure', of='slow'); print('began'); time.sleep(600)"
    started = time.monotonic()
    ended = ran(tmp_path, Job("slow", python(code), seconds=8.0), Job("other", python("print('ran')")))
    assert ended == {"slow": "cut off after 8 s", "other": "passed"} and time.monotonic() - started < 300
    assert {"kind": "figure", "of": "slow"} in jobs.read(results)
    log = (tmp_path / "part.log").read_text()
    assert "[slow] began" in log and "Fatal Python error: Aborted" in log, "faulthandler says where it was"


def test_when_a_parts_time_is_up_what_is_left_is_not_started(tmp_path: Path) -> None:
    ended = ran(tmp_path, Job("slow", python("time.sleep(600)")), Job("late", python("")), together=1, seconds=3.0)
    assert ended == {"slow": "cut off after 3 s", "late": "not started: the 3 s are over"}


def test_what_runs_alone_runs_last(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    add = "open({!r}, 'a').write('{}\\n')"
    given = [Job("memory", python(add.format(str(seen), "memory")), alone=True)]
    given += [Job(name, python(add.format(str(seen), name))) for name in ("a", "b", "c")]
    assert set(ran(tmp_path, *given, together=3).values()) == {"passed"}
    assert seen.read_text().split()[-1] == "memory" and len(seen.read_text().split()) == 4


def test_a_signal_that_ends_the_run_ends_its_jobs(tmp_path: Path) -> None:
    log = tmp_path / "part.log"

    def stop() -> None:
        while not log.exists() or "[slow] began" not in log.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    before = signal.getsignal(signal.SIGTERM)
    ended = ran(tmp_path, Job("slow", python("print('began'); time.sleep(600)")), Job("next", python("")), together=1)
    assert ended["slow"] == "failed (exit -9)" and ended["next"] == "not started: it was stopped"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_line_that_was_cut_in_the_middle_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl"
    jobs.note(path, kind="figure", us=1)
    path.write_text(path.read_text() + '{"kind": "fig')
    assert jobs.read(path) == [{"kind": "figure", "us": 1}] and jobs.read(tmp_path / "none") == []


# ------------------------------------------------------------------------------------------- what the parts are


def settings(tmp_path: Path) -> parts.Settings:
    return parts.Settings(tmp_path)


def test_every_part_stays_under_nine_minutes_and_its_jobs_within() -> None:
    for part in parts.parts(8):
        assert part.seconds < 540
        assert all(job.seconds <= part.seconds for job in part.jobs(settings(Path("out"))))


def test_every_section_of_the_kit_is_run_and_memory_alone(tmp_path: Path) -> None:
    assert set(parts.SECTIONS) == set(kit.section_names())
    given = parts.conformance(settings(tmp_path))
    assert {job.name for job in given if job.alone} == {"memory", "report"} and given[-1].name == "report"
    assert sum(job.name.startswith("attention") for job in given) == parts.SECTIONS["attention"]


def test_scripts_that_parts_run_are_there_and_take_their_arguments(tmp_path: Path) -> None:
    for part in parts.parts(2):
        for job in part.jobs(settings(tmp_path)):
            files = [word for word in job.command if word.endswith(".py")]
            assert all((ROOT / each).is_file() for each in files), job.command
    assert all((ROOT / each).exists() for each in parts.HOSTS)
    (kernels,) = (job for job in parts.correct(settings(tmp_path)) if job.name == "kernels")
    ignored = " ".join(kernels.command)
    assert "--ignore tests/platforms/gpu/kernels/test_aot.py" in ignored, "it compiles for other devices, on the host"


@pytest.mark.parametrize(("name", "most"), [("first.sh", 540), ("second.sh", 230)])
def test_a_script_runs_its_parts_within_its_limit_and_leaves_eight_files_at_most(name: str, most: int) -> None:
    words = (ROOT / "scripts" / "on_gpu" / name).read_text().splitlines()[-1].split()
    named = words[words.index("--only") + 1 : words.index("--out")]
    run = [part for part in parts.parts(16) if part.name in named]
    assert [part.name for part in run] == named and sum(part.seconds for part in run) < most
    files = {f"{part.name}.{kind}" for part in run for kind in ("log", "jsonl")}
    for job in (job for part in run for job in part.jobs(settings(Path("out")))):
        files |= {word for word in job.command if word.endswith(".json")}
    assert len(files) <= 8


def test_a_script_is_one_line_that_takes_out(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["bash", "scripts/on_gpu/first.sh", "--list"], cwd=ROOT, env={**os.environ, "PYTHON": sys.executable},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [part.name for part in parts.parts(2)]


def test_pythonpath_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    path = script.environment(Path("/site"), rehearse=False)["PYTHONPATH"].split(os.pathsep)
    assert path == [str(ROOT), str(ROOT / "tools"), "/site", "/theirs"]
    assert script.environment(Path("/site"), rehearse=True)["TRITON_INTERPRET"] == "1"


@pytest.mark.slow
def test_a_rehearsal_puts_a_stand_in_in_the_place_of_cuda() -> None:
    code = "from quintet.platforms import choose; c = choose('cuda'); print(c.source, c.platform.__name__)"
    given = script.environment(Path("/none"), rehearse=True)
    done = subprocess.run([sys.executable, "-c", code], env=given, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["quintet-rehearsal", "Stand"], "so that no report of it passes for the device's"


# ------------------------------------------------------------------------------------------------- the report


@pytest.mark.slow
def test_a_report_has_the_sections_whose_shares_are_all_there(tmp_path: Path) -> None:
    results, report = tmp_path / "conformance.jsonl", tmp_path / "report.json"
    for section, share in (("device", (0, 2)), ("device", (1, 2)), ("probe", (0, 2))):
        assert sections.run("cpu", section, share, results) == 0
    assert sections.join("cpu", results, report) == 1, "probe lacks a share, others all"
    from quintet.conformance.report import read

    kept = read(report)
    assert kept.sections == ("device",) and kept.platform == "cpu"
    whole = [line["result"]["what"] for line in jobs.read(results) if line["kind"] == "trial" and line["share"][1] == 2]
    assert 0 < len(kept.results) < len(whole)


def test_shares_are_whole_when_each_came_to_its_end() -> None:
    assert sections.complete({("ops", 0, 2), ("ops", 1, 2)}, "ops")
    assert not sections.complete({("ops", 0, 2)}, "ops") and not sections.complete(set(), "ops")


def test_run_from_its_sources_the_kit_hides_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    with pytest.raises(NotSupported, match="quintet-llm is not installed"):
        probe._optional(CPU)


# ------------------------------------------------------------------------------------------------- the wheels


def test_what_is_carried_is_what_the_engine_asks_for_and_its_tests() -> None:
    tomllib = pytest.importorskip("tomllib")
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {re.split(r"[><=;\s]", each)[0].lower() for each in project["dependencies"]}
    assert set(wheels.SERVER) < named and {"torch"} < named
    assert set(wheels.roots()) == named - {*wheels.SERVER, "torch"} | set(wheels.TESTED)
    pinned = (ROOT / "constraints-dev.txt").read_text().lower().replace("_", "-")
    loose = {"nvidia-ml-py"}  # of the driver
    assert {name for name in wheels.roots() if f"\n{name.replace('_', '-')}==" not in pinned} == loose


def test_what_is_left_behind_is_asked_for_by_no_tool_that_runs_there() -> None:
    for name in wheels.TESTED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            asked = [each for each in importlib.metadata.requires(name) or [] if "extra ==" not in each]
            assert not {re.split(r"[^\w.-]", each)[0].lower() for each in asked} & set(wheels.IDLE), name


def test_wheels_are_known_by_the_name_of_their_distribution() -> None:
    assert wheels.name_of(Path("a/typing_extensions-4.16.0-py3-none-any.whl")) == "typing-extensions"
    assert 5 * 2**20 < wheels.source_bytes() < wheels.MOST


def test_without_wheels_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(script, "PLACE", tmp_path)
    monkeypatch.setattr(script, "PACKAGES", {**script.PACKAGES, "no_such_module": "no-such-package"})
    assert script.set_up(tmp_path / "none") is None
    said = capsys.readouterr().out
    assert said.startswith("missing: ") and "no-such-package" in said and "make gpu-wheels" in said


def test_a_shape_to_try_is_no_shape_of_a_result() -> None:
    assert benchmark.TRIED in benchmark.SHAPES
    assert benchmark.TRIED not in parts.Settings(Path("out")).shapes
