"""`quintet bench simulate` beside the real thing: one trace on real servers of 1, 2 and 4 engines, and played.

    python -m benchmarks.simulate [--engines 1 2 4] [--parts costs real play] [--out benchmarks/results/simulate.json]

Costs are measured for each number of engines, since they share the cores of this machine. The parts may be run one by
one; what they find is kept in benchmarks/checkpoints/simulate.
"""

import argparse
import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import HERE, checkpoint, with_tokenizer
from benchmarks.serving import QUINTET, server
from quintet.platforms.cpu.features import describe
from quintet.server.clients.load import arrivals
from quintet.server.clients.traces import Entry, write_trace

FOLDER = HERE / "simulate"
FLAGS = (
    "--max-model-len", "512", "--max-num-batched-tokens", "256", "--max-num-seqs", "16", "--num-pages", "1024",
)  # fmt: skip
REQUESTS, GROUPS, SHARED = 40, 6, 48
FIGURES = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms")


def trace(rate: float) -> Path:
    """Prompts of 64 to 256 tokens, half of which share 48 with others; answers of 16 to 48; a Poisson process."""
    draw, entries = random.Random(7), []
    for number, at in enumerate(arrivals(REQUESTS, rate, 7)):
        lengths = draw.randrange(64, 257), draw.randrange(16, 49)
        group = draw.randrange(GROUPS) if number % 2 else None
        entries.append(Entry(at, *lengths, group=group, shared_length=0 if group is None else SHARED))
    file = FOLDER / "trace.jsonl"
    write_trace(str(file), entries)
    return file


def run(*words: str) -> None:
    done = subprocess.run([*QUINTET, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout)


def costs(folder: Path, engines: int) -> None:
    run(
        "bench",
        "simulate",
        "--measure",
        str(folder),
        "-o",
        str(FOLDER / f"costs-{engines}.json"),
        *FLAGS,
        "-dp",
        str(engines),
    )


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


def play(engines: int, file: Path) -> float:
    """Seconds that it took."""
    began = time.perf_counter()
    words = ["--costs", str(FOLDER / f"costs-{engines}.json"), "--trace", str(file), "-dp", str(engines)]
    run("bench", "simulate", *words, "--json", str(FOLDER / f"played-{engines}.json"))
    return time.perf_counter() - began


def compared(engines: int) -> dict[str, Any]:
    found = {name: json.loads((FOLDER / f"{name}-{engines}.json").read_text()) for name in ("real", "played", "costs")}
    rows: dict[str, Any] = {"engines": engines, "costs_median_error": found["costs"]["measured"]["median_error"]}
    rows["sharing"] = found["costs"]["sharing"]
    rows["prefix_cache_hit_rate_played"] = round(found["played"]["prefix_cache_hit_rate"], 4)
    rows["mean_utilization_played"] = round(found["played"]["mean_utilization"], 3)
    for figure in FIGURES:
        took, said = found["real"][figure], found["played"][figure]
        rows[figure] = {"real": round(took, 2), "played": round(said, 2), "error": round(said / took - 1, 4)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rate", type=float, default=0.6, help="requests per second")
    parser.add_argument("--url", help="of a server with these flags that runs already")
    parts = ("costs", "real", "play")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/simulate.json"))
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder, file = with_tokenizer(checkpoint(args.shape)), trace(args.rate)
    for engines in args.engines:
        if "costs" in args.parts:
            costs(folder, engines)
        if "real" in args.parts:
            real(folder, engines, file, args.url)
        if "play" in args.parts:
            print(f"{engines} engines: played in {play(engines, file):.1f} s")
    if "play" in args.parts:
        rows = [compared(engines) for engines in args.engines]
        head = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": len(os.sched_getaffinity(0))}
        content = {**head, "shape": args.shape, "rate": args.rate, "requests": REQUESTS, "runs": rows}
        args.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
