"""One checkpoint, one process: start-up, time to first token, prefill, decode, peak memory. Prints JSON.

Run by run.py, once per checkpoint, so that start-up and peak memory are the engine's own.
"""

import argparse
import json
import resource
import time
from typing import Any

import psutil

from quintet import LLM, SamplingParams
from quintet.model_loader.loader import num_bytes


def age() -> float:
    """Seconds since this process started, imports included."""
    return time.time() - psutil.Process().create_time()


SLOW = 15.0  # seconds for 512 tokens: then once is enough, and the batch gets shorter prompts


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds that it took."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
    return took


def prompt(index: int, length: int) -> list[int]:
    return [(index * 7919 + place * 104729) % 30000 + 10 for place in range(length)]


def measure(model: str, dtype: str, decode_tokens: int, batch_tokens: int) -> dict[str, Any]:
    """Times in seconds and rates in tokens per second; prefix caching is off, so every prompt is computed."""
    llm = LLM(
        model, dtype=dtype, device="cpu", skip_tokenizer_init=True, use_tqdm=False, max_model_len=2048,
        enable_prefix_caching=False,
    )  # fmt: skip
    loaded = age()
    first = generate(llm, [prompt(0, 32)], 1)
    ready = age()
    first_again = min(generate(llm, [prompt(1 + i, 32)], 1) for i in range(3))
    prefill = generate(llm, [prompt(5, 512)], 1)
    if prefill < SLOW:
        prefill = min(prefill, generate(llm, [prompt(6, 512)], 1))
    decode = min(generate(llm, [prompt(8 + i, 32)], 1 + decode_tokens) - first_again for i in range(2))
    length = 128 if prefill < SLOW else 32
    prompts = [prompt(20 + i, length) for i in range(16)]
    batch_first = generate(llm, prompts, 1)
    batch = generate(llm, prompts, 1 + batch_tokens) - batch_first
    worker = llm._client.engine_plan.ranks.workers[0]
    layers = num_bytes(worker.model.model.layers, worker.platform)  # type: ignore[arg-type]
    return {
        "model": model,
        "dtype": dtype,
        "weight_bytes": worker.weight_bytes,
        "layer_parameters": layers // (2 if dtype == "bfloat16" else 4),
        "startup_to_loaded_s": loaded,
        "startup_to_first_token_s": ready,
        "first_token_32_cold_s": first,
        "first_token_32_s": first_again,
        "prefill_512_tokens_per_s": 512 / prefill,
        "decode_batch1_tokens_per_s": decode_tokens / decode,
        "batch16_prompt_tokens": length,
        "decode_batch16_tokens_per_s": 16 * batch_tokens / batch,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--batch-tokens", type=int, default=16)
    args = parser.parse_args()
    print(json.dumps(measure(args.model, args.dtype, args.decode_tokens, args.batch_tokens)))


if __name__ == "__main__":
    main()
