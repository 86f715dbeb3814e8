"""Encoders, embedders and rerankers in GGUF files that llama.cpp's converter wrote, against transformers' numbers."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from quintet import LLM, PoolingParams
from quintet.engine.pooling.scoring import PairTemplate, render_template
from quintet.gguf.config import config
from quintet.gguf.defaults import templates
from quintet.gguf.file import read
from quintet.gguf.model import GGUFModel
from quintet.tokenizers.tokenizer import Tokenizer as QuintetTokenizer

FOLDER = Path(__file__).parents[2] / "data" / "quantized" / "gguf"
STORED = load_file(FOLDER / "logits.safetensors")
IDS = STORED["ids"].tolist()
XLM_ROBERTA = Tokenizer.from_file(str(FOLDER / "tokenizers" / "xlm-roberta.json"))  # saved by transformers


# how a text is pooled, as the file says, where it is not by the mean
POOLED: dict[str, Callable[[Any], Any]] = {"xlm-roberta": lambda x: x[0], "qwen3-embedding": lambda x: x[-1]}


@pytest.mark.parametrize(
    "name",
    [
        *("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v2-normed", "jina-bert-v3", "llama-embed"),
        *("modern-bert", "nomic-bert", "nomic-bert-moe", "qwen3-embedding", "roberta", "xlm-roberta"),
    ],
)
def test_hidden_states_are_transformers_and_pooled_as_the_file_says(name: str) -> None:
    wanted = STORED[f"{name}.transformers"].numpy()
    file = FOLDER / f"{name}.gguf"
    settings = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    if any(each.kind.name == "Q8_0" for each in read(file).tensors.values()):
        settings["activation_bits"] = 16
    with LLM(file, use_tqdm=False, **settings) as llm:
        params = PoolingParams(task="token_embed", normalize=False)
        (states,) = llm.encode([IDS], params, use_tqdm=False)
        (pooled,) = llm.embed([IDS], use_tqdm=False)
    np.testing.assert_allclose(states.outputs.data, wanted, atol=2e-3 * float(wanted.std()))
    vector = POOLED.get(name, lambda x: x.mean(0))(wanted)
    for index in (2, 3):  # Sentence Transformers' products behind the pooling, of EmbeddingGemma
        weights = STORED.get(f"{name}.dense_{index}")
        vector = vector if weights is None else weights.numpy() @ vector
    np.testing.assert_allclose(pooled.outputs.embedding, vector / np.linalg.norm(vector), atol=2e-4)


@pytest.mark.parametrize("pooler", [None, {"pooling_type": "MEAN"}])
def test_texts_have_the_tokens_of_the_files_own_vocabulary(pooler: dict[str, str] | None) -> None:
    """XLM-RoBERTa's, pooled by the first token as BGE-M3, and by the mean as E5."""
    text = "\uff28ello  w\u00f6rld \u4f60"
    settings = {"device": "cpu", "dtype": "float32", "pooler_config": pooler}
    with LLM(FOLDER / "xlm-roberta.gguf", use_tqdm=False, **settings) as llm:
        of_text, of_ids = llm.embed([text, XLM_ROBERTA.encode(text).ids], use_tqdm=False)
        (states,) = llm.encode([text], PoolingParams(task="token_embed", normalize=False), use_tqdm=False)
    assert of_text.outputs.embedding == of_ids.outputs.embedding
    vector = states.outputs.data.mean(0) if pooler else states.outputs.data[0]
    np.testing.assert_allclose(of_text.outputs.embedding, vector / np.linalg.norm(vector), atol=1e-6)


