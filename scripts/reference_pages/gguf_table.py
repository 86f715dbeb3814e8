"""Table of the architectures of GGUF files, of the files that tests read and of gguf's own list."""

import json
import textwrap
from importlib.metadata import version
from pathlib import Path

import gguf

from quintet.gguf.architectures import ARCHITECTURES
from quintet.gguf.config import config
from quintet.model_loader.gguf_weights import model_of
from quintet.models import families
from scripts.reference_pages.markdown import code, table

FILES = Path(__file__).parents[2] / "tests" / "data" / "quantized" / "gguf"
HEAD = """## GGUF architectures

A GGUF file names its architecture (`general.architecture`). quintet reads {read} of the {known} that the package `gguf`
{version} lists; another is refused with the nearest of these. Those without a family here run by
[transformers' code](transformers-backend.md). Each is tried on a small random model that llama.cpp's
converter (`convert_hf_to_gguf.py`) has written: logits are those of transformers, dequantized and with the matrices as
they are (`tests/e2e/quantization/test_gguf.py`); those that transformers has with an encoder alone (`qwen2vl`,
`qwen3vl`, `qwen3vlmoe`) with [their images](images.md#gguf-models). What blocks a file may hold:
[quantization.md](quantization.md#gguf-files).

"""

REFUSED = (
    "Not read: {}. Of these, transformers' code of `dbrx` (its attention is not replaceable) cannot run on quintet's "
    "engine; the others have no class there that generates text, or a family here whose names in GGUF nothing maps yet."
)
RESULTS = Path(__file__).parents[2] / "conformance" / "published_weights.json"
PUBLISHED = """
## Verified on published weights

`tests/real` runs published models where `REAL_MODELS` names a folder that holds them: texts and chats are cut into
the tokens of transformers, and 1,200 tokens of English have these probabilities (CPU, float32; transformers computes
the dequantized weights). "8 bits" is the default, with activations as llama.cpp has them. all-MiniLM-L6-v2 and
all-mpnet-base-v2 give the embeddings of sentence-transformers to 2e-5.

"""
COLUMNS = (
    "model", "perplexity", "in 8 bits", "transformers'", "a log-probability differs by, on average", "at most",
    "equal greedy tokens, of 24",
)  # fmt: skip


def published_table() -> str:
    """Returns the section of published models; empty until some were measured."""
    if not RESULTS.is_file():
        return ""
    rows = []
    for each in json.loads(RESULTS.read_text(encoding="utf-8")):
        numbers = [each[name] for name in ("perplexity", "perplexity_8_bits", "transformers_perplexity")]
        off = [f"{each[name]:.1e}" for name in ("mean_difference", "largest_difference")]
        rows.append([code(each["model"]), *(f"{n:.4f}" for n in numbers), *off, str(each["same_greedy_tokens"])])
    return PUBLISHED.lstrip("\n") + table(list(COLUMNS), rows)


def gguf_table() -> str:
    """Returns the section: an architecture of a file -> the model types that it is read as."""
    known = [name for name in gguf.MODEL_ARCH_NAMES.values() if name != "clip"]
    rows = {name: row for name, row in ARCHITECTURES.items() if name in known}  # whisper.cpp's are no GGUF files
    kinds = {name: {row.kind} if isinstance(row.kind, str) else set() for name, row in rows.items()}
    for path in FILES.glob("*.gguf"):
        model = model_of(path)
        kinds[model.prefix].add(str(config(model)["model_type"]))
    listed = [[code(name), ", ".join(map(_read_as, sorted(kinds[name])))] for name in sorted(kinds)]
    head = HEAD.format(read=len(listed), known=len(known), version=version("gguf"))
    refused = ", ".join(code(name) for name in sorted(known) if name not in ARCHITECTURES)
    return (
        head
        + table(["`general.architecture`", "read as `model_type`"], listed)
        + f"\n{_wrapped(REFUSED.format(refused))}\n"
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _read_as(kind: str) -> str:
    return code(kind) if kind in families() else f"{code(kind)}, by transformers' code"
