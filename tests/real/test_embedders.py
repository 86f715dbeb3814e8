"""Published embedding models, against sentence-transformers."""

from pathlib import Path

import numpy as np
import pytest

from quintet import LLM
from tests.real.published import models_folder

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(1800)]
sentence_transformers = pytest.importorskip("sentence_transformers")
MODELS = ("all-MiniLM-L6-v2", "all-mpnet-base-v2")
TEXTS = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "na\u00efve caf\u00e9, \u4f60\u597d \U0001f600",
    "",
    "a",
    "word " * 600,  # more than either has places for
    "def f(x):\n    return x + 1",
]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest) -> Path:
    found = models_folder()
    if found is None or not (found / request.param / "model.safetensors").is_file():
        pytest.skip(f"set REAL_MODELS to a folder that holds {request.param}")
    return Path(found / request.param)


def test_embeddings_are_sentence_transformers(folder: Path) -> None:
    wanted = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    llm = LLM(str(folder), device="cpu", dtype="float32", runner="pooling", use_tqdm=False)
    outputs = llm.embed(TEXTS, truncate_prompt_tokens=-1, use_tqdm=False)
    got = np.array([each.outputs.embedding for each in outputs])
    assert got.shape == wanted.shape and np.abs(got - wanted).max() < 2e-5
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu").tokenizer
    assert [each.prompt_token_ids for each in outputs[:6]] == [theirs(text)["input_ids"] for text in TEXTS[:6]]
