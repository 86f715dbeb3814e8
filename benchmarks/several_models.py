"""Loads `quintet serve --models` of three models with room for two: counts lost and wrong answers, measures memory.

python -m benchmarks.several_models [--seconds 240] [--clients 6] [--out benchmarks/results/several-models.json]

The models are the bundled one with three values of rope_theta, so that each answers a prompt with a text of its own.
Clients ask one model each for some requests, whole and in streams, then another. All run on the same cores.
"""

import argparse
import json
import random
import re
import statistics
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.serving import server
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads

THETAS = {"plain": 10_000, "low": 50, "high": 1_000_000}
BUDGET = 950 * 2**20  # bytes; each model is planned with 0.40 to 0.45 GiB, most of it for its two processes
PROMPTS = ("Once upon a time", "What is the capital of France?", "The sky is", "12 + 30 =")
TOKENS = 24
IN_ROW = 6  # requests of a client to one model
PATIENCE = 600.0  # seconds for one answer: a model may wait for two others
SAMPLED = 0.5  # seconds between two looks at the memory


@dataclass
class Counts:
    """Counts of the clients and of the watcher."""

    answered: Counter[str] = field(default_factory=Counter)  # by model
    lost: list[str] = field(default_factory=list)  # reasons
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each answer
    peak_memory: int = 0  # bytes of the server and its engines (PSS)
    peak_planned: int = 0


def ask(url: str, model: str, prompt: str, stream: bool) -> tuple[str, str]:
    """Returns the model that the answer names, and its text."""
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
    answer.raise_for_status()
    lines = re.findall(r"^data: (\{.*)$", answer.text, re.M) if stream else [answer.text]
    parts = [json.loads(each) for each in lines]
    if stream and (not answer.text.endswith("data: [DONE]\n\n") or any("error" in each for each in parts)):
        raise ValueError(f"a stream broke off: {answer.text[-200:]}")
    return parts[0]["model"], "".join(each["choices"][0]["text"] for each in parts if each["choices"])


def client(url: str, seed: int, end: float, expected: dict[tuple[str, str], str], counts: Counts) -> None:
    """Asks until `end`, one request after the other."""
    rng = random.Random(seed)
    while time.monotonic() < end:
        model = rng.choice(list(THETAS))
        for _ in range(IN_ROW):
            prompt, begun = rng.choice(PROMPTS), time.monotonic()
            if begun >= end:
                return
            try:
                name, text = ask(url, model, prompt, rng.random() < 0.5)
            except (httpx.HTTPError, ValueError) as error:
                counts.lost.append(f"{model}: {error}")
                continue
            counts.seconds.append(time.monotonic() - begun)
            counts.answered[model] += 1
            if (name, text) != (model, expected[model, prompt]):
                counts.wrong.append(f"{model}: {name}: {text!r}")


def watch(url: str, ended: threading.Event, counts: Counts) -> None:
    """Follows the memory of the server's processes, and its plan."""
    while not ended.wait(SAMPLED):
        counts.peak_memory = max(counts.peak_memory, sum(map(_pss, psutil.Process().children(recursive=True))))
        memory = httpx.get(f"{url}/models/loaded", timeout=PATIENCE).json()["memory"]
        counts.peak_planned = max(counts.peak_planned, memory["planned"])


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it has ended
        return 0


def run(seconds: float, clients: int) -> dict[str, Any]:
    """Returns the counts of one run. Processes of the caller besides the server's are counted in its memory."""
    counts, ended = Counts(), threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.json"
        entry = {"model": "bundled", "num_pages": 130}
        models = {name: {**entry, "hf_overrides": {"rope_theta": theta}} for name, theta in THETAS.items()}
        file.write_text(json.dumps(models))
        flags = ("--models", str(file), "--memory-budget", str(BUDGET), "--max-wait", str(PATIENCE))
        with server(*flags) as (url, _), ThreadPoolExecutor(clients + 1) as pool:
            expected = {(model, prompt): ask(url, model, prompt, False)[1] for model in THETAS for prompt in PROMPTS}
            distinct = len({tuple(expected[model, prompt] for prompt in PROMPTS) for model in THETAS})
            watcher, end = pool.submit(watch, url, ended, counts), time.monotonic() + seconds
            jobs = [pool.submit(client, url, seed, end, expected, counts) for seed in range(clients)]
            for job in jobs:
                job.result()
            ended.set()
            watcher.result()
            shown = httpx.get(f"{url}/metrics").text
    times = sorted(counts.seconds)
    return {
        "seconds": seconds, "clients": clients, "models": len(THETAS), "distinct_models": distinct,
        "requests": len(times) + len(counts.lost), "lost": len(counts.lost), "wrong": len(counts.wrong),
        "examples": [*counts.lost[:3], *counts.wrong[:3]], "answered": dict(counts.answered),
        "loads": _total(shown, "loads"), "unloads_for_memory": _total(shown, "unloads", 'reason="memory"'),
        "engines_ended_by_themselves": _total(shown, "unloads", 'reason="exit"'),
        "budget_mib": BUDGET >> 20, "peak_planned_mib": counts.peak_planned >> 20,
        "peak_memory_mib": counts.peak_memory >> 20,
        "answer_s": {"median": round(statistics.median(times), 3), "longest": round(times[-1], 1)} if times else {},
    }  # fmt: skip


def _total(metrics: str, name: str, label: str = "") -> int:
    lines = re.findall(rf"^quintet:model_{name}_total\{{(.*)\}} (\S+)$", metrics, re.M)
    return sum(int(float(value)) for labels, value in lines if label in labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    machine = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads()}
    figures = json.dumps({**machine, **run(given.seconds, given.clients)}, indent=2)
    print(figures)
    if given.out is not None:
        given.out.write_text(figures + "\n")


if __name__ == "__main__":
    main()
