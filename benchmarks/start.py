"""Measures starts on GGUF files: the first line, the first token, a server's first answer; CPU time and memory.

python -m benchmarks.start FILE.gguf [FILE.gguf ...] [--llama-server PROGRAM] [--before CHECKOUT] [--out JSON]

Programs take turns, each start is a process of its own, and medians are given. On a machine that does other work,
compare CPU seconds (user and system, of all processes): wall times hold for the load in the result. `cold`: with
an empty cache folder; files lie in the system's cache all the same. `--before`: an older checkout, its extension built.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.loading import read_seconds

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ("--max-model-len", "2048")
PATIENCE = 300.0  # seconds
POLL = 0.02  # seconds between two requests to a server that loads
SETTLE = 3.0  # seconds before memory is measured: servers do things behind their first answer
LONG = 1900  # words, and tokens, of a prompt that fills the context
PORT = 18471


def generate(checkout: Path, model: Path, cache: Path) -> dict[str, float]:
    """`quintet generate` of one token."""
    command = [sys.executable, "-m", "quintet", "generate", "--model", str(model), *SETTINGS, "--max-tokens", "1", "Hi"]
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as shown:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=shown, **_place(checkout, cache))
        assert process.stdout is not None
        process.stdout.read(1)
        token = time.perf_counter() - begin
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            shown.seek(0)
            raise RuntimeError(shown.read().decode())
    return {
        "first_token_s": token,
        "end_s": time.perf_counter() - begin,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_rss_mib": usage.ru_maxrss / 1024,
    }


def first_line(checkout: Path, model: Path, cache: Path) -> dict[str, float]:
    """`quintet generate` until its first line to standard error, when it is ended."""
    command = [sys.executable, "-m", "quintet", "generate", "--model", str(model), *SETTINGS, "--max-tokens", "1", "Hi"]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **_place(checkout, cache))
    assert process.stderr is not None
    process.stderr.read(1)
    seconds = time.perf_counter() - begin
    process.kill()
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = -signal.SIGKILL
    return {"first_line_s": seconds, "cpu_s": usage.ru_utime + usage.ru_stime}


def serve(checkout: Path, model: Path, cache: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "quintet", "serve", str(model), *SETTINGS, "--port", str(PORT)]
    return _served(command, _place(checkout, cache), str(model))


def llama(program: str, model: Path) -> dict[str, float]:
    command = [program, "-m", str(model), "-c", "2048", "-t", str(os.cpu_count()), "--port", str(PORT), "--no-webui"]
    return _served(command, {}, "any")


def imports(module: str) -> dict[str, float]:
    """Python that imports one module."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", f"import {module}"])
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return {"end_s": time.perf_counter() - begin, "cpu_s": usage.ru_utime + usage.ru_stime}


def _place(checkout: Path, cache: Path) -> dict[str, Any]:
    """Arguments of Popen for a checkout: Python looks for modules in the working directory first."""
    return {"cwd": checkout, "env": {**os.environ, "XDG_CACHE_HOME": str(cache)}}


def _served(command: Sequence[str], place: dict[str, Any], model: str) -> dict[str, float]:
    """Until a server has answered a request of one token, and later the memory of all its processes: after requests of
    a few tokens, and (full_) after one that fills the context."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **place)
    try:
        while not _answers(model, 1):
            if process.poll() is not None or time.perf_counter() - begin > PATIENCE:
                raise RuntimeError(f"{' '.join(command)} does not answer")
            time.sleep(POLL)
        answered, family = time.perf_counter() - begin, _family(process.pid)
        times = [each.cpu_times() for each in family]
        _answers(model, 8)
        time.sleep(SETTLE)
        short = _memory(family)
        _answers(model, 8, "word " * LONG)
        full = {f"full_{name}": value for name, value in _memory(family).items()}
        return {"first_answer_s": answered, "cpu_s": sum(each.user + each.system for each in times), **short, **full}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _memory(family: Sequence[psutil.Process]) -> dict[str, float]:
    """Memory of processes, pages that they share counted once (PSS) or for each (RSS)."""
    found = [each.memory_full_info() for each in family]
    return {"pss_mib": sum(each.pss for each in found) / 2**20, "rss_mib": sum(each.rss for each in found) / 2**20}


def _answers(model: str, tokens: int, prompt: str = "Hello") -> bool:
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens}).encode()
    header = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", body, header)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return bool(answer.read())
    except OSError:  # it loads still
        return False


def _family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}


def measure(model: Path, checkouts: dict[str, Path], program: str | None, rounds: int) -> dict[str, Any]:
    """Returns the medians of all that takes turns, by name."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        turns: dict[str, Callable[[], dict[str, float]]] = {"import torch": lambda: imports("torch")}
        for name, checkout in checkouts.items():
            cache = work / name
            generate(checkout, model, cache)  # seen before, from now on
            turns[f"{name}: first line"] = partial(first_line, checkout, model, cache)
            turns[f"{name}: generate"] = partial(generate, checkout, model, cache)
            turns[f"{name}: generate, cold"] = partial(_cold, checkout, model, work)
            turns[f"{name}: serve"] = partial(serve, checkout, model, cache)
        if program is not None:
            turns["llama-server"] = partial(llama, program, model)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
        for _ in range(rounds):
            for name, turn in turns.items():
                found[name].append(turn())
    return {"file_mib": round(model.stat().st_size / 2**20), "read_s": read_seconds([model])} | {
        name: _medians(each) for name, each in found.items()
    }


def _cold(checkout: Path, model: Path, work: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=work) as empty:
        return generate(checkout, model, Path(empty))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--llama-server", help="the program, built for this machine")
    parser.add_argument("--before", type=Path, help="an older checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    checkouts = {"quintet": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    found: dict[str, Any] = {"cores": os.cpu_count(), "rounds": arguments.rounds}
    for model in arguments.models:
        found["load_average"] = [round(each, 1) for each in os.getloadavg()]
        found[model.name] = measure(model.resolve(), checkouts, arguments.llama_server, arguments.rounds)
        print(json.dumps({model.name: found[model.name]}, indent=2), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
