"""Measures drafts for models with recurrent layers, one request at a time: states that keep them apart or hold them.

Where states hold drafts, a step with a refused one is followed by one that computes the accepted tokens again.

python -m benchmarks.drafts_hybrid [--models granite-4-h-1b ...] [--out benchmarks/results/drafts-hybrid.json]

The proposer knows what the model draws, and is right about each token with the chance that is given. Weights are
random; engines run one after the other, and a figure is the best of its rounds. The tokens must be equal.
"""

import argparse
import gc
import json
import logging
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.checkpoints import HERE, SHAPES
from quintet import LLM, SamplingParams
from quintet.config import SpeculativeConfig
from quintet.engine.request import Request
from quintet.engine.spec_decode.proposer import Proposer
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.cpu.platform import CPU
from quintet.platforms.host import threads

RESULTS = Path(__file__).parent / "results"
PROMPT = list(range(100, 104))
CHANCES = (0.0, 0.6, 0.8)
FIELDS = CPU.optional_spec_fields


class Oracle(Proposer):
    """Proposes what an engine without drafts has drawn; each token is another one by chance."""

    tokens: ClassVar[list[int]] = []
    chance: ClassVar[float] = 0.0

    def __init__(self, config: SpeculativeConfig, vocab_size: int) -> None:
        self.num_drafts, self._vocab_size = config.num_speculative_tokens, vocab_size

    def propose(self, room: Sequence[tuple[Request, int]]) -> None:
        for request, most in room:
            rng, place = random.Random(request.num_output), request.num_output
            right = self.tokens[place : place + most]
            request.draft_tokens = [t if rng.random() < self.chance else (t + 1) % self._vocab_size for t in right]


def write_config(name: str) -> Path:
    """Writes the configuration of a shape -> its folder."""
    from transformers import AutoConfig

    shape = dict(SHAPES[name])
    AutoConfig.for_model(shape.pop("model_type"), **shape).save_pretrained(HERE / f"{name}-config")
    return HERE / f"{name}-config"


def timed(llm: LLM, tokens: int, rounds: int) -> tuple[float, list[int], dict[str, float]]:
    """Returns the seconds of the best round, the tokens, and what the engine counted in a round."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    times, counts, found = list[float](), dict[str, float](), list[int]()
    for _ in range(rounds + 1):
        start, before = time.perf_counter(), llm.get_stats()
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        times.append(time.perf_counter() - start)
        found, counts = list(output.outputs[0].token_ids), {k: v - before[k] for k, v in llm.get_stats().items()}
    return min(times[1:]), found, counts


def measure(folder: Path, guesses: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each chance."""
    settings: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 1,
        "max_model_len": 512, "use_tqdm": False, "enable_prefix_caching": False, "kv_cache_memory_bytes": "512M",
    }  # fmt: skip
    model = f"{__name__ if __name__ != '__main__' else 'benchmarks.drafts_hybrid'}:Oracle"
    spec = {"method": "custom_class", "model": model, "num_speculative_tokens": guesses, "adapt_num_tokens": False}
    with LLM(**settings) as llm:
        alone, oracle, _ = timed(llm, tokens, rounds)
    from benchmarks import drafts_hybrid  # the class that the engine loads

    drafts_hybrid.Oracle.tokens = oracle
    gc.collect()  # one model at a time
    rows: dict[float, dict[str, Any]] = {}
    for way, fields in (("held", FIELDS - {"max_drafts"}), ("apart", FIELDS)):
        CPU.optional_spec_fields = fields
        gc.collect()
        with LLM(**settings, speculative_config=spec) as llm:
            for chance in CHANCES:
                drafts_hybrid.Oracle.chance = chance
                took, found, counts = timed(llm, tokens, rounds)
                assert found == oracle, "drafts changed the tokens"
                row = rows.setdefault(
                    chance, {"model": folder.name.removesuffix("-config"), "guesses": guesses, "chance": chance}
                )
                row["accepted"] = round(counts["num_accepted_tokens"] / max(1, counts["num_draft_tokens"]), 2)
                row |= {f"{way}_gain": round(alone / took, 2), f"{way}_tokens_per_s": round(tokens / took, 2)}
                row |= {f"{way}_steps": counts["num_steps"], f"{way}_computed": counts["num_tokens"]}
                row["without_tokens_per_s"] = round(tokens / alone, 2)
    for row in rows.values():
        print(row, flush=True)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["granite-4-h-1b", "qwen3.5-9b-4-layers"])
    parser.add_argument("--guesses", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "drafts-hybrid.json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = [row for name in args.models for row in measure(write_config(name), args.guesses, args.tokens, args.rounds)]
    facts = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads(), "load": os.getloadavg()[0]}
    args.out.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
