"""The model card that goes beside the weights."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import PIL
import torch
import transformers

from .check import held_out
from .pictures import COLOURS, SHAPES, SIDE
from .talks import UNKNOWN
from .training import GRID, PATCH, Recipe

CARD = """---
license: apache-2.0
language: en
pipeline_tag: image-text-to-text
library_name: transformers
---

# quintet's bundled vision model

A LLaVA of {params:.2f} million parameters ({size:.1f} MB in bfloat16) that answers short questions about drawings. It
comes with quintet so that a first picture, the tests and the examples need no download (`quintet chat bundled-vision
--image FILE`; images need `pip install 'quintet-llm[image]'`). It is there to try the engine, and knows nothing of
photographs.

## What it does

It was trained on drawings of one or two shapes ({shapes}), of a digit, or of both, in ten colours
({colours}). It says what is in a picture,
names colours, shapes, the digit and the colour of the background, counts shapes, and says whether something is there.
Which thing is left of, right of, above or below another it says wrongly in two of five pictures:

| question | answer |
|---|---|
| What is in the picture? | A red circle and a blue square. |
| What colour is the triangle? | Green. |
| Which digit is it? | 7. |
| Is there a star? | No. |

Other questions get "{unknown}"

Accuracy on {count} fresh pictures for each kind of question, drawn by the same generators from seeds that training does
not use; greedy, in float32; right means that the whole answer is equal:

| kind | right | asked |
|---|---|---|
{rows}

The wordings of these questions are those of `scripts/bundled_vision/talks.py`, all of which training saw; the "other
questions" are, too.

## What it does not

- Photographs, other shapes, more than two shapes or one digit, and letters: it names the nearest things that it knows.
- A picture is scaled to {side} x {side} pixels, whatever its form: things of less than a fifth of its shorter side are
  often missed, and a rectangle is a square.
- English only, in the wordings that it was trained on and near ones.
- A second picture in a conversation takes the place of the first. Two in one message were not trained.
- Training saw conversations of up to 6 questions; the context is 1024 tokens, of which a picture takes {tokens}.

## The prompt

`<s>`, then turns: `<|system|>`, `<|user|>` or `<|assistant|>`, the text, `<|end|>`. `<image>` stands for a picture,
before the text of its message. An answer ends with `<|end|>`.

## How it was made

`python scripts/bundled_vision/train.py` draws the pictures with Pillow, asks about them and trains: {tower_steps} steps
of {pictures} pictures in which the tower (SigLIP's, {layers} layers, patches of {patch} pixels) learns what lies under
each of its patches, and {talk_steps} steps of {batch} conversations for the whole model. Digits are of Pillow's own
font, of strokes with the wobble of a hand, or of seven segments. Python {python}, torch {torch},
transformers {transformers}, Pillow {pillow}.

Licence: Apache-2.0.
"""


def write(folder: Path, cycles: Sequence[Recipe], count: int) -> None:
    """Measures a folder on `count` pictures for each kind of question, and writes its card."""
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder)
    scores = held_out(folder, count)
    text = CARD.format(
        params=model.num_parameters() / 1e6, size=(folder / "model.safetensors").stat().st_size / 1e6,
        shapes=", ".join(SHAPES), colours=", ".join(COLOURS), unknown=UNKNOWN, count=count, side=SIDE, patch=PATCH,
        rows="\n".join(f"| {kind} | {right} | {asked} |" for kind, (right, asked) in scores.items()),
        tokens=GRID**2, tower_steps=cycles[0].tower_steps, pictures=2 * cycles[0].batch, batch=cycles[0].batch,
        talk_steps=" + ".join(str(cycle.steps - cycle.tower_steps) for cycle in cycles),
        layers=model.config.vision_config.num_hidden_layers,
        python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__,
        pillow=PIL.__version__,
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")
