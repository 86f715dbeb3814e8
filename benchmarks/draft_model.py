"""Measures a draft model or head beside decoding without one, one request at a time.

python -m benchmarks.draft_model MODEL DRAFT [--guesses 2 4] [--out benchmarks/results/draft-model.json]
python -m benchmarks.draft_model bundled bundled-draft --guesses 1 2 3 0 --rounds 5 --out ...
python -m benchmarks.draft_model MODEL.gguf DRAFT.gguf --guesses 3 --vocab 0 65536 --llama PYTHON

The bundled model is asked what it was trained to answer, and others to write code. All engines answer each prompt in
turn, in one process, so that a busy machine slows all; a prompt's figure is the best of its rounds. The tokens must be
equal. PYTHON is an interpreter with llama-cpp-python, which answers with the same files and guesses in a process of its
own; it may choose other tokens.
"""

import argparse
import itertools
import json
import logging
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
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
    "Write a Python decorator that caches the results of a function.",
    "Write a TypeScript interface for a user with a name, an email and a list of roles.",
    "Write a C++ class template for a ring buffer.",
    "Write a Java method that counts the vowels of a string.",
    "Write a regular expression in Python that matches ISO dates, and use it.",
    "Write a Dockerfile for a Flask application.",
    "Write a React component with a counter and two buttons.",
    "Write a Python generator that yields prime numbers.",
    "Write a makefile that compiles every .c file of a folder.",
    "Write a Kotlin function that groups words by their first letter.",
    "Write a Python script that reads a CSV file and prints the mean of each column.",
    "Implement quicksort in Haskell.",
)
Way = tuple[int, int]  # guesses, 0: as many as the policy gives; and tokens that are guessed, 0: all
LLAMA = Path(__file__).parent / "peers" / "draft_llama_cpp.py"


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


class LlamaCpp:
    """llama.cpp with and without drafts, in a process of its own."""

    def __init__(self, python: str, model: str, draft: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([python, str(LLAMA), model, draft], stdin=pipe, stdout=pipe, text=True)
        self.gains: dict[int, list[float]] = {}
        self.rates: list[float] = []  # tokens/s without drafts
        self.accepted: dict[int, list[float]] = {}

    def answer(self, prompt: list[int], tokens: int, guesses: int) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens, "guesses": guesses}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def measure(self, prompt: list[int], tokens: int, guesses: Sequence[int]) -> None:
        """Answers a prompt without drafts and with each number of them."""
        alone = self.answer(prompt, tokens, 0)
        self.rates.append(len(alone["tokens"]) / alone["seconds"])
        for count in guesses:
            drafted = self.answer(prompt, tokens, count)
            rate = len(drafted["tokens"]) / drafted["seconds"]
            self.gains.setdefault(count, []).append(rate / self.rates[-1])
            self.accepted.setdefault(count, []).append(drafted["accepted"])

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "guesses": count,
                "gain": round(statistics.median(gains), 2),
                "gain_least": round(min(gains), 2),
                "gain_most": round(max(gains), 2),
                "without": round(statistics.median(self.rates), 2),
                "accepted": round(statistics.mean(self.accepted[count]), 3),
            }
            for count, gains in self.gains.items()
        ]


def engines_of(args: argparse.Namespace) -> tuple[LLM, dict[Way, LLM]]:
    """Returns an engine without drafts, and one for each number of guesses and tokens that are guessed."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": "256M",
        "max_num_seqs": 4,
        "use_tqdm": False,
    }
    engines = {}
    for count, vocab in itertools.product(args.guesses, args.vocab):
        spec = {"model": args.draft, "num_speculative_tokens": count or max(args.guesses)}
        spec |= {"draft_vocab_size": vocab} if vocab else {}
        engines[count, vocab] = LLM(args.model, **settings, speculative_config={**spec, "adapt_num_tokens": count == 0})
    return LLM(args.model, **settings), engines


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Returns the figures of each way, and those of llama.cpp."""
    plain, engines = engines_of(args)
    llama = LlamaCpp(args.llama, args.model, args.draft) if args.llama else None
    prompts = prompts_of(args.model)[: args.prompts]
    alone: dict[str, list[float]] = {prompt: [] for prompt in prompts}
    took: dict[Way, dict[str, list[float]]] = {way: {prompt: [] for prompt in prompts} for way in engines}
    length = 0
    for _ in range(args.rounds):
        for prompt in prompts:
            seconds, wanted = answer(plain, prompt, args.tokens)
            alone[prompt].append(seconds)
            for way, llm in engines.items():
                seconds, found = answer(llm, prompt, args.tokens)
                assert found == wanted, f"drafts changed the answer to {prompt!r}"
                took[way][prompt].append(seconds)
            length += len(wanted)
            print(len(wanted), alone[prompt][-1], {way: took[way][prompt][-1] for way in engines}, flush=True)
            if llama is not None:
                message = [{"role": "user", "content": prompt}]
                ids = plain.get_tokenizer().apply_chat_template(message, add_generation_prompt=True, return_dict=False)
                llama.measure(ids, len(wanted), [count for count in args.guesses if count])
    rows = []
    for (count, vocab), llm in engines.items():
        times, counts = took[count, vocab], llm.get_stats()
        gains = [min(alone[prompt]) / min(times[prompt]) for prompt in prompts]
        rows.append(
            {
                "guesses": count or "adapted",
                "draft_vocab_size": vocab or "all",
                "gain": round(statistics.median(gains), 2),
                "gain_least": round(min(gains), 2),
                "gain_most": round(max(gains), 2),
                "tokens_per_s": round(length / args.rounds / sum(min(times[p]) for p in prompts), 2),
                "without": round(length / args.rounds / sum(min(alone[p]) for p in prompts), 2),
                "accepted": round(counts["num_accepted_tokens"] / max(1, counts["num_draft_tokens"]), 3),
                "accepted_at": accepted_at(llm),
            }
        )
        print(rows[-1], flush=True)
    peer = [] if llama is None else llama.rows()
    print(*peer, sep="\n", flush=True)
    return {"rows": rows, **({"llama.cpp": peer} if peer else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--guesses", type=int, nargs="+", default=[2, 4, 0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[0], help="draft_vocab_size; 0: all")
    parser.add_argument("--llama", help="an interpreter with llama-cpp-python")
    parser.add_argument("--prompts", type=int, help="the first so many alone")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "draft-model.json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    figures = measure(args)
    names = {"model": Path(args.model).name, "draft": Path(args.draft).name}
    facts = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads(), "load": os.getloadavg()[0]}
    args.out.write_text(json.dumps({**names, **facts, **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
