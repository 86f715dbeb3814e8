"""Trains the model in quintet/bundled-vision from pictures that this script draws.

    pip install -e '.[dev]'
    python scripts/bundled_vision/train.py           # about half an hour on two CPU cores
    python scripts/bundled_vision/train.py --steps 40 --output /tmp/vision   # a smoke run
    python scripts/bundled_vision/train.py --card    # measures the folder again and rewrites its model card

Seed, threads and versions of torch and Pillow are meant to decide the weights; a second run has not been made.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from transformers import GenerationConfig, LlavaForConditionalGeneration, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from bundled_vision import card  # noqa: E402  the path is set first, so that the script runs by itself
from bundled_vision.training import CYCLES, PATCH, SIDE, Recipe, build_tokenizer, train  # noqa: E402

FOLDER = ROOT / "quintet" / "bundled-vision"
THREADS = 1  # more would wait for each other where cores are shared
PREPROCESSOR = {
    "image_processor_type": "SiglipImageProcessor", "do_convert_rgb": True, "do_resize": True, "do_rescale": True,
    "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3, "rescale_factor": 1 / 255,
    "size": {"height": SIDE, "width": SIDE},
}  # fmt: skip
PROCESSOR = {
    "processor_class": "LlavaProcessor", "image_token": "<image>", "num_additional_image_tokens": 0,
    "patch_size": PATCH, "vision_feature_select_strategy": "full",
}  # fmt: skip


def save(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes beside the folder and moves file by file, so that a reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        rounded = LlavaForConditionalGeneration(model.config).to(torch.bfloat16)
        rounded.load_state_dict(model.state_dict())
        text = model.config.text_config
        rounded.generation_config = GenerationConfig(
            bos_token_id=text.bos_token_id, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id,
            do_sample=False, max_new_tokens=64,
        )  # fmt: skip
        rounded.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        settings = Path(scratch, "tokenizer_config.json")  # the class name that every version of transformers knows
        settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
        for name, entries in (("preprocessor_config", PREPROCESSOR), ("processor_config", PROCESSOR)):
            Path(scratch, f"{name}.json").write_text(json.dumps(entries, indent=2) + "\n")
        for path in Path(scratch).iterdir():
            os.replace(path, folder / path.name)
    for path in folder.rglob("*"):
        path.chmod(0o644)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="training steps of each cycle; fewer for a smoke run")
    parser.add_argument("--cycle", type=int, default=1, choices=(1, 2), help="go on from the folder")
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--checkpoints", type=Path, help="a folder that receives the unfinished model now and then")
    parser.add_argument("--card", action="store_true", help="measure the folder instead of training")
    parser.add_argument("--held-out", type=int, default=2000, help="fresh pictures for the model card")
    return parser.parse_args()


def shortened(recipe: Recipe, steps: int | None) -> Recipe:
    """Returns a recipe of so many steps, or as it is."""
    if not steps:
        return recipe
    part = steps / recipe.steps
    tower, easy = round(recipe.tower_steps * part), round(recipe.easy_steps * part)
    return dataclasses.replace(recipe, steps=steps, tower_steps=tower, easy_steps=easy)


def main() -> int:
    args = arguments()
    torch.set_num_threads(THREADS)
    cycles = [shortened(cycle, args.steps) for cycle in CYCLES]
    if not args.card:
        tokenizer = build_tokenizer(cycles[0].seed)
        keep = args.checkpoints and (lambda model: save(model, tokenizer, args.checkpoints))
        for number, recipe in enumerate(cycles[args.cycle - 1 :], args.cycle):
            # from the rounded weights as saved, so that a cycle can be run again by itself
            start = None
            if number > 1:
                start = LlavaForConditionalGeneration.from_pretrained(args.output, dtype=torch.float32)
            save(train(tokenizer, recipe, start, keep), tokenizer, args.output)
    card.write(args.output, cycles, args.held_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
