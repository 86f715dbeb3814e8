"""KL of a KV cache's next-token distributions from those of the 16-bit cache, over the tokens of a text.

    python -m benchmarks.kv_quality MODEL --text LICENSE --text quintet/config/cache.py --tokens 200

MODEL is a folder, a GGUF file or a hub id. The texts' first tokens make one prompt. A distribution is its 100 likeliest
tokens and the rest as one; what the other cache has not among its 100 counts as its least likely. Prints JSON.
"""

import argparse
import json
import math
import time
from typing import Any

from quintet import LLM, SamplingParams

TOP = 100
CACHES = ("auto", "int8", "fp8", "int4")

Row = dict[int, float]


def distributions(model: str, cached: str, token_ids: list[int], settings: dict[str, Any]) -> tuple[list[Row], float]:
    """Returns log-probabilities of the TOP likeliest tokens at each place, and the seconds of the prompt."""
    llm = LLM(model, kv_cache_dtype=cached, max_logprobs=TOP, use_tqdm=False, **settings)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    start = time.perf_counter()
    [output] = llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
    took = time.perf_counter() - start
    rows = [{token: each.logprob for token, each in row.items()} for row in output.prompt_logprobs or () if row]
    return [dict(sorted(row.items(), key=lambda pair: -pair[1])[:TOP]) for row in rows], took


def divergence(want: Row, got: Row) -> float:
    least = min(got.values())
    rest_want, rest_got = (max(1e-9, 1 - sum(map(math.exp, row.values()))) for row in (want, got))
    shared = sum(math.exp(value) * (value - got.get(token, least)) for token, value in want.items())
    return shared + rest_want * math.log(rest_want / rest_got)


def compare(want: list[Row], got: list[Row]) -> dict[str, float]:
    every = sorted(map(divergence, want, got))
    same = sum(max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in zip(want, got, strict=True))
    return {
        "kl": round(sum(every) / len(every), 4),
        "kl_90th": round(every[len(every) * 9 // 10], 4),
        "same_likeliest": round(same / len(every), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True, help="a file; several are joined")
    parser.add_argument("--tokens", type=int, default=200, help="of each text")
    parser.add_argument("--caches", nargs="+", default=CACHES)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    settings = {"device": "cpu", "dtype": args.dtype, "max_model_len": 4096, "kv_cache_memory_bytes": "256M"}
    tokenizer = LLM(args.model, use_tqdm=False, **settings).get_tokenizer()  # before the models that are compared
    token_ids: list[int] = []
    for name in args.text:
        with open(name, encoding="utf-8") as file:
            token_ids += tokenizer.encode(file.read())[: args.tokens]
    want, took = distributions(args.model, "auto", token_ids, settings)
    print(json.dumps({"cache": "auto", "tokens": len(token_ids), "seconds": round(took, 2)}), flush=True)
    for cached in args.caches:
        if cached != "auto":
            got, took = distributions(args.model, cached, token_ids, settings)
            print(json.dumps({"cache": cached, **compare(want, got), "seconds": round(took, 2)}), flush=True)


if __name__ == "__main__":
    main()
