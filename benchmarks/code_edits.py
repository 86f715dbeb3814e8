"""Measures n-gram and suffix drafts on edits of given code, and a proposer whose drafts are never accepted.

    python -m benchmarks.code_edits --model qwen2.5-coder-0.5b-instruct-Q4_K_M.gguf [--only edits|refused] [--out FILE]

Edits: a chat model returns a given file with one change, one request at a time; most of the answer stands in the
prompt. Refused: requests decode at once with drafts that are all wrong, where every step that checks them is a loss.
Engines with and without drafts take turns; the tokens must be equal.
"""

import argparse
import json
import logging
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quintet import LLM, SamplingParams
from quintet.config.speculative import SpeculativeConfig
from quintet.engine.request import Request
from quintet.engine.spec_decode.proposer import Proposer
from quintet.platforms.cpu.cpu_info import describe

CODE = '''class Inventory:
    """Items of a shop by their name."""

    def __init__(self):
        self.items = {}
        self.log = []

    def add(self, name, count, price):
        if count <= 0:
            raise ValueError("count must be positive")
        if name in self.items:
            self.items[name]["count"] += count
        else:
            self.items[name] = {"count": count, "price": price}
        self.log.append(("add", name, count))

    def remove(self, name, count):
        if name not in self.items:
            raise KeyError(name)
        if self.items[name]["count"] < count:
            raise ValueError("not enough items")
        self.items[name]["count"] -= count
        if self.items[name]["count"] == 0:
            del self.items[name]
        self.log.append(("remove", name, count))

    def total(self):
        return sum(item["count"] * item["price"] for item in self.items.values())

    def cheapest(self):
        return min(self.items, key=lambda name: self.items[name]["price"])
'''
EDITS = (
    "Rename the class to Stock.",
    "Rename the method total to value.",
    "Add the method most_expensive beside cheapest.",
)
ASK = "{edit} Return the complete code and nothing else.\n\n```python\n{code}```"
WAYS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 12, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 12, "suffix_decoding_max_cached_requests": 0},
}
WRONG = {"method": "custom_class", "model": "benchmarks.code_edits:Wrong", "num_speculative_tokens": 4}


class Wrong(Proposer):
    """Proposes a token far from the last one, over and over."""

    def __init__(self, config: SpeculativeConfig, vocab_size: int) -> None:
        self.num_drafts, self._vocab = config.num_speculative_tokens, vocab_size

    def propose(self, room: Sequence[tuple[Request, int]]) -> None:
        for request, most in room:
            request.draft_tokens = [(request.token_ids[-1] + 7919) % self._vocab] * most


def engine(model: str, **settings: Any) -> LLM:
    return LLM(model, device="cpu", max_model_len=2048, max_num_seqs=16, use_tqdm=False, **settings)


def timed(llm: LLM, prompts: list[Any], tokens: int) -> tuple[float, list[list[int]], dict[str, float]]:
    """Seconds, tokens of each prompt, and what the engine counted."""
    params, before, start = SamplingParams(temperature=0.0, max_tokens=tokens), llm.get_stats(), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took, after = time.perf_counter() - start, llm.get_stats()
    return took, [list(each.outputs[0].token_ids) for each in outputs], {key: after[key] - before[key] for key in after}


def edits(model: str, rounds: int) -> dict[str, Any]:
    """Gain on each edit: the median of the rounds' ratios."""
    engines = {"none": engine(model), **{way: engine(model, speculative_config=how) for way, how in WAYS.items()}}
    tokenizer, found = engines["none"].get_tokenizer(), {}
    for edit in EDITS:
        message = {"role": "user", "content": ASK.format(edit=edit, code=CODE)}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        times: dict[str, list[float]] = {way: [] for way in engines}
        for turn in range(rounds + 1):  # the first fills the prefix cache, and records steps
            said = {}
            for way, llm in engines.items():
                took, said[way], facts = timed(llm, [text], 400)
                if turn:
                    times[way].append(took)
                accepted = facts["num_accepted_tokens"] / max(1, facts["num_draft_tokens"])
            assert all(each == said["none"] for each in said.values()), "drafts changed the answer"
        gains = {
            way: round(statistics.median(a / b for a, b in zip(times["none"], times[way], strict=True)), 2)
            for way in WAYS
        }
        rate = len(said["none"][0]) / min(times["none"])
        found[edit] = {"tokens": len(said["none"][0]), "tokens_per_s": round(rate, 1), **gains}
        print(edit, found[edit], f"{accepted:.2f} of the last way's drafts accepted", flush=True)
    return found


def refused(model: str, rounds: int, count: int) -> dict[str, Any]:
    """Time with drafts that are never accepted, over time without."""
    engines = {"none": engine(model), "wrong": engine(model, speculative_config=WRONG)}
    prompts = [{"prompt_token_ids": [1000 + at, 2000 + at, 3000 + at]} for at in range(count)]
    times: dict[str, list[float]] = {way: [] for way in engines}
    for turn in range(rounds + 1):
        said = {}
        for way, llm in engines.items():
            took, said[way], facts = timed(llm, prompts, 128)
            if turn:
                times[way].append(took)
        assert said["none"] == said["wrong"], "drafts changed an answer"
    ratios = [b / a for a, b in zip(times["none"], times["wrong"], strict=True)]
    return {
        "requests": count, "time_over_time_without": round(statistics.median(ratios), 3),
        "best_over_best": round(min(times["wrong"]) / min(times["none"]), 3),
        "draft_tokens": facts["num_draft_tokens"], "accepted": facts["num_accepted_tokens"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a chat model: a folder or a GGUF file")
    parser.add_argument("--only", choices=("edits", "refused"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {"processor": describe(), "model": Path(arguments.model).name, "load": os.getloadavg()[0]}
    if arguments.only != "refused":
        found["edits"] = edits(arguments.model, arguments.rounds)
    if arguments.only != "edits":
        found["refused"] = [refused(arguments.model, arguments.rounds, count) for count in (16, 1)]
    print(json.dumps(found, indent=2))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
