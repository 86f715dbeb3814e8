"""Trains the model in quintet/bundled from text that this script generates or that ships with Python.

    python scripts/train_bundled.py            # about an hour on two CPU cores
    python scripts/train_bundled.py --steps 40 --output /tmp/bundled   # a smoke run
    python scripts/train_bundled.py --check    # the behaviour cases, in bfloat16 and in float32
    python scripts/train_bundled.py --card     # measures the folder again and rewrites its model card

Seed, torch version and number of threads are meant to decide the weights bit for bit; a second run has not been made.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

import torch
from bundled import card, check
from bundled.samples import draw_sample, render, source
from bundled.tokenizer import build
from bundled.training import CYCLES, train
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "quintet" / "bundled"
CASES = ROOT / "tests" / "e2e" / "bundled_cases.json"
THREADS = 2


def tokenizer_texts(seed: int) -> list[str]:
    """Generated text as the model will see it, and Python's help topics for the rest of English."""
    s = source(seed)
    plain = PlainTurns()
    return [render(draw_sample(s), plain)[0] for _ in range(12000)] + [" ".join(s.english)] * 2


class PlainTurns:
    """Stands in for a tokenizer before there is one: the turns' texts without markup."""

    bos_token = eos_token = ""

    def apply_chat_template(self, messages, tools=None, **_) -> str:
        schemas = [check.to_json(tool["function"]) for tool in tools or ()]
        return "\n".join(schemas + [message["content"] for message in messages])


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes beside the folder and moves file by file, so that a reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        rounded = LlamaForCausalLM(model.config).to(torch.bfloat16)
        rounded.load_state_dict(model.state_dict())
        rounded.generation_config = GenerationConfig(
            bos_token_id=model.config.bos_token_id,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.pad_token_id,
            do_sample=False,
            max_new_tokens=256,
        )
        rounded.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        settings = Path(scratch, "tokenizer_config.json")  # the class name that every version of transformers knows
        settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
        for path in Path(scratch).iterdir():
            os.replace(path, folder / path.name)
    for path in folder.rglob("*"):
        path.chmod(0o644)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="training steps of each cycle; fewer for a smoke run")
    parser.add_argument("--cycle", type=int, default=1, choices=(1, 2, 3), help="go on from the folder")
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--checkpoints", type=Path, help="a folder that receives the unfinished model now and then")
    parser.add_argument("--check", action="store_true", help="check the folder instead of training")
    parser.add_argument(
        "--held-out", type=int, default=200, help="fresh prompts per kind for the model card; 0 for none"
    )
    parser.add_argument(
        "--card", action="store_true", help="measure the folder and rewrite its card instead of training"
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads it
    if args.check:
        return 0 if check.cases_pass(args.output, CASES) else 1
    cycles = [dataclasses.replace(cycle, steps=args.steps or cycle.steps) for cycle in CYCLES]
    if not args.card:
        tokenizer = build(tokenizer_texts(cycles[0].seed))
        keep = args.checkpoints and (lambda model: save(model, tokenizer, args.checkpoints))
        for number, recipe in enumerate(cycles[args.cycle - 1 :], args.cycle):
            # from the rounded weights as saved, so that a cycle can be run again by itself
            start = LlamaForCausalLM.from_pretrained(args.output, dtype=torch.float32) if number > 1 else None
            save(train(tokenizer, recipe, start, keep), tokenizer, args.output)
    card.write(args.output, cycles, check.held_out(args.output, args.held_out) if args.held_out else {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
