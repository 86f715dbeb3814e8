"""Measures prompts that are embeddings beside the same prompts as token ids.

    python -m benchmarks.prompt_embeds [--model FOLDER | --shapes qwen3-0.6b] [--tokens 512] [--chunk 64] [--out FILE]

Windows take turns: token ids; embeddings that no request brought before; embeddings that the engine has seen. The
prefix cache is off, so that each computes all of its prompt. Without a model: the bundled one, or with --shapes random
weights of another's.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import checkpoint
from quintet import LLM, SamplingParams
from quintet.platforms.cpu.cpu_info import describe

KINDS = ("ids", "new embeddings", "known embeddings")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all kinds in turn -> milliseconds of a prompt and its first token, and of each of its steps."""
    load = os.getloadavg()[0]
    model = arguments.model or (str(checkpoint(arguments.shapes)) if arguments.shapes else "bundled")
    llm = LLM(
        model, device="cpu", skip_tokenizer_init=True, max_model_len=arguments.tokens + 16, use_tqdm=False,
        weights_cache="none", enable_prefix_caching=False, enable_prompt_embeds=True,
        max_num_batched_tokens=arguments.chunk, num_pages=arguments.tokens // 16 + 8,
    )  # fmt: skip
    plan = llm._client.engine_plan
    width, vocab, steps = plan.embeds_width, plan.vocab_size, -(-arguments.tokens // arguments.chunk)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    rows = torch.randn(arguments.tokens, width, generator=torch.Generator().manual_seed(1)) * 0.05
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(-arguments.warm_up, arguments.rounds):
        new = {"prompt_embeds": rows.roll(1 + number + arguments.warm_up, dims=0)}
        ids = {"prompt_token_ids": [(7 * at + number) % vocab for at in range(arguments.tokens)]}
        for kind, prompt in zip(KINDS, (ids, new, new), strict=True):
            start = time.perf_counter()
            llm.generate([prompt], params, use_tqdm=False)
            if number >= 0:  # the first rounds record steps
                seconds[kind].append(time.perf_counter() - start)
    llm.close()
    found = {kind: statistics.median(each) for kind, each in seconds.items()}
    return {
        "processor": describe(), "model": arguments.model or arguments.shapes or "bundled", "what": arguments.what,
        "tokens": arguments.tokens, "chunk": arguments.chunk, "rounds": arguments.rounds,
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
        "prompt_ms": {kind: round(1e3 * each, 2) for kind, each in found.items()},
        "step_ms": {kind: round(1e3 * each / steps, 3) for kind, each in found.items()},
        "least_step_ms": {kind: round(1e3 * min(each) / steps, 3) for kind, each in seconds.items()},
        "tokens_per_second": {kind: round(arguments.tokens / each) for kind, each in found.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model's folder; by default the bundled one")
    parser.add_argument("--shapes", help="random weights of these shapes, such as qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--what", default="row store", help="what the engine was, for the report")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments)
    print(json.dumps(found, indent=2))
    if arguments.out is not None:
        known = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
        arguments.out.write_text(json.dumps([*known, found], indent=2) + "\n")


if __name__ == "__main__":
    main()
