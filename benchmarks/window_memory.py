"""Computes a long request's KV cache in models with sliding windows, and its size if every layer kept all tokens.

Sizes are those of the published models; no weight is read. `python benchmarks/window_memory.py --json FILE`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma2Config, Gemma3TextConfig, MistralConfig

from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.platforms import choose

PAGE = 16  # tokens
STEP = 2048  # tokens of one request in a step, at most: max_num_batched_tokens as it is if not given
MIB = 2**20
MODELS: dict[str, Any] = {
    "Gemma 2 2B": Gemma2Config(
        hidden_size=2304, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        sliding_window=4096, max_position_embeddings=32768,
    ),
    "Gemma 3 1B": Gemma3TextConfig(
        hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, sliding_window=512, max_position_embeddings=32768,
    ),
    "Mistral 7B v0.1": MistralConfig(sliding_window=4096, max_position_embeddings=32768, num_key_value_heads=8),
}  # fmt: skip


def held(config: Any, tokens: int) -> dict[str, float]:
    """MiB that a request of so many tokens holds at most, before and now."""
    worker = Worker(choose("null").platform(), config, ModelSizes(torch.bfloat16, PAGE, tokens))
    arrangement = worker.kv_cache_layout
    layer = sum(layout.nbytes for layout in worker.layouts) / len(worker.layouts)
    whole = -(-tokens // PAGE) * layer * config.num_hidden_layers
    now = arrangement.max_pages(tokens, PAGE, STEP) * arrangement.page_bytes
    return {
        "groups": len(arrangement.groups),
        "whole_mib": round(whole / MIB, 1),
        "held_mib": round(now / MIB, 1),
        "ratio": round(now / whole, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    found = {name: {str(tokens): held(config, tokens) for tokens in (8192, 32768)} for name, config in MODELS.items()}
    for name, lengths in found.items():
        for tokens, row in lengths.items():
            share = f"{row['held_mib']:8.1f} of {row['whole_mib']:8.1f} MiB, {row['ratio']:.0%}"
            print(f"{name:16} {tokens:>6} tokens: {share}")
    if args.json:
        args.json.write_text(json.dumps({"page_size": PAGE, "step_tokens": STEP, "models": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
