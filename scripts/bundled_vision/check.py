"""Measures a finished folder with transformers, on pictures that training did not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from . import talks
from .pictures import Picture, draw
from .training import GRID, IMAGE, as_input, pixels_of

FRESH = "held out"  # begins the seeds, which no training uses
BATCH = 100
FONTS = Path("/usr/share/fonts/truetype/dejavu")  # Debian's fonts-dejavu, which training does not use
Question = tuple[Picture, talks.Turn]
ASKED: dict[str, tuple[talks.Ask, ...]] = {
    "what is in the picture": (talks.describe,),
    "colour": (talks.colour,),
    "shape": (talks.shape,),
    "digit": (talks.digit,),
    "how many": (talks.count,),
    "yes or no": (talks.is_there, talks.is_colour),
    "place": (talks.beside, talks.at_side, talks.where),
    "background": (talks.background,),
    "other questions": (talks.other,),
}


def fresh(kind: str, count: int, fonts: tuple[str, ...] = ()) -> list[Question]:
    """Returns pictures and a question of this kind about each. `fonts`: of pictures with a digit."""
    found: list[Question] = []
    rng = Random(f"{FRESH} {kind} {len(fonts)}")
    while len(found) < count:
        picture = draw(rng, fonts)
        if (fonts and picture.digit is None) or (kind == "background" and not picture.background):
            continue
        asked = [ask(picture, rng) for ask in ASKED[kind]]
        known = [each for each in asked if each is not None]
        if known and (kind != "digit" or picture.digit is not None or rng.random() < 0.1):
            found.append((picture, rng.choice(known)))
    return found


@torch.no_grad()
def answers(folder: Path, questions: Sequence[Question]) -> list[str]:
    """Returns greedy answers in float32, as transformers computes them."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found: list[str] = []
    for start in range(0, len(questions), BATCH):
        part = questions[start : start + BATCH]
        prompts = [
            tokenizer.apply_chat_template(
                [talks.message(turn.question, 1)], tokenize=False, add_generation_prompt=True
            ).replace(IMAGE, IMAGE * GRID**2)
            for _, turn in part
        ]
        batch = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
        pixels = torch.stack([torch.from_numpy(pixels_of(picture).copy()) for picture, _ in part])
        out = model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], pixel_values=as_input(pixels),
            do_sample=False, max_new_tokens=40,
        )  # fmt: skip
        found += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def measured(folder: Path, questions: Sequence[Question], show: int = 0) -> tuple[int, int]:
    """Returns (right, asked); right means that the whole answer is equal."""
    got = answers(folder, questions)
    wrong = [(turn, text) for (_, turn), text in zip(questions, got, strict=True) if text != turn.answer]
    for turn, text in wrong[:show]:
        print(f"  {turn.question!r}: got {text!r}, not {turn.answer!r}")
    return len(questions) - len(wrong), len(questions)


def held_out(folder: Path, count: int, show: int = 0) -> dict[str, tuple[int, int]]:
    """Returns (right, asked) by kind of question."""
    sets: dict[str, Callable[[], list[Question]]] = {kind: lambda kind=kind: fresh(kind, count) for kind in ASKED}
    if FONTS.is_dir():
        fonts = tuple(str(file) for file in sorted(FONTS.glob("DejaVu*.ttf")) if "Math" not in file.name)
        sets["digit, in 21 fonts that training did not see"] = lambda: fresh("digit", count, fonts)
    scores = {}
    for kind, questions in sets.items():
        scores[kind] = measured(folder, questions(), show)
        print(f"{kind}: {scores[kind][0]} of {scores[kind][1]}", flush=True)
    return scores
