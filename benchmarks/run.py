"""Runs every benchmark that this machine can, beside the ceilings measured in the same run, and writes the results.

python benchmarks/run.py [--only qwen3-0.6b] [--quick] [--out benchmarks/results/cpu.json]
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import ceilings, engine_step  # noqa: E402  the path is set first, so that the script runs by itself
from benchmarks.checkpoints import SHAPES, checkpoint  # noqa: E402

GIGA = 1e9


def generation(name: str, dtype: str) -> dict[str, Any]:
    """The figures of one checkpoint, and their shares of ceilings measured before and after."""
    folder = checkpoint(name)
    before = ceilings.measure()
    command = [sys.executable, "-m", "benchmarks.generation", str(folder), "--dtype", dtype]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    after = ceilings.measure()
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    read = (before.read_gbs + after.read_gbs) / 2
    first, last = ((each.bfloat16_gflops if dtype == "bfloat16" else each.fma_gflops) for each in (before, after))
    flops = (first + last) / 2
    figures["model"] = name
    figures["ceilings"] = {
        "read_gbs": [before.read_gbs, after.read_gbs],
        "gflops": [first, last],
    }
    decode, prefill = figures["decode_batch1_tokens_per_s"], figures["prefill_512_tokens_per_s"]
    figures["shares"] = {
        "decode_batch1_of_read_bandwidth": decode * figures["weight_bytes"] / GIGA / read,
        "prefill_512_of_peak": prefill * 2 * figures["layer_parameters"] / GIGA / flops,
        "peak_rss_over_weights": figures["peak_rss_bytes"] / figures["weight_bytes"],
    }
    return figures


def steps() -> list[dict[str, Any]]:
    """The engine's own cost on the null platform."""
    greedy = engine_step.measure({"temperature": 0.0}, "greedy")
    drawn = engine_step.measure({"temperature": 0.8, "top_k": 50, "seed": 1}, "temperature 0.8, top_k 50, seeded")
    return [asdict(cost) for cost in (*greedy, *drawn)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [f"{name}:{dtype}" for name in SHAPES for dtype in ("bfloat16", "float32")]
    parser.add_argument("--runs", nargs="*", choices=every, default=every, help="checkpoints and types; all by default")
    parser.add_argument("--quick", action="store_true", help="the engine's step cost alone")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu.json")
    args = parser.parse_args()
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "engine_step_null": steps()}
    results["ceilings"] = asdict(ceilings.measure())
    runs = [] if args.quick else [run.split(":") for run in args.runs]
    results["generation"] = [generation(name, dtype) for name, dtype in runs]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
