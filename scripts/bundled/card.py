"""The model card that goes beside the weights."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers

from .tasks import FACTS
from .training import Recipe
from .words import UNKNOWN

CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
library_name: transformers
---

# quintet's bundled model

A Llama-style chat model of {params:.2f} million parameters ({size:.1f} MB in bfloat16). It comes with quintet so that
the first run, the tests and the examples need no download. It is a test piece that behaves, not a source of knowledge.

## What it does

It answers from {facts} facts (capitals, colors, animals, opposites, planets, days and hours), adds two numbers from
0 to 99, copies text, continues and writes counting lists, writes JSON objects and lists, calls tools and reads their
results, thinks inside `<think>` when told to, remembers a name within a talk, and tells very short stories. Anything
else gets "{unknown}" As plain text, "Once upon a time" becomes a story.

Accuracy on prompts drawn afresh from the same generators, greedy, in float32; right means that the whole answer is
equal. A fresh prompt is often new (copies, JSON, tools) and sometimes one that training also drew (facts, greetings,
sums).

| kind | right | asked |
|---|---|---|
{rows}

The cases in `tests/e2e/engine/bundled_cases.json` hold every time, in bfloat16 and float32; the table says what
to expect beyond them. It does not subtract, multiply or add larger numbers, and a list that passes 100 goes wrong. It
knows English only: accents and other scripts are copied byte by byte, which can fail. Its facts are those in
`scripts/bundled/words.py`. Training saw at most 640 tokens at a time; the context is 1024.

## The prompt

`<s>`, then turns: `<|system|>`, `<|user|>`, `<|assistant|>` or `<|tool|>`, the text, `<|end|>`. The chat template takes
`tools` and `enable_thinking`; "Think step by step." in the system's or the user's text does the same. A tool is called
with `<tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>`. An answer ends with `<|end|>`, a plain document
with `</s>`. The tokenizer is a BPE of {vocab} tokens with byte fallback: every text comes back as it was.

## How it was made

`python scripts/train_bundled.py` ({steps} steps, a cycle each), on text that the script generates and text that ships
with Python (the Zen; words from the help topics). The shipped weights were made cycle by
cycle (`--cycle 1`, `2`, `3`; Python {python},
torch {torch}, transformers {transformers}). That one run of all three gives
the same weights bit for bit is meant and not verified.

Licence: Apache-2.0.
"""


def write(folder: Path, cycles: Sequence[Recipe], scores: Mapping[str, tuple[int, int]]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    text = CARD.format(
        params=model.num_parameters() / 1e6,
        size=(folder / "model.safetensors").stat().st_size / 1e6,
        rows="\n".join(f"| {kind} | {right} | {asked} |" for kind, (right, asked) in scores.items()),
        facts=len(FACTS),
        unknown=UNKNOWN,
        vocab=model.config.vocab_size,
        steps=" + ".join(str(cycle.steps) for cycle in cycles),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
