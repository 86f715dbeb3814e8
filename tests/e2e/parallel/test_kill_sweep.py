"""Any process of a server or an LLM, killed at any moment: no hang, no lost or doubled answer, and nothing left.

A moment is settled by its seed, which is in the test's name:
`make test ARGS="-m sweep tests/e2e/parallel/test_kill_sweep.py -k seed-17-"` plays one again.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quintet import LLM, SamplingParams
from quintet.common.socket_folder import sweep
from quintet_tools.checkpoints.tiny import variant
from tests.helpers.platforms.engines import answers, engine
from tests.helpers.processes import gone
from tests.helpers.servers.serving import Server, until, words_of

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(600)]
pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")

MOMENTS = 200
STUCK = 90.0  # seconds after which what has not ended hangs: all limits here are smaller
LOADING = 6.0  # seconds within which a start is hit
WORKERS = 2
SERVED = (
    "--model", "bundled", "--device", "cpu", "-dp", "2", "--kv-cache-memory-bytes", "16M", "--max-model-len", "256",
    "--api-workers", str(WORKERS), "--enable-sleep-mode", "--max-num-batched-tokens", "64",
)  # fmt: skip
PROMPTS = ("Once upon a time", "The capital of France", "word " * 90)  # the last takes several steps
SAID = 24  # tokens of each answer


@dataclass(frozen=True)
class Moment:
    """What is killed when, and how."""

    seed: int

    @property
    def draw(self) -> random.Random:
        return random.Random(self.seed)

    @property
    def what(self) -> str:
        return ("server", "ranks", "server", "engines")[self.seed % 4]

    @property
    def phase(self) -> str:
        return ("loading", "working", "working", "sleeping", "ending")[self.seed // 4 % 5]

    def __str__(self) -> str:
        return f"seed-{self.seed}-{self.what}-{self.phase}"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files of all processes go, sockets too, for which pytest's own paths may be too long; what is in
    shared memory is looked at, too."""
    expected(), offline_answers()  # what they leave is this process's
    folder = Path(tempfile.mkdtemp(prefix="swept-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(os.listdir("/dev/shm"))
    yield folder
    shutil.rmtree(folder)
    left = {each for each in set(os.listdir("/dev/shm")) - before if "quintet" in each}
    assert not left, f"left in /dev/shm: {left}"


@pytest.mark.parametrize("moment", [Moment(seed) for seed in range(MOMENTS)], ids=str)
def test_nothing_hangs_and_nothing_is_left(moment: Moment, place: Path) -> None:
    if moment.what == "server":
        assert_server_recovers(moment, place)
    else:
        assert_offline_recovers(moment, place)


def kill(moment: Moment, draw: random.Random, process: psutil.Process) -> str:
    """At once, or stopped a while before. What was done, for who reads a failure."""
    said = f"{moment}: {' '.join(words_of(process))[-80:]} ({process.pid})"
    try:
        if draw.random() < 0.4:
            process.suspend()
            time.sleep(draw.random())
            said += ", which stood still before"
        process.kill()
    except psutil.NoSuchProcess:
        said += ", which had ended"
    print(said, flush=True)
    return said


def clean(place: Path, first_was_killed: bool) -> None:
    """No temporary file. What a killed server could not remove is removed by the next that starts."""
    if first_was_killed:
        sweep()
    names = [each.name for each in place.iterdir()]  # torch's own caches are among them
    left = [name for name in names if name.startswith("quintet") and not name.startswith("quintet-serve-")]  # the log
    assert not left, f"left in the folder for temporary files: {left}"


# ----------------------------------------------------------------------------------------------------------- a server


@dataclass
class Callers:
    """Threads that ask a server until they are told to end, and what they heard."""

    url: str
    heard: list[tuple[str, str, str]] = field(default_factory=list)  # (prompt, how it ended, text)
    threads: list[threading.Thread] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)

    def start(self, count: int) -> None:
        for number in range(count):
            self.threads.append(threading.Thread(target=self._run, args=(number,), daemon=True))
            self.threads[-1].start()

    def _run(self, number: int) -> None:
        while not self.ending.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            self.heard.append((prompt, *(_streamed if number % 2 else _whole)(self.url, prompt)))
            if self.heard[-1][1] != "whole":
                time.sleep(0.05)

    def end(self) -> None:
        self.ending.set()
        for each in self.threads:
            each.join(STUCK)
        assert not any(each.is_alive() for each in self.threads), "a caller waits for an answer that does not come"


def _body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": SAID, "temperature": 0, "ignore_eos": True, **more}


def _whole(url: str, prompt: str) -> tuple[str, str]:
    try:
        answer = httpx.post(url + "/v1/completions", json=_body(prompt), timeout=STUCK / 2)
    except httpx.TimeoutException:
        return "hung", ""
    except httpx.HTTPError as error:
        return "broken", str(error)
    if answer.status_code == 200:
        return "whole", answer.json()["choices"][0]["text"]
    return "refused", f"{answer.status_code} {answer.text}"


def _streamed(url: str, prompt: str) -> tuple[str, str]:
    text, ended = "", False
    try:
        with httpx.stream(
            "POST", url + "/v1/completions", json=_body(prompt, stream=True), timeout=STUCK / 2
        ) as answer:
            if answer.status_code != 200:
                return "refused", f"{answer.status_code} {answer.read().decode()}"
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return "refused", line
                    text += "".join(each["text"] for each in event["choices"])
    except httpx.TimeoutException:
        return "hung", text
    except httpx.HTTPError as error:
        return "broken", str(error)
    return ("whole" if ended else "cut", text)


@cache
def expected() -> dict[str, str]:
    """What one engine says."""
    with LLM("bundled", device="cpu", use_tqdm=False, kv_cache_memory_bytes="16M", max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=SAID, ignore_eos=True)
        found = llm.generate(list(PROMPTS), params, use_tqdm=False)
        return {prompt: each.outputs[0].text for prompt, each in zip(PROMPTS, found, strict=True)}


def _tree(server: Server) -> list[psutil.Process]:
    return [psutil.Process(server.process.pid), *server.children()]


def assert_server_recovers(moment: Moment, place: Path) -> None:
    draw, want = moment.draw, expected()
    server = Server(*SERVED, wait=moment.phase != "loading")
    try:
        callers = Callers(server.url)
        if moment.phase == "loading":
            time.sleep(draw.random() * LOADING)
        else:
            assert until(server.all_there)
            callers.start(6)
            _busy(moment, draw, server)
        victims = _tree(server) if server.process.poll() is None else []
        victim = draw.choice(victims) if victims else None
        said = "" if victim is None else kill(moment, draw, victim)
        _heard_out(server, callers, victim, said)
        for prompt, how, text in callers.heard:
            assert how not in ("hung", "cut"), f"{said}: {how} {text!r}"
            assert how != "whole" or text == want[prompt], f"{said}: another answer than that of one engine"
        assert not server.leftovers(STUCK), f"{said}: processes live on: {server.output}"
        clean(place, victim is not None and victim.pid == server.process.pid)
    finally:
        server.close()


def _busy(moment: Moment, draw: random.Random, server: Server) -> None:
    """Brings the server to the moment."""
    time.sleep(draw.random() * 0.7)
    if moment.phase == "sleeping":
        threading.Thread(target=_naps, args=(server.url,), daemon=True).start()
        time.sleep(draw.random())
    elif moment.phase == "ending":
        server.process.send_signal(signal.SIGTERM)
        time.sleep(draw.random() * 0.5)


def _naps(url: str) -> None:
    """Puts the server to sleep and wakes it, as long as it answers. One with requests refuses."""
    try:
        while True:
            httpx.post(url + "/sleep?level=1", timeout=STUCK)
            httpx.post(url + "/wake_up", timeout=STUCK)
    except httpx.HTTPError:
        return


def _heard_out(server: Server, callers: Callers, victim: psutil.Process | None, said: str) -> None:
    """It ends by itself, or serves on and is told to end."""
    died = victim is not None and victim.pid == server.process.pid
    api = victim is not None and not died and victim.pid not in {each.pid for each in server.those("engine_process")}

    def settled() -> bool:
        if server.process.poll() is not None:
            return True
        return api and b"ready: " in server.log.read_bytes() and server.those("api_process") != []

    assert until(settled, STUCK), f"{said}: it neither ends nor serves on: {server.output}"
    if server.process.poll() is None:
        time.sleep(0.3)  # callers have met what is left
        server.process.send_signal(signal.SIGTERM)
    callers.end()
    assert until(lambda: server.process.poll() is not None, STUCK), f"{said}: it does not end: {server.output}"


# ------------------------------------------------------------------------------------------------------------- an LLM

OFFLINE = """
import json, sys, threading
from quintet import LLM, SamplingParams
folder, ranks, engines, phase = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
llm = LLM(folder, device="cpu", skip_tokenizer_init=True, tensor_parallel_size=ranks, data_parallel_size=engines,
          use_tqdm=False, kv_cache_memory_bytes="16M", max_model_len=64, dtype="float32", max_num_batched_tokens=16)
print("ready", flush=True)
ending = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), ending.set()), daemon=True).start()
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[5])]
try:
    while not ending.is_set():
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        print("said", json.dumps([[list(o.outputs[0].token_ids), o.outputs[0].error] for o in outputs]), flush=True)
        if phase == "sleeping":
            llm.sleep(1)
            llm.wake_up()
except RuntimeError as error:
    print("lost", error, flush=True)
llm.close()
print("closed", flush=True)
"""


@cache
def offline_answers() -> list[list[int]]:
    with engine(variant("llama", "plain")) as alone:
        return answers(alone)


def assert_offline_recovers(moment: Moment, place: Path) -> None:
    from quintet.conformance.harness.worker_runner import random_prompts
    from quintet_tools.checkpoints.tiny import VOCAB
    from tests.helpers.platforms.engines import LENGTHS

    draw, want = moment.draw, offline_answers()
    prompts = json.dumps([list(each) for each in random_prompts(5, LENGTHS, VOCAB)])
    sizes = ("2", "1") if moment.what == "ranks" else ("1", "2")
    words = [sys.executable, "-c", OFFLINE, str(variant("llama", "plain").folder), *sizes, moment.phase, prompts]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines, errors = _reading(process.stdout), _reading(process.stderr)
    family = [process.pid]
    try:
        if moment.phase == "loading":
            time.sleep(draw.random() * LOADING)
        else:
            assert until(lambda: any(line.startswith("said") for line in lines), STUCK), errors
            time.sleep(draw.random() * 0.5)
        if moment.phase == "ending":
            assert process.stdin is not None
            process.stdin.write("end\n")
            process.stdin.flush()
            time.sleep(draw.random() * 0.1)
        family += [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
        victim = psutil.Process(draw.choice(family)) if process.poll() is None else None
        said = "" if victim is None else kill(moment, draw, victim)
        ended = until(lambda: process.poll() is not None, STUCK)
        assert ended, f"{said}: it does not end: {lines} {errors}"
        assert until(lambda: gone(*family), STUCK), f"{said}: processes live on: {family}"
        _told(lines, want, said)
        if victim is not None and victim.pid != process.pid and moment.phase != "ending":
            told = [*lines, *errors][-1]
            assert "killed by SIGKILL" in " ".join([*lines, *errors]), f"{said}: nobody hears of it, but {told}"
        clean(place, victim is not None and victim.pid == process.pid)
    finally:
        for pid in family:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _told(lines: list[str], want: list[list[int]], said: str) -> None:
    """Every call has one answer for each prompt: the whole one, or an error."""
    for line in lines:
        if line.startswith("said") and line.endswith("]\n"):
            found = json.loads(line[5:])
            assert len(found) == len(want), f"{said}: {len(found)} answers to {len(want)} prompts"
            for (tokens, error), right in zip(found, want, strict=True):
                assert tokens == right or (error and tokens == right[: len(tokens)]), f"{said}: {tokens} {error}"


def _reading(pipe: Any) -> list[str]:
    """The lines that come, as they come."""
    lines: list[str] = []

    def read() -> None:
        for line in pipe:
            lines.append(line)

    threading.Thread(target=read, daemon=True).start()
    return lines
