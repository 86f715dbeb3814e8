"""Measures n-gram and suffix drafts for one request that decodes alone: the gain, and the cost where nothing repeats.

python benchmarks/drafts.py [--model qwen3-0.6b] [--out benchmarks/results/drafts.json]

Engines with and without run in turn, in one process, so that a busy machine slows both; a figure is the best of its
rounds, and the tokens must be equal. What the bundled model makes of its prompts is its own: the first two it goes on
repeating, the last it does not. With a copying checkpoint of a real shape (benchmarks/checkpoints.py) every guess comes
true: that is the most that there is to gain at this cost of a step.
"""

import argparse
import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.checkpoints import CYCLE, copying  # the path is set first, so that the script runs by itself
from quintet import LLM, SamplingParams
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads

RESULTS = Path(__file__).parent / "results"
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
# past outputs would hold the very answer: each prompt is asked several times
SUFFIX = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
WAYS = ((NGRAM, 4), (NGRAM, 8), (SUFFIX, 8))
STORY = "Tell me a story about a girl named Lily and her old dog."
PROMPTS: dict[str, tuple[Any, float]] = {  # and the temperature
    "repeats its prompt": ("Lily has a red ball. " * 4, 0.0),
    "repeats its prompt, with a slip": ("one two three four five six seven " * 4, 0.0),
    "repeats itself at times": ("Once upon a time there was a dog named Max. He liked to play in the park. ", 0.0),
    "a story": (STORY, 0.0),
    "a story, drawn at random": (STORY, 1.0),
}


NONE = ("none", 0)


@dataclass(frozen=True)
class Gain:
    """Decoding with so many guesses at once, beside decoding without."""

    model: str
    text: str
    method: str
    guesses: int
    tokens_per_s: float
    without: float
    gain: float
    tokens_per_step: float
    accepted: float  # share of the guesses


def timed(llm: LLM, prompt: Any, temperature: float, tokens: int) -> tuple[float, list[int], dict[str, float]]:
    """Seconds, tokens, and what the engine counted."""
    before, start = llm.get_stats(), time.perf_counter()
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=tokens, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    took, after = time.perf_counter() - start, llm.get_stats()
    return took, list(output.outputs[0].token_ids), {name: after[name] - before[name] for name in after}


def measure(model: str | None, prompts: dict[str, tuple[Any, float]], tokens: int, rounds: int) -> list[Gain]:
    """Every prompt with every number of guesses. A first call fills the prefix cache: decoding alone is timed."""
    given: dict[str, Any] = {"use_tqdm": False, "max_num_seqs": 4, "max_model_len": 1024}
    if model is not None:
        given |= {"model": model, "skip_tokenizer_init": True, "device": "cpu"}
    plain = LLM(**given)
    engines = {
        (str(how["method"]), count): LLM(
            **given, speculative_config={**how, "num_speculative_tokens": count, "adapt_num_tokens": False}
        )
        for how, count in WAYS
    }
    gains = []
    for text, asked in prompts.items():
        times: dict[tuple[str, int], list[float]] = {NONE: [], **{way: [] for way in engines}}
        told, counted = {}, {}
        for turn in range(rounds + 1):
            for way, llm in {NONE: plain, **engines}.items():
                took, told[way], counted[way] = timed(llm, *asked, tokens)
                if turn:
                    times[way].append(took)
        assert all(each == told[NONE] for each in told.values()), "guesses changed what was said"
        for way in engines:
            best, alone, facts = min(times[way]), min(times[NONE]), counted[way]
            accepted = facts["num_accepted_tokens"] / max(1, facts["num_draft_tokens"])
            rates = round(tokens / best, 1), round(tokens / alone, 1), round(alone / best, 2)
            per_step = round(tokens / facts["num_steps"], 2)
            gains.append(Gain(Path(model or "bundled").name, text, *way, *rates, per_step, round(accepted, 2)))
            print(gains[-1], flush=True)
    return gains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="shape of the copying checkpoint")
    parser.add_argument("--out", type=Path, default=RESULTS / "drafts.json")
    parser.add_argument("--only-bundled", action="store_true", help="leaves the copying checkpoint out")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    gains = measure(None, PROMPTS, 160, args.rounds)
    if not args.only_bundled:
        cycle = [96 * CYCLE + place for place in range(CYCLE)]
        gains += measure(str(copying(args.model)), {"copies its prompt": (cycle * 2, 0.0)}, 96, 3)
    facts = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads(), "load": os.getloadavg()[0]}
    args.out.write_text(json.dumps({**facts, "gains": [asdict(gain) for gain in gains]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
