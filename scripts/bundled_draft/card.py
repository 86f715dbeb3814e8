"""The model card that goes beside the weights."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from .head import DRAFTS, TrainedHead

CARD = """---
license: apache-2.0
language: en
library_name: transformers
---

# quintet's bundled draft head

An EAGLE head of {params:.2f} million parameters ({size:.2f} MB in bfloat16) that drafts for [quintet's bundled chat
model](../bundled/README.md), so that speculative decoding can be tried without a download. It is no model by itself:

```python
from quintet import LLM

llm = LLM("bundled", speculative_config={{"method": "eagle", "model": "bundled-draft", "num_speculative_tokens": 3}})
```

The tokens are those without it. [Speculative decoding](../../docs/speculative-decoding.md#heads) has what it gains, and
why it is off by default.

## How often it is right

Over {tokens} tokens of fresh text of the kinds that the chat model was trained on, from a seed that training does not
use, in float32: how often a draft is the chat model's own greedy token, where the drafts before it were.

| draft | right |
|---|---|
{rows}

## How it was made

`python scripts/bundled_draft/train.py` trains it on the chat model's training text, to give that model's distribution
of each next token; chains of {drafts} drafts are unrolled in training as they run later. The shipped weights had 400
steps (`--steps 1200`, broken off there) and 100 more, in which the learning rate fell (`--steps 100 --start FOLDER`);
a run of all 700 was not made. One Llama layer of EAGLE's form (Li et al. 2024): no norm before its attention, {width}
wide between its feed-forward products; embedding, last norm and language-model head are the chat model's. Python
{python}, torch {torch}, transformers {transformers}.

Licence: Apache-2.0.
"""


def write(folder: Path, head: TrainedHead, counts: Sequence[tuple[int, int]]) -> None:
    """Writes the card of a folder. `counts`: right drafts and all, by place."""
    rows = "\n".join(f"| {place} | {right / drafts:.0%} |" for place, (right, drafts) in enumerate(counts, 1))
    text = CARD.format(
        params=sum(each.numel() for each in head.parameters()) / 1e6,
        size=(folder / "model.safetensors").stat().st_size / 1e6,
        rows=rows, tokens=counts[0][1], drafts=DRAFTS, width=head.config.intermediate_size,
        python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__,
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")
