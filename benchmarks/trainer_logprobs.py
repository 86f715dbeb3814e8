"""Measures how far the sampler's log-probabilities are from a trainer's: a float32 forward of transformers.

    python benchmarks/trainer_logprobs.py --out benchmarks/results/trainer-logprobs-bundled.json
    python benchmarks/trainer_logprobs.py --model qwen2.5-coder-0.5b-instruct-Q4_K_M.gguf --forms bfloat16 int8

For each form of weights and KV cache an engine draws tokens at temperature 1, after each prompt of `quintet verify`.
Compared are the log-probabilities that it reports with these tokens and those that the trainer's model gives them. A
GGUF file is first made a checkpoint in float32, whose weights are then those of engines and trainer alike.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from quintet import LLM  # the path is set first, so that the script runs by itself
from quintet.config import BUNDLED, EngineConfig
from quintet.verification.engine_scores import Case, EngineScores
from quintet.verification.prompts import default_prompts
from quintet.verification.scores import SequenceScores, compare
from quintet.verification.transformers_scores import score

FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, KV fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "bfloat16, KV int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "w8a8": {"dtype": "bfloat16", "quantization": "w8a8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "w4a8": {"dtype": "bfloat16", "quantization": "w4a8"},
}


def as_checkpoint(model: str, folder: str) -> str:
    """Returns the model, or the folder that a GGUF file was written to in float32."""
    file = Path(model)
    if file.suffix != ".gguf":
        return model
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_of_file = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    if hasattr(model_of_file.config, "quantization_config"):
        del model_of_file.config.quantization_config  # its weights are floats now
    model_of_file.config.save_pretrained(folder)
    save_file(
        {name: each.detach().contiguous() for name, each in model_of_file.named_parameters()},
        Path(folder) / "model.safetensors",
    )
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def drawn(model: str, form: dict[str, Any], draws: int, max_tokens: int) -> list[SequenceScores]:
    """Sequences of an engine, with its log-probabilities of the tokens that it drew."""
    with LLM(model, device="cpu", max_model_len=1024, kv_cache_memory_bytes="256M", use_tqdm=False, **form) as llm:
        tokenizer = llm._client.tokenizer
        assert tokenizer is not None
        prompts = default_prompts(tokenizer, 1023 - max_tokens)
        cases = [Case(prompt, seed) for prompt in prompts for seed in range(1, draws + 1)]
        return EngineScores(llm, max_tokens).batched(cases)


def rows(model: str, names: Sequence[str], draws: int, max_tokens: int) -> list[dict[str, Any]]:
    """Differences of each form; the trainer's model is loaded once."""
    found = {}
    for name in names:
        print(f"drawing: {name}", file=sys.stderr, flush=True)
        found[name] = drawn(model, FORMS[name], draws, max_tokens)
    flat = [each for name in names for each in found[name]]
    trainers = score(EngineConfig(model, device="cpu"), flat)
    listed, start = [], 0
    for name in names:
        ours = found[name]
        comparison = asdict(compare(ours, trainers[start : start + len(ours)]))
        start += len(ours)
        kept = {key: comparison[key] for key in ("positions", "mean", "p99", "max", "bias", "kl")}
        listed.append({"form": name, "settings": FORMS[name], **kept})
    return listed


def table(listed: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown, in nats."""
    lines = ["| weights, KV cache | mean | p99 | largest | bias | KL |", "|---|---|---|---|---|---|"]
    for row in listed:
        numbers = " | ".join(f"{row[name]:.2g}" for name in ("mean", "p99", "max", "bias", "kl"))
        lines.append(f"| {row['form']} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED, help="folder, or GGUF file")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--draws", type=int, default=4, help="outputs of each prompt")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each output")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        listed = rows(as_checkpoint(args.model, folder), args.forms, args.draws, args.max_tokens)
    print(table(listed))
    if args.out is not None:
        head = {"date": date.today().isoformat(), "model": Path(args.model).name, "max_tokens": args.max_tokens}
        args.out.write_text(json.dumps({**head, "draws_of_a_prompt": args.draws, "rows": listed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
