"""`quintet bench simulate` beside the real thing: one trace on real servers of 1, 2 and 4 engines, and played.

    python -m benchmarks.simulate [--engines 1 2 4] [--rounds 3] [--rate 0.6] [--out benchmarks/results/simulate.json]

Costs are measured for each number of engines, since they share the cores of this machine, before the trace is sent to
real servers and after it: where the machine's speed comes and goes, a real run lies between two simulated ones,
and is compared with their mean. Errors are of one round; the result has their median. Files are kept in
benchmarks/checkpoints/simulate.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import HERE, checkpoint, with_tokenizer
from benchmarks.serving import QUINTET, server
from quintet.clients.load_generator import arrival_times
from quintet.clients.request_traces import TraceEntry, write_trace
from quintet.platforms.cpu.cpu_info import describe

FOLDER = HERE / "simulate"
# fmt: skip
FLAGS = (
    "--max-model-len",
    "512",
    "--max-num-batched-tokens",
    "256",
    "--max-num-seqs",
    "16",
    "--num-pages",
    "1024",
)
REQUESTS, GROUPS, SHARED = 40, 6, 48
FIGURES = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms")


def trace(rate: float) -> Path:
    """Prompts of 64 to 256 tokens, half of which share 48 with others; answers of 16 to 48; a Poisson process."""
    draw, entries = random.Random(7), []
    for number, at in enumerate(arrival_times(REQUESTS, rate, 7)):
        lengths = draw.randrange(64, 257), draw.randrange(16, 49)
        group = draw.randrange(GROUPS) if number % 2 else None
        entries.append(TraceEntry(at, *lengths, group=group, shared_length=0 if group is None else SHARED))
    file = FOLDER / "trace.jsonl"
    write_trace(str(file), entries)
    return file


def run(*words: str) -> None:
    done = subprocess.run([*QUINTET, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout)


def costs(folder: Path, engines: int) -> None:
    words = ("--measure", str(folder), "-o", str(FOLDER / f"costs-{engines}.json"), *FLAGS, "-dp", str(engines))
    run("bench", "simulate", *words)


def real(folder: Path, engines: int, file: Path, url: str | None) -> None:
    """On a server that runs already, or one of its own. It has answered others before: its small steps are recorded."""
    if url is None:
        with server(str(folder), *FLAGS, "-dp", str(engines)) as (started, _):
            real(folder, engines, file, started)
        return
    took = str(FOLDER / f"real-{engines}.json")
    warm = ["--warmup", str(8 * engines), "--max-concurrency", "8"]
    run("bench", "serve", "--url", url, "--num-prompts", "1", "--input-len", "20", "--output-len", "40", *warm)
    run("bench", "serve", "--url", url, "--trace", str(file), "--json", took)


def play(engines: int, file: Path) -> dict[str, Any]:
    """The figures, with the costs of last."""
    words = ["--costs", str(FOLDER / f"costs-{engines}.json"), "--trace", str(file), "-dp", str(engines)]
    run("bench", "simulate", *words, "--json", str(FOLDER / f"played-{engines}.json"))
    return _read("played", engines)


def _read(name: str, engines: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}-{engines}.json").read_text())
    return found


def compared(engines: int, played: list[dict[str, Any]]) -> dict[str, Any]:
    """One round: what was played before and after, and what was real between them."""
    found, costs = _read("real", engines), _read("costs", engines)
    rows: dict[str, Any] = {"sharing": costs["sharing"], "latency_ms": round(costs["latency"] * 1e3, 2)}
    rows["costs_median_error"] = costs["measured"]["median_error"]
    rows["mean_utilization_played"] = round(statistics.mean(each["mean_utilization"] for each in played), 3)
    for figure in FIGURES:
        both = [each[figure] for each in played]
        middle = statistics.mean(both)
        error = round(middle / found[figure] - 1, 4)
        rows[figure] = {"real": round(found[figure], 2), "played": [round(each, 2) for each in both], "error": error}
    return rows


def summed(engines: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarizes the errors of all rounds."""
    errors = {name: [each[name]["error"] for each in rounds] for name in FIGURES}
    middle = {name: round(statistics.median(each), 4) for name, each in errors.items()}
    spans = {name: [round(min(each), 4), round(max(each), 4)] for name, each in errors.items()}
    return {"engines": engines, "median_errors": middle, "least_and_most": spans, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rate", type=float, default=0.6, help="requests per second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", help="of a server with these flags that runs already")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/simulate.json"))
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder, file = with_tokenizer(checkpoint(args.shape)), trace(args.rate)
    rows = []
    for engines in args.engines:
        rounds: list[dict[str, Any]] = []
        costs(folder, engines)
        before = play(engines, file)
        for _ in range(args.rounds):
            real(folder, engines, file, args.url)
            costs(folder, engines)
            after = play(engines, file)
            rounds.append(compared(engines, [before, after]))
            print(engines, json.dumps(rounds[-1]), flush=True)
            before = after
        rows.append(summed(engines, rounds))
        print(engines, rows[-1]["median_errors"], rows[-1]["least_and_most"], flush=True)
        head = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": len(os.sched_getaffinity(0))}
        content = {**head, "shape": args.shape, "rate": args.rate, "requests": REQUESTS, "runs": rows}
        args.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
