"""The Transformers backend beside transformers' own generate(): 16 requests of one length, in alternation. Prints JSON.

Random weights in the shapes of small models. Prompts have one length, so that transformers pads nothing.
"""

import argparse
import datetime
import gc
import json
import os
import tempfile
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quintet import LLM, SamplingParams
from quintet.platforms.cpu.cpu_info import describe

REQUESTS, PROMPT, TOKENS, VOCAB = 16, 64, 32, 32000
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 1024,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 16, "q_lora_rank": 384, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}  # fmt: skip
MIXED = {"num_local_experts": 8, "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "afmoe": {**MIXED, "moe_intermediate_size": 512}, "bitnet": {}, "cwm": {}, "ctrl": {}, "diffllama": {},
    "gemma4_text": {}, "granite_swa": {}, "hyperclovax": {}, "minicpm3": LATENT, "nanochat": {}, "vaultgemma": {},
    "minimax_m2": {**MIXED, "rotary_dim": 32, "intermediate_size": 704},
}  # fmt: skip


def by_transformers(model: Any, prompts: torch.Tensor, threads: int) -> tuple[float, list[list[int]]]:
    """Returns the seconds, and the generated tokens of each prompt."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=TOKENS, min_new_tokens=TOKENS,
            do_sample=False,
        )  # fmt: skip
    return time.perf_counter() - start, out[:, PROMPT:].tolist()


def by_quintet(llm: LLM, prompts: torch.Tensor) -> tuple[float, list[list[int]]]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    asked: Any = [{"prompt_token_ids": each} for each in prompts.tolist()]
    start = time.perf_counter()
    outputs = llm.generate(asked, params, use_tqdm=False)
    return time.perf_counter() - start, [list(each.outputs[0].token_ids) for each in outputs]


def measure(kind: str, dtype: str, rounds: int, threads: int) -> dict[str, Any]:
    """The better of some rounds of each, one after the other."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, **KINDS[kind]})
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        prompts = torch.randint(3, VOCAB, (REQUESTS, PROMPT))
        theirs, ours = [], []
        with LLM(
            folder, device="cpu", dtype=dtype, model_impl="transformers", skip_tokenizer_init=True, use_tqdm=False,
            max_model_len=256, enable_prefix_caching=False,
        ) as llm:  # fmt: skip
            for _ in range(rounds):
                theirs.append(by_transformers(model, prompts, threads))
                ours.append(by_quintet(llm, prompts))
    slow, fast = min(each[0] for each in theirs), min(each[0] for each in ours)
    total = REQUESTS * TOKENS
    firsts = sum(a[0] == b[0] for a, b in zip(theirs[0][1], ours[0][1], strict=True))
    return {
        "model_type": kind, "parameters": sum(each.numel() for each in model.parameters()),
        "transformers_tokens_per_s": round(total / slow, 1), "quintet_tokens_per_s": round(total / fast, 1),
        "ratio": round(slow / fast, 2), "equal_first_tokens": f"{firsts} of {REQUESTS}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    threads, found = torch.get_num_threads(), []
    for kind in args.kinds:
        found.append(measure(kind, args.dtype, args.rounds, threads))
        gc.collect()
        print(json.dumps(found[-1]), flush=True)
    said = {
        "date": datetime.date.today().isoformat(), "cpu": describe(), "threads": threads, "load": os.getloadavg()[0],
        "dtype": args.dtype, "requests": REQUESTS, "prompt": PROMPT, "tokens": TOKENS, "models": found,
    }  # fmt: skip
    print(json.dumps(said, indent=2))


if __name__ == "__main__":
    main()
