"""Measures what the engine makes of drafts that are right with a known chance, beside what their cost allows.

python -m benchmarks.drafts_oracle [--model qwen3-0.6b] [--out benchmarks/results/drafts-oracle.json]

One request on random weights, in 16, 8 and 4 bits. With k drafts of chance p a step gives (1 - p^(k + 1)) / (1 - p)
tokens; the ideal is that, divided by what the model alone takes for k + 1 tokens over what it takes for one. Engines
without drafts, with k and with as many as the policy gives take turns; a gain is the median of the rounds' ratios. The
tokens must be equal.
"""

import argparse
import json
import logging
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import drafts_hybrid
from quintet import LLM
from quintet.engine.executor.worker import Worker
from quintet.interface.types import HostBatch
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads

RESULTS = Path(__file__).parent / "results"
BITS: dict[str, dict[str, Any]] = {"16": {}, "8": {"quantization": "int8"}, "4": {"quantization": "int4"}}


class ModelTimes:
    """Seconds of the model's steps, by their tokens, while it is entered."""

    def __init__(self) -> None:
        self.seconds: defaultdict[int, list[float]] = defaultdict(list)

    def __enter__(self) -> "ModelTimes":
        self._run = run = Worker.run

        def timed(worker: Worker, host: HostBatch, *rest: Any) -> Any:
            start = time.perf_counter()
            result = run(worker, host, *rest)
            self.seconds[len(host.token_ids)].append(time.perf_counter() - start)
            return result

        Worker.run = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Worker.run = self._run  # type: ignore[method-assign]


def measure(folder: Path, bits: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one number of bits."""
    settings: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 1,
        "max_model_len": 512, "use_tqdm": False, "enable_prefix_caching": False, "kv_cache_memory_bytes": "128M",
    }  # fmt: skip
    spec = {
        "method": "custom_class",
        "model": "benchmarks.drafts_hybrid:Oracle",
        "num_speculative_tokens": args.guesses,
    }
    specs = {"none": None, "fixed": {**spec, "adapt_num_tokens": False}, "adapted": spec}
    engines = {way: LLM(**settings, **BITS[bits], speculative_config=each) for way, each in specs.items()}
    oracle = drafts_hybrid.Oracle
    oracle.chance = args.chance
    _, oracle.tokens, _ = drafts_hybrid.timed(engines["none"], args.tokens, 1)
    times: dict[str, list[float]] = {way: [] for way in engines}
    counts: dict[str, dict[str, float]] = {}
    with ModelTimes() as model:
        for turn in range(args.rounds + 1):  # steps are recorded in the first
            for way, llm in engines.items():
                took, found, counts[way] = drafts_hybrid.timed(llm, args.tokens, 1)
                assert found == oracle.tokens, "drafts changed the tokens"
                if turn:
                    times[way].append(took)
            if not turn:
                model.seconds.clear()
    one, several = (statistics.median(model.seconds[size]) for size in (1, args.guesses + 1))
    ideal = (1 - args.chance ** (args.guesses + 1)) / (1 - args.chance) * one / several
    gains = {
        way: statistics.median(a / b for a, b in zip(times["none"], times[way], strict=True))
        for way in ("fixed", "adapted")
    }
    row = {
        "bits": bits, "tokens_per_s_without": round(args.tokens / min(times["none"]), 1),
        "cost_of_a_step": round(several / one, 2), "ideal": round(ideal, 2), "gain": round(gains["fixed"], 2),
        "share_of_ideal": round(gains["fixed"] / ideal, 2), "gain_adapted": round(gains["adapted"], 2),
        "tokens_per_step": round(args.tokens / counts["fixed"]["num_steps"], 2),
        "accepted": round(counts["fixed"]["num_accepted_tokens"] / counts["fixed"]["num_draft_tokens"], 2),
    }  # fmt: skip
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--bits", nargs="+", default=list(BITS), choices=list(BITS))
    parser.add_argument("--chance", type=float, default=0.8)
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "drafts-oracle.json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    folder = drafts_hybrid.write_config(args.model)
    facts = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads(), "load": os.getloadavg()[0]}
    asked = {"model": args.model, "guesses": args.guesses, "chance": args.chance}
    rows = [measure(folder, bits, args) for bits in args.bits]
    args.out.write_text(json.dumps({**facts, **asked, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
