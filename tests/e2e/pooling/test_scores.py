"""Scores of two texts: cross-encoders beside transformers' own, cosines of embeddings, and late interaction."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from quintet import LLM

WORDS = "a the cat dog sat ran on under mat table what where who is it".split()
QUERY, DOCUMENTS = "where is the cat", ["the cat sat on the mat", "a dog ran", "it is under the table " * 4]
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 72,
         "max_position_embeddings": 48, "initializer_range": 0.2, "pad_token_id": 0}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def saved(model: Any, folder: Path) -> tuple[Path, Any, Any]:
    hf = tokenizer()
    model.eval().save_pretrained(folder)
    hf.save_pretrained(folder)
    return folder, model, hf


@pytest.fixture(scope="module")
def crossing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=4 + len(WORDS), num_labels=1, **SIZES)
    return saved(BertForSequenceClassification(config), tmp_path_factory.mktemp("crossing"))


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    torch.manual_seed(1)
    model = BertModel(BertConfig(vocab_size=4 + len(WORDS), **SIZES))
    return saved(model, tmp_path_factory.mktemp("embedding"))


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "use_tqdm": False, **settings})


def crossed(model: Any, hf: Any, query: str, document: str, **cut: Any) -> float:
    given = hf(query, document, return_tensors="pt", **cut)
    with torch.no_grad():
        return float(model(**given).logits[0, 0].sigmoid())


def test_a_cross_encoder_scores_as_transformers_does(crossing: tuple[Path, Any, Any]) -> None:
    folder, model, hf = crossing
    with opened(folder) as llm:
        one_to_many = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        one_to_one = llm.score([QUERY] * 3, DOCUMENTS, use_tqdm=False)
        wanted = [crossed(model, hf, QUERY, each) for each in DOCUMENTS]
        np.testing.assert_allclose([each.outputs.score for each in one_to_many], wanted, atol=3e-6)
        assert [each.outputs.score for each in one_to_one] == [each.outputs.score for each in one_to_many]
        assert one_to_many[0].prompt_token_ids == hf(QUERY, DOCUMENTS[0])["input_ids"]


def test_a_pair_that_is_too_long_is_refused_or_cut_as_transformers_cuts(crossing: tuple[Path, Any, Any]) -> None:
    folder, model, hf = crossing
    long = "the cat sat on the mat " * 12
    with opened(folder) as llm:
        with pytest.raises(ValueError, match="max_model_len is 48"):
            llm.score(QUERY, long)
        [output] = llm.score(QUERY, long, truncate_prompt_tokens=-1, use_tqdm=False)
        wanted = crossed(model, hf, QUERY, long, truncation="longest_first", max_length=48)
        np.testing.assert_allclose(output.outputs.score, wanted, atol=3e-6)


def test_numbers_of_texts_that_do_not_pair_are_refused(crossing: tuple[Path, Any, Any]) -> None:
    with opened(crossing[0]) as llm, pytest.raises(ValueError, match="1:1, 1:N or N:N"):
        llm.score(["a", "the"], DOCUMENTS)


def test_a_template_joins_the_texts_where_one_is_given(crossing: tuple[Path, Any, Any]) -> None:
    folder, model, hf = crossing
    template = "{% for m in messages %}{{ m.role ~ ' is ' ~ m.content ~ ' ' }}{% endfor %}"
    with opened(folder) as llm:
        [output] = llm.score(QUERY, DOCUMENTS[1], score_template=template, use_tqdm=False)
        given = hf(f"query is {QUERY} document is {DOCUMENTS[1]} ", return_tensors="pt")
        with torch.no_grad():
            np.testing.assert_allclose(output.outputs.score, float(model(**given).logits[0, 0].sigmoid()), atol=3e-6)


def vectors(model: Any, hf: Any, text: str) -> np.ndarray:
    with torch.no_grad():
        states: np.ndarray = model(**hf(text, return_tensors="pt")).last_hidden_state[0].numpy()
    return states / np.linalg.norm(states, axis=-1, keepdims=True)


def test_embeddings_are_scored_by_their_cosine(embedding: tuple[Path, Any, Any]) -> None:
    folder, model, hf = embedding
    with opened(folder) as llm:
        got = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        wanted = [float(vectors(model, hf, QUERY)[0] @ vectors(model, hf, each)[0]) for each in DOCUMENTS]
        np.testing.assert_allclose(got, wanted, atol=3e-6)
        with pytest.raises(ValueError, match="embeds one by one"):
            llm.score(QUERY, DOCUMENTS, score_template="{{ messages }}")


def test_late_interaction_adds_up_the_best_products(embedding: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """Of a folder as PyLate writes one: modules without pooling, and a product for each token."""
    import json
    import shutil

    from safetensors.torch import save_file

    folder, model, hf = embedding
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "1_Dense").mkdir()
    weight = torch.randn(16, 48, generator=torch.Generator().manual_seed(2))
    save_file({"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors")
    said = {
        "in_features": 48,
        "out_features": 16,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    (tmp_path / "1_Dense" / "config.json").write_text(json.dumps(said))
    listed = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))

    def tokens(text: str) -> np.ndarray:
        with torch.no_grad():
            states = model(**hf(text, return_tensors="pt")).last_hidden_state[0] @ weight.T
        unit: np.ndarray = torch.nn.functional.normalize(states, dim=-1).numpy()
        return unit

    with opened(tmp_path) as llm:
        got = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    wanted = [float((tokens(QUERY) @ tokens(each).T).max(1).sum()) for each in DOCUMENTS]
    np.testing.assert_allclose(got, wanted, atol=2e-5)
