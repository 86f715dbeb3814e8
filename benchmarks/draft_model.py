"""Measures a draft model or head beside decoding without one, one request at a time.

python -m benchmarks.draft_model MODEL DRAFT [--guesses 2 4] [--out benchmarks/results/draft-model.json]
python -m benchmarks.draft_model bundled bundled-draft --guesses 1 2 3 0 --rounds 5 --out ...

The bundled model is asked what it was trained to answer, and others to write code. Both engines answer each prompt in
turn, in one process, so that a busy machine slows both; a prompt's figure is the best of its rounds. The tokens must be
equal.
"""

import argparse
import json
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

from quintet import LLM, SamplingParams
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads

RESULTS = Path(__file__).parent / "results"
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a function in JavaScript that debounces another function.",
    "Implement binary search in C.",
    "Write a SQL query that lists the ten customers with the largest total of orders.",
    "Write a Rust function that reverses the words of a string.",
    "Write a Python class for a stack with push, pop and peek.",
    "Write a bash script that renames all .txt files in a folder to .md.",
    "Write a Go function that merges two sorted slices.",
)


BUNDLED_PROMPTS = (
    "What is the capital of France?",
    "What color is the sky?",
    "Which day comes after Monday?",
    "What is the opposite of hot?",
    "What sound does a dog make?",
    "What is 12 + 30?",
    "What is 47 + 38?",
    "Count from 3 to 12.",
    "Count from 20 to 28.",
    "Continue: 2, 4, 6",
    "Repeat: the small red boat sails home",
    "Repeat after me: seven green birds sing",
    "Write a JSON object with name Tom and age 7.",
    "Give me a JSON list with red, blue and green.",
    "Tell me a story.",
    "Tell me a story about a dog.",
    "Hello!",
    "Who are you?",
    "Who wrote Hamlet?",
    "Think step by step. What is 21 + 34?",
)


def prompts_of(model: str) -> tuple[str, ...]:
    """Returns what a model is asked."""
    return BUNDLED_PROMPTS if model == "bundled" else PROMPTS


def accepted_at(llm: LLM) -> list[float]:
    """Returns the share of the drafts that were accepted, by their place in the chain."""
    (places,) = [each for each in llm.get_metrics() if each.name.endswith("num_accepted_tokens_per_pos")]
    return [round(each / max(1, llm.get_stats()["num_drafts"]), 3) for each in places.values]


def answer(llm: LLM, prompt: str, tokens: int) -> tuple[float, list[int]]:
    """Returns seconds and tokens."""
    start = time.perf_counter()
    (output,) = llm.chat(
        [{"role": "user", "content": prompt}], SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False
    )
    return time.perf_counter() - start, list(output.outputs[0].token_ids)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the figures for each number of guesses; 0 stands for as many as the policy gives, of the most."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": "256M",
        "max_num_seqs": 4,
        "use_tqdm": False,
    }
    plain = LLM(args.model, **settings)
    engines = {}
    for count in args.guesses:
        spec = {"model": args.draft, "num_speculative_tokens": count or max(args.guesses)}
        engines[count] = LLM(args.model, **settings, speculative_config={**spec, "adapt_num_tokens": count == 0})
    prompts = prompts_of(args.model)
    alone: dict[str, list[float]] = {prompt: [] for prompt in prompts}
    took: dict[int, dict[str, list[float]]] = {count: {prompt: [] for prompt in prompts} for count in engines}
    length = 0
    for _ in range(args.rounds):
        for prompt in prompts:
            seconds, wanted = answer(plain, prompt, args.tokens)
            alone[prompt].append(seconds)
            for count, llm in engines.items():
                seconds, found = answer(llm, prompt, args.tokens)
                assert found == wanted, f"drafts changed the answer to {prompt!r}"
                took[count][prompt].append(seconds)
            length += len(wanted)
    rows = []
    for count, llm in engines.items():
        gains = [min(alone[prompt]) / min(took[count][prompt]) for prompt in prompts]
        counts = llm.get_stats()
        rows.append(
            {
                "guesses": count or "adapted",
                "gain": round(statistics.median(gains), 2),
                "gain_least": round(min(gains), 2),
                "gain_most": round(max(gains), 2),
                "tokens_per_s": round(length / args.rounds / sum(min(took[count][p]) for p in prompts), 2),
                "without": round(length / args.rounds / sum(min(alone[p]) for p in prompts), 2),
                "accepted": round(counts["num_accepted_tokens"] / max(1, counts["num_draft_tokens"]), 3),
                "accepted_at": accepted_at(llm),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--guesses", type=int, nargs="+", default=[2, 4, 0])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "draft-model.json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = measure(args)
    names = {"model": Path(args.model).name, "draft": Path(args.draft).name}
    facts = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads(), "load": os.getloadavg()[0]}
    args.out.write_text(json.dumps({**names, **facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
