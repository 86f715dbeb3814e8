"""`quintet run-batch --resume`: what an earlier run has answered stays, the rest is asked for; and how far a run is."""

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quintet.cli import main as cli
from quintet.clients import batch_resume as resume
from quintet.clients import progress
from quintet.clients.batch_files import BatchCounts
from quintet.clients.progress import BatchProgress
from tests.clients.conftest import Fake
from tests.helpers.servers.serving import PATIENCE, until


def line(name: str, model: str = "echo", prompt: str = "x") -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": prompt}}


@dataclass
class Job:
    """One batch, run as often as wanted."""

    folder: Path
    fake: Fake

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    @property
    def part(self) -> Path:
        return self.folder / "out.jsonl.part"

    def words(self, *lines: dict[str, Any]) -> list[str]:
        (self.folder / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        words = ["run-batch", "-i", str(self.folder / "in.jsonl"), "-o", str(self.output)]
        return [*words, "--url", self.fake.url, "--concurrency", "1", "--max-retries", "0"]

    def run(self, *lines: dict[str, Any], words: tuple[str, ...] = ("--resume",)) -> int:
        return cli.main([*self.words(*lines), *words])

    def answered(self) -> list[tuple[str, int]]:
        found = [json.loads(each) for each in self.output.read_text().splitlines()]
        return [(each["custom_id"], each["response"]["status_code"]) for each in found]

    def prompts(self) -> list[str]:
        """What was asked since the last look."""
        found = [each["prompt"] for each in self.fake.bodies()]
        self.fake.asked.clear()
        return found


@pytest.fixture
def job(tmp_path: Path, fake: Fake) -> Job:
    return Job(tmp_path, fake)


FOUR = (line("a", prompt="1"), line("b", prompt="2"), line("c", "busy", prompt="3"), line("d", prompt="4"))


def kill_in_the_midst(job: Job) -> None:
    """Two lines are answered, and the server has asked to come for the third again in an hour."""
    job.fake.busy, job.fake.retry_after = 1, "3600"
    words = [*job.words(*FOUR), "--max-retries", "1"]
    run = subprocess.Popen([sys.executable, "-m", "quintet.cli.main", *words])
    try:
        assert until(lambda: job.part.exists() and job.part.read_bytes().count(b"\n") == 2 and job.fake.busy == 0)
    finally:
        run.send_signal(signal.SIGKILL)
    assert run.wait(PATIENCE) == -signal.SIGKILL
    job.prompts()


@pytest.mark.parametrize("torn", [b"", b'{"id": "batch_req_', b"\0" * 100])
def test_a_killed_run_goes_on_behind_its_last_whole_line(
    job: Job, torn: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    kill_in_the_midst(job)
    with job.part.open("ab") as file:
        file.write(torn)
    kept = job.part.read_bytes()[: len(job.part.read_bytes()) - len(torn)]
    assert job.run(*FOUR) == 0
    assert job.prompts() == ["3", "4"]
    assert job.output.read_bytes().startswith(kept) and not job.part.exists()
    assert job.answered() == [("a", 200), ("b", 200), ("c", 200), ("d", 200)]
    assert "4 lines: 4 answered (2 lines of an earlier run) in" in capsys.readouterr().err


def test_without_resume_all_is_asked_again(job: Job) -> None:
    kill_in_the_midst(job)
    assert job.run(*FOUR, words=()) == 0
    assert job.prompts() == ["1", "2", "3", "4"]


def test_what_failed_is_asked_for_again_and_the_rest_stays(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.fake.busy = 1
    assert job.run(*FOUR, words=()) == 1
    assert "1 failed (1 HTTP_429; --resume asks again)" in capsys.readouterr().err
    job.prompts()
    before = job.output.read_text().splitlines()
    assert job.run(*FOUR) == 0
    assert job.prompts() == ["3"]
    after = job.output.read_text().splitlines()
    assert (after[:2], after[3:]) == (before[:2], before[3:])
    assert job.answered() == [("a", 200), ("b", 200), ("c", 200), ("d", 200)]


def test_a_run_that_resumes_may_be_killed_too(job: Job) -> None:
    """What the older file has behind the part is still found."""
    job.fake.busy = 1
    job.run(*FOUR, words=())
    whole = job.output.read_bytes().splitlines(keepends=True)
    job.part.write_bytes(whole[0] + whole[1][:50])  # as if killed at its second line
    job.prompts()
    assert job.run(*FOUR) == 0
    assert job.prompts() == ["3"]
    assert job.output.read_bytes().splitlines(keepends=True)[1] == whole[1]


def test_where_nothing_is_open_nobody_is_asked(job: Job) -> None:
    lines = FOUR[:2]
    assert job.run(*lines, words=()) == 0
    before = job.output.read_bytes()
    job.prompts()
    assert job.run(*lines) == 0 and job.fake.asked == []
    assert job.output.read_bytes() == before
    job.output.rename(job.part)  # killed just before the file got its name
    assert job.run(*lines) == 0 and job.fake.asked == []
    assert job.output.read_bytes() == before


def test_lines_may_be_added_to_the_input(job: Job) -> None:
    assert job.run(*FOUR[:2], words=()) == 0
    job.prompts()
    assert job.run(*FOUR) == 0
    assert job.prompts() == ["3", "4"]


@pytest.mark.parametrize("name", ["output", "part"])
@pytest.mark.parametrize(
    ("other", "says"),
    [
        ([line("a", prompt="1"), line("z")], "line 2 answers 'b', and the input has 'z' there"),
        ([line("a", prompt="1"), line("b", prompt="new")], "line 2 answers 'b', which asks for something else in the"),
        ([line("a", prompt="1")], "line 2 is there, and the input has 1 requests"),
    ],
)
def test_answers_of_another_input_are_refused_and_stay(
    job: Job, name: str, other: list[dict[str, Any]], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job.run(*FOUR[:2], words=())
    if name == "part":
        job.output.rename(job.part)
    there = getattr(job, name)
    before = there.read_bytes()
    job.prompts()
    capsys.readouterr()
    assert job.run(*other) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{there} belongs to another input: " in said and says in said and "--output-file" in said
    assert there.read_bytes() == before and job.fake.asked == []


def test_what_is_no_answer_is_not_written_over(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.part.write_text("dear diary\n")
    assert job.run(*FOUR) == 1
    assert "line 1 is no answer of a batch" in capsys.readouterr().err
    assert job.part.read_text() == "dear diary\n"


def test_two_runs_do_not_write_one_file(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.part.write_bytes(b"")
    with job.part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert job.run(*FOUR) == 1
    assert "another run writes" in capsys.readouterr().err


def test_an_input_that_can_be_read_once_is_not_resumed(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(write)
    with open(read, "rb") as source, pytest.raises(ValueError, match="--resume reads the input twice"):
        resume.resume_batch(source, tmp_path / "out", tmp_path / "part", 1000)


def test_a_run_that_is_interrupted_says_how_to_go_on(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: BatchProgress, tally: BatchCounts) -> None:
        if tally.done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(BatchProgress, "show", interrupted)
    assert job.run(*FOUR, words=()) == 130
    assert capsys.readouterr().err.splitlines() == [
        f"the answers so far are in {job.part}; --resume goes on from there"
    ]


def test_a_large_file_is_never_held_whole(tmp_path: Path) -> None:
    """20 MB of requests, as many of answers."""
    whole = b"".join(json.dumps(line(str(at), prompt="x" * 10_000)).encode() + b"\n" for at in range(2000))
    source, output = io.BytesIO(whole), tmp_path / "out"
    with output.open("w") as file:
        for request in resume.read(source, 2**20):
            body = {"text": "x" * 10_000}
            file.write(json.dumps({"id": request.id, "custom_id": request.custom_id, "response": body}) + "\n")
    source.seek(0)
    tracemalloc.start()
    try:
        work = resume.resume_batch(source, tmp_path / "none", output, 2**20)
        assert (work.total, work.num_open, work.num_done) == (2000, 0, 2000)
        assert list(work.requests()) == []
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------------------- progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass
class Clock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_off_a_terminal_a_line_comes_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock, tally = Clock(), BatchCounts()
    with BatchProgress(200, now=clock) as shown:
        for at in range(101):
            clock.seconds = at * progress.EVERY / 50
            tally.answered, tally.tokens = at + 1, 20 * at
            shown.show(tally)
    assert capsys.readouterr().err.splitlines() == [
        "51 of 200 requests, 100.0 tokens/s, 0 failed", "101 of 200 requests, 100.0 tokens/s, 0 failed",
    ]  # fmt: skip


def test_on_a_terminal_there_is_a_bar(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.fake.busy = 1
    job.run(*FOUR, words=())
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    job.fake.busy = 1
    assert job.run(*FOUR) == 1
    last = screen.getvalue().split("\r")[-1]
    assert "4/4" in last and "tokens/s, 1 failed" in last


def test_quiet_shows_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    assert job.run(*FOUR, words=("--quiet",)) == 0
    assert screen.getvalue() == ""
