"""Measures lookups of suffix decoding among 10 million tokens: past outputs with phrases that come again and again.

python benchmarks/suffix_lookup.py [--tokens 10000000] [--out benchmarks/results/suffix-lookup.json]

Each lookup is of another place in a text of its own, so that caches hold nothing of the last one.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from quintet.engine.spec_decode.suffix_index import make_suffix_index  # the path is set first
from quintet.platforms.cpu.cpu_info import describe

RESULTS = Path(__file__).parent / "results"
VOCABULARY, PHRASES, MOST = 32_000, 200_000, 24


def texts(rng: np.random.Generator, count: int) -> np.ndarray:
    """Token ids [count]: phrases of 4 to 40 tokens, of which few are frequent, and single tokens between them."""
    lengths = rng.integers(4, 40, PHRASES)
    starts = np.cumsum(lengths) - lengths
    words = (rng.zipf(1.3, int(lengths.sum())) - 1) % VOCABULARY
    parts, total = [], 0
    while total < count:
        phrase = int(rng.zipf(1.2) - 1) % PHRASES
        parts += [words[starts[phrase] : starts[phrase] + lengths[phrase]], rng.integers(0, VOCABULARY, 2)]
        total += int(lengths[phrase]) + 2
    return np.concatenate(parts)[:count].astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--lookups", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "suffix-lookup.json")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    past, asked = texts(rng, args.tokens), texts(rng, args.lookups * 40)
    index = make_suffix_index(args.tokens + args.tokens // 100)
    begin = time.perf_counter()
    for start in range(0, len(past), 500):
        index.append(past[start : start + 500], 1, ends=True)
    append = (time.perf_counter() - begin) / len(past)
    seconds, drafts, matches = [], [], []
    for end in range(40, len(asked), 40):
        query = asked[end - 30 : end]
        begin = time.perf_counter()
        draft, _, match = index.lookup(query, 1, MOST, 1.0, 0.1, MOST)
        seconds.append(time.perf_counter() - begin)
        drafts.append(len(draft))
        matches.append(match)
    ordered, drafted = sorted(seconds), [took for took, count in zip(seconds, drafts, strict=True) if count]
    facts = {
        "date": time.strftime("%Y-%m-%d"), "cpu": describe(), "load": os.getloadavg()[0], "index": type(index).__name__,
        "tokens": args.tokens, "mib": round(index.num_bytes / 2**20), "append_us_per_token": round(append * 1e6, 3),
        "lookup_us_median": round(statistics.median(ordered) * 1e6, 1),
        "lookup_us_mean": round(statistics.fmean(ordered) * 1e6, 1),
        "lookup_us_p99": round(ordered[len(ordered) * 99 // 100] * 1e6, 1),
        "lookup_us_median_with_draft": round(statistics.median(drafted) * 1e6, 1),
        "drafted_tokens_mean": round(statistics.fmean(drafts), 2),
        "matched_tokens_mean": round(statistics.fmean(matches), 2),
    }  # fmt: skip
    print(json.dumps(facts, indent=2))
    args.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
