"""Table of the architectures of GGUF files, of the files that tests read and of gguf's own list."""

from importlib.metadata import version
from pathlib import Path

import gguf

from quintet.gguf.architectures import ARCHITECTURES
from quintet.gguf.config import config
from quintet.model_loader.gguf_weights import model_of
from scripts.reference_pages.markdown import code, table

FILES = Path(__file__).parents[2] / "tests" / "data" / "quantized" / "gguf"
HEAD = """## GGUF architectures

A GGUF file names its architecture (`general.architecture`). quintet reads {read} of the {known} that the package `gguf`
{version} lists; another is refused with the nearest of these. Each is tried on a small random model that llama.cpp's
converter (`convert_hf_to_gguf.py`) has written: logits are those of transformers, dequantized and with the matrices as
they are (`tests/e2e/quantization/test_gguf.py`). What blocks a file may hold:
[quantization.md](quantization.md#gguf-files).

"""


def gguf_table() -> str:
    """Returns the section: an architecture of a file -> the model types that it is read as."""
    kinds: dict[str, set[str]] = {name: set() for name in ARCHITECTURES}
    for path in FILES.glob("*.gguf"):
        model = model_of(path)
        kinds[model.prefix].add(str(config(model)["model_type"]))
    rows = [[code(name), ", ".join(map(code, sorted(kinds[name])))] for name in sorted(kinds)]
    known = [name for name in gguf.MODEL_ARCH_NAMES.values() if name != "clip"]
    head = HEAD.format(read=len(rows), known=len(known), version=version("gguf"))
    return head + table(("`general.architecture`", "read as `model_type`"), rows)