def test_a_reranker_scores_pairs_as_transformers() -> None:
    """Its classifier is two matrices, in the file's type."""
    settings = {"device": "cpu", "dtype": "float32", "activation_bits": 16}
    plain = PoolingParams(task="classify", use_activation=False)
    with LLM(FOLDER / "xlm-roberta-reranker.gguf", use_tqdm=False, **settings) as llm:
        (logit,) = llm.encode([IDS], plain, use_tqdm=False)
        (score,) = llm.score("Hello world", "two lines", use_tqdm=False)
        (pair,) = llm.classify([XLM_ROBERTA.encode("Hello world", "two lines").ids], use_tqdm=False)
    np.testing.assert_allclose(logit.outputs.data, STORED["xlm-roberta-reranker.transformers"][0], atol=2e-3)
    assert score.outputs.score == pair.outputs.probs[0]


def test_a_qwen3_reranker_weighs_yes_and_no() -> None:
    """The file has these two rows of the vocabulary's head."""
    settings = {"device": "cpu", "dtype": "float32", "activation_bits": 16, "skip_tokenizer_init": True}
    with LLM(FOLDER / "qwen3-reranker.gguf", use_tqdm=False, **settings) as llm:
        (score,) = llm.encode([IDS], pooling_task="score", use_tqdm=False)
    wanted = STORED["qwen3-reranker.transformers"].sigmoid()
    np.testing.assert_allclose(score.outputs.data, wanted, atol=1e-3)


def test_a_reranker_joins_a_pair_as_its_file_says() -> None:
    """llama.cpp puts the texts in the places of "{query}" and "{document}"."""
    text = read(FOLDER / "qwen3-reranker.gguf").metadata["tokenizer.chat_template.rerank"]
    named = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.rerank": text}
    own = QuintetTokenizer(XLM_ROBERTA, {}, templates(named), lambda: None)
    query, document = 'is "a" {document}?\n', "{{ b }} \u4f60 \\n"
    whole = text.replace("{query}", "\0").replace("{document}", document).replace("\0", query)
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    assert whole.endswith("</think>\n\n")
    joining = PairTemplate(own, has_separator=False)
    assert joining.own_template is not None
    assert render_template(joining.own_template, {"messages": messages}) == whole
    made = joining.prompt(query, document)
    assert made.token_ids == XLM_ROBERTA.encode(whole).ids
    plain = PairTemplate(own, "{{ messages[1].content }}").prompt(query, document)
    assert plain.token_ids == XLM_ROBERTA.encode(document).ids


def test_tokens_see_both_ways_where_the_file_says_so() -> None:
    file = read(FOLDER / "qwen3.gguf")
    assert "architectures" not in config(GGUFModel([file]))
    both = dataclasses.replace(file, metadata={**file.metadata, "qwen3.attention.causal": False})
    found = config(GGUFModel([both]))
    assert found["is_causal"] is False and found["architectures"] == ["EmbeddingModel"] and "pooling_type" not in found
    hybrid = read(FOLDER / "lfm2.gguf")
    for more in ({"metadata": {**hybrid.metadata, "lfm2.attention.causal": False}},
                 {"tensors": {**hybrid.tensors, "dense_2.weight": hybrid.tensors["token_embd.weight"]}}):  # fmt: skip
        with pytest.raises(ValueError, match="which quintet does not compute for LFM2"):
            config(GGUFModel([dataclasses.replace(hybrid, **more)]))


def test_classes_have_the_names_of_the_file() -> None:
    file = read(FOLDER / "xlm-roberta-reranker.gguf")
    assert config(GGUFModel([file]))["id2label"] == {0: "LABEL_0"}
    unnamed = {key: value for key, value in file.metadata.items() if not key.endswith("output_labels")}
    assert config(GGUFModel([dataclasses.replace(file, metadata=unnamed)]))["num_labels"] == 1


def test_a_classifier_is_refused() -> None:
    """One that is a single matrix: the pooler before it is not in the file."""
    file = read(FOLDER / "bert.gguf")
    heads = {**file.tensors, "cls.output.weight": file.tensors["token_embd.weight"]}
    with pytest.raises(ValueError, match="has a classifier behind the encoder, which quintet does not read"):
        config(GGUFModel([dataclasses.replace(file, tensors=heads)]))
