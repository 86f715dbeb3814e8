"""Runs published GGUF models here, in transformers with dequantized weights, and in llama.cpp where it is installed.

    REAL_MODELS=FOLDER python -m tests.real.published > conformance/published_weights.json

writes the figures of docs/models.md. LLAMA_CPP_PYTHON: a Python with llama-cpp-python, for those of llama.cpp.
"""

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quintet import LLM, SamplingParams

GGUF_MODELS = (
    "gemma-3-270m-Q4_K_M.gguf",
    "qwen2.5-coder-0.5b-instruct-Q4_K_M.gguf",
    "qwen2.5-coder-1.5b-instruct-Q4_K_M.gguf",
)
LICENSE = Path(__file__).parents[2] / "LICENSE"
TEXT = LICENSE.read_text(encoding="utf-8")[:6000]  # English that no model was tuned on here
NEW_TOKENS = 24
PROMPT = "def fibonacci(n):\n    "
THEIRS = """
import json, sys
import numpy as np
from llama_cpp import Llama
llama = Llama(sys.argv[1], n_ctx=2048, logits_all=True, verbose=False, n_threads=2)
given = json.load(open(sys.argv[2]))
llama.eval(given["ids"])
logits = np.array(llama.scores[: len(given["ids"])], dtype=np.float64)
logits -= logits.max(-1, keepdims=True)
logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
np.save(sys.argv[3], logits[np.arange(len(logits) - 1), given["ids"][1:]])
print(json.dumps([llama.tokenize(text.encode(), add_bos=True, special=True) for text in given["texts"]]))
"""


def models_folder() -> Path | None:
    """Returns the folder of published models; None if REAL_MODELS names none."""
    folder = Path(os.environ.get("REAL_MODELS", ""))
    return folder if os.environ.get("REAL_MODELS") and folder.is_dir() else None


def llama_cpp_python() -> str | None:
    """Returns the Python that has llama-cpp-python; None where LLAMA_CPP_PYTHON names none."""
    return os.environ.get("LLAMA_CPP_PYTHON") or None


@dataclass(frozen=True)
class Figures:
    """What one model says of TEXT; logarithms of probabilities are of its tokens behind the first."""

    model: str
    tokens: int
    perplexity: float  # activations in 16 bits
    perplexity_8_bits: float  # the default, as llama.cpp has them
    transformers_perplexity: float
    largest_difference: float  # of a logarithm from transformers'
    mean_difference: float
    same_greedy_tokens: int  # of NEW_TOKENS, as transformers', from the first on
    llama_cpp_perplexity: float | None = None
    llama_cpp_mean_difference: float | None = None  # from the default's


@functools.lru_cache(maxsize=1)
def reference(file: Path) -> tuple[Any, Any]:
    """transformers' model, dequantized to float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given).eval()
    return model, AutoTokenizer.from_pretrained(file.parent, **given)


def engine(file: Path, **settings: Any) -> LLM:
    """The model here."""
    return LLM(str(file), device="cpu", dtype="float32", max_model_len=1400, num_pages=1024, use_tqdm=False, **settings)


def prompt_logprobs(llm: LLM, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Logarithms of the probabilities of the tokens behind the first [len(ids) - 1], float64."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": list(ids)}, params)
    assert output.prompt_logprobs is not None
    found = [each[token].logprob for each, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True) if each]
    return np.array(found, dtype=np.float64)


@torch.no_grad()
def reference_logprobs(model: Any, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """The same of transformers' model."""
    logits = model(torch.tensor([list(ids)])).logits[0, :-1].double()
    found = logits.log_softmax(-1).gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0]
    return np.asarray(found.numpy())


def of_llama_cpp(
    python: str, file: Path, ids: Sequence[int], texts: Sequence[str] = ()
) -> tuple[np.ndarray[Any, Any], list[list[int]]]:
    """The same of llama.cpp, and the tokens that it makes of texts."""
    with tempfile.TemporaryDirectory() as folder:
        given, got = Path(folder) / "given.json", Path(folder) / "logprobs.npy"
        given.write_text(json.dumps({"ids": list(ids), "texts": list(texts)}))
        command = [python, "-c", THEIRS, str(file), str(given), str(got)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return np.load(got), json.loads(done.stdout.splitlines()[-1])


def perplexity(logprobs: np.ndarray[Any, Any]) -> float:
    return math.exp(-float(logprobs.mean()))


@torch.no_grad()
def greedy(model: Any, ids: Sequence[int]) -> list[int]:
    """transformers' next tokens."""
    found = model.generate(
        torch.tensor([list(ids)]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )
    return [int(each) for each in found[0, len(ids) :]]


def measured(file: Path) -> Figures:
    """All figures of a model."""
    model, tokenizer = reference(file)
    ids = tokenizer(TEXT)["input_ids"][:1200]
    theirs = reference_logprobs(model, ids)
    start = tokenizer(PROMPT)["input_ids"]
    want = greedy(model, start)
    wide = engine(file, activation_bits=16)
    ours = prompt_logprobs(wide, ids)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    (output,) = wide.generate({"prompt_token_ids": start}, params)
    got = list(output.outputs[0].token_ids)
    del wide
    same = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), NEW_TOKENS)
    narrow = prompt_logprobs(engine(file), ids)
    off = np.abs(ours - theirs)
    more: dict[str, Any] = {}
    if (python := llama_cpp_python()) is not None:
        llama, _ = of_llama_cpp(python, file, ids)
        more = {
            "llama_cpp_perplexity": perplexity(llama),
            "llama_cpp_mean_difference": float(np.abs(narrow - llama).mean()),
        }
    return Figures(
        file.stem,
        len(ids),
        perplexity(ours),
        perplexity(narrow),
        perplexity(theirs),
        float(off.max()),
        float(off.mean()),
        same,
        **more,
    )


def main() -> None:
    folder = models_folder()
    if folder is None:
        sys.exit("set REAL_MODELS to a folder that holds the published models")
    found = [asdict(measured(folder / name)) for name in GGUF_MODELS if (folder / name).is_file()]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
