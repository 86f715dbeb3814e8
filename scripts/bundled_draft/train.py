"""Trains the draft head in quintet/bundled-draft, which proposes tokens of quintet/bundled, from the texts of that.

    python scripts/bundled_draft/train.py            # about half an hour on two CPU cores
    python scripts/bundled_draft/train.py --steps 20 --output /tmp/draft   # a smoke run
    python scripts/bundled_draft/train.py --card     # measures the folder again and rewrites its model card

Seed, torch version and number of threads are meant to decide the weights; a second run has not been made.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from bundled.training import Recipe, micro_batches, train  # noqa: E402  the path is set first

from bundled_draft import card  # noqa: E402
from bundled_draft.head import WIDTH, TrainedHead, accepted, draft_loss  # noqa: E402

TARGET, FOLDER = ROOT / "quintet" / "bundled", ROOT / "quintet" / "bundled-draft"
RECIPE = Recipe(steps=700, seed=21, early=0.0, hard=0.2, matrix_lr=0.02, other_lr=1e-3)
FRESH = Recipe(seed=1_000_003, early=0.0)  # no training run uses the seed


def save(head: TrainedHead, folder: Path) -> None:
    """Writes the head as its authors write theirs; the embedding and the language-model head are the chat model's."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: each.detach().to(torch.bfloat16).contiguous() for name, each in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors.new", {"format": "pt"})
    os.replace(folder / "model.safetensors.new", folder / "model.safetensors")
    entries = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
    entries |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "intermediate_size": WIDTH}
    (folder / "config.json").write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)


def read(head: TrainedHead, folder: Path | None) -> None:
    """Sets the head's weights to those of a folder, if there is one."""
    if folder is not None:
        tensors = load_file(folder / "model.safetensors")
        head.load_state_dict({name: each.float() for name, each in tensors.items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=RECIPE.steps, help="fewer for a smoke run")
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--card", action="store_true", help="measure the folder instead of training")
    parser.add_argument("--start", type=Path, help="a folder whose weights training goes on from")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    torch.manual_seed(RECIPE.seed)
    head = TrainedHead(LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32))
    seed = RECIPE.seed + bool(args.start)  # other texts
    recipe = dataclasses.replace(RECIPE, steps=args.steps, seed=seed, warmup=min(RECIPE.warmup, 1 + args.steps // 5))
    read(head, args.start)
    if not args.card:
        train(tokenizer, recipe, head, lambda made: save(made, args.output), loss_of=draft_loss)
        save(head, args.output)
    read(head, args.output)
    chains = [accepted(head, batch) for batch, _ in zip(micro_batches(tokenizer, FRESH), range(40), strict=False)]
    counts = [tuple(map(sum, zip(*place, strict=True))) for place in zip(*chains, strict=True)]
    card.write(args.output, head, counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
