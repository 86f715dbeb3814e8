"""Keys of the files that Sentence Transformers, PyLate and transformers write beside a checkpoint are obeyed, or
refused by name (report: "what stands beside a checkpoint is read in part")."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import BertConfig, BertForSequenceClassification, BertModel

from quintet import LLM
from quintet.hub.resolve import load_generation_config
from tests.e2e.pooling.test_scores import SIZES, WORDS, tokenizer

TEXTS = ["a cat sat", "the dog ran on the mat", "where is it"]
LONG = "the cat sat on the mat " * 3 + "where is the dog"


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("trunk")
    BertModel(BertConfig(vocab_size=4 + len(WORDS), **SIZES)).eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def composed(trunk: Path, folder: Path, *behind: Any, **settings: Any) -> SentenceTransformer:
    parts = [Transformer(str(trunk)), Pooling(48, pooling_mode="mean"), *behind]
    model = SentenceTransformer(modules=parts, device="cpu", **settings)
    model.eval().save(str(folder))
    return model


def edited(file: Path, **entries: Any) -> None:
    there = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**there, **entries}))


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "dtype": "float32", "use_tqdm": False, **settings})


def embedded(folder: Path, texts: list[str], **asked: Any) -> np.ndarray:
    with opened(folder) as llm:
        return np.stack([each.outputs.data for each in llm.embed(texts, use_tqdm=False, **asked)])


BESIDE, TRUNK, TOKENIZER = "config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer_config.json"
MESSAGE = {"message": {"method": "forward", "method_output_name": "last_hidden_state"}}
REFUSED = [
    (TRUNK, {"transformer_task": "fill-mask"}, "fill-mask"),
    (TRUNK, {"module_output_name": "sentence_embedding"}, "sentence_embedding"),
    (TRUNK, {"modality_config": MESSAGE}, "modality_config"),
    (TRUNK, {"processing_kwargs": {"text": {"max_length": 4}}}, "processing_kwargs"),
    (TRUNK, {"tokenizer_name_or_path": "another"}, "tokenizer_name_or_path"),
    (TRUNK, {"config_kwargs": {"is_decoder": True}}, "is_decoder"),
    (TRUNK, {"processor_kwargs": {"add_prefix_space": True}}, "add_prefix_space"),
    (TRUNK, {"max_seq_length": "many"}, "max_seq_length"),
    (BESIDE, {"default_prompt_name": "absent"}, "absent"),
    (BESIDE, {"prompts": {"query": 5}}, "prompts"),
    (BESIDE, {"truncate_dim": -4}, "truncate_dim"),
    ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
    ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "mean, cls"),
    ("1_Pooling/config.json", {"temperature": 2}, "temperature"),
]


@pytest.mark.parametrize(("name", "entries", "message"), REFUSED)
def test_keys_that_are_not_obeyed_are_refused(
    name: str, entries: dict[str, Any], message: str, trunk: Path, tmp_path: Path
) -> None:
    composed(trunk, tmp_path, Normalize())
    edited(tmp_path / name, **entries)
    with pytest.raises(ValueError, match=message):
        embedded(tmp_path, TEXTS)


OBEYED = [
    (BESIDE, {"truncate_dim": 7}),
    (BESIDE, {"prompts": {"query": "where is ", "document": None}, "default_prompt_name": "query"}),
    (TRUNK, {"max_seq_length": 6}),
    (TRUNK, {"max_seq_length": None}),
    (TRUNK, {"max_seq_length": 9, "tokenizer_args": {"model_max_length": 6}}),
    (TRUNK, {"model_args": {"attn_implementation": "eager"}}),
    (TOKENIZER, {"model_max_length": 6}),
    (TOKENIZER, {"model_max_length": 6, "truncation_side": "left"}),
    ("1_Pooling/config.json", {"pooling_mode": "max", "pooling_mode_cls_token": True}),
]


@pytest.mark.parametrize(("name", "entries"), OBEYED)
def test_keys_are_obeyed_as_the_library_obeys_them(
    name: str, entries: dict[str, Any], trunk: Path, tmp_path: Path
) -> None:
    composed(trunk, tmp_path, Normalize())
    edited(tmp_path / name, **entries)
    wanted = SentenceTransformer(str(tmp_path), device="cpu").encode([*TEXTS, LONG])
    got = embedded(tmp_path, [*TEXTS, LONG], truncate_prompt_tokens=-1)
    np.testing.assert_allclose(got, wanted, atol=3e-5)


def test_flags_of_no_pooling_are_a_mean(trunk: Path, tmp_path: Path) -> None:
    composed(trunk, tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 48}')
    wanted = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(embedded(tmp_path, TEXTS), wanted, atol=3e-5)


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_scores_are_by_the_similarity_of_the_files(name: Any, trunk: Path, tmp_path: Path) -> None:
    model = composed(trunk, tmp_path, similarity_fn_name=name)
    with opened(tmp_path) as llm:
        got = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    vectors = model.encode(TEXTS)
    np.testing.assert_allclose(got, model.similarity(vectors[:1], vectors)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ["config_sentence_transformers.json", "config.json", "config.json before 4.0"])
@pytest.mark.parametrize(("kind", "labels"), [("linear.Identity", 1), ("activation.Sigmoid", 3)])
def test_a_cross_encoders_activation_is_read_in_each_place(
    place: str, kind: str, labels: int, trunk: Path, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    model = BertForSequenceClassification(BertConfig(vocab_size=4 + len(WORDS), num_labels=labels, **SIZES))
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    name = f"torch.nn.modules.{kind}"
    if place == BESIDE:
        CrossEncoder(
            str(tmp_path), device="cpu", activation_fn=getattr(torch.nn, kind.split(".")[1])()
        ).save_pretrained(str(tmp_path))
    elif place == "config.json":
        edited(tmp_path / place, sentence_transformers={"activation_fn": name, "version": "4.1.0"})
    else:
        edited(tmp_path / "config.json", sbert_ce_default_activation_function=name)
    theirs = CrossEncoder(str(tmp_path), device="cpu")
    with opened(tmp_path) as llm:
        got = [each.outputs.data for each in llm.encode(TEXTS, pooling_task="classify", use_tqdm=False)]
        if labels == 1:
            scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
            wanted = theirs.predict([(TEXTS[0], text) for text in TEXTS])
            np.testing.assert_allclose(scores, wanted, atol=3e-5)
    with torch.no_grad():
        logits = [model.eval()(**tokenizer()(text, return_tensors="pt")).logits[0] for text in TEXTS]
    exact = [each if labels == 1 else each.sigmoid() for each in logits]
    np.testing.assert_allclose(np.stack(got).reshape(3, -1), np.stack(exact), atol=3e-5)


def test_an_unknown_activation_and_modules_behind_a_classifier_are_refused(trunk: Path, tmp_path: Path) -> None:
    model = BertForSequenceClassification(BertConfig(vocab_size=4 + len(WORDS), num_labels=1, **SIZES))
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    CrossEncoder(str(tmp_path), device="cpu", activation_fn=torch.nn.Tanh()).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="Tanh"):
        opened(tmp_path)
    listed = json.loads((tmp_path / "modules.json").read_text())
    listed.append({"idx": 1, "name": "1", "path": "1_Dropout", "type": "sentence_transformers.models.Dropout"})
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ValueError, match="Transformer, Dropout"):
        opened(tmp_path)


def test_a_pair_is_cut_at_the_side_of_the_tokenizer(tmp_path: Path) -> None:
    model = BertForSequenceClassification(BertConfig(vocab_size=4 + len(WORDS), num_labels=1, **SIZES))
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    edited(tmp_path / TOKENIZER, truncation_side="left", model_max_length=12)
    hf = tokenizer()
    hf.truncation_side = "left"
    with opened(tmp_path) as llm:
        [output] = llm.score(TEXTS[0], LONG, truncate_prompt_tokens=-1, use_tqdm=False)
        [text] = llm.classify([LONG], truncate_prompt_tokens=-1, use_tqdm=False)
    assert output.prompt_token_ids == hf(TEXTS[0], LONG, truncation=True, max_length=12)["input_ids"]
    assert text.prompt_token_ids == hf(LONG, truncation=True, max_length=12)["input_ids"]


# --------------------------------------------------------------------------------------------------- late interaction
OF_TOKENS = {"module_input_name": "token_embeddings"}


def test_scores_of_late_interaction_have_prompts_and_a_skiplist(trunk: Path, tmp_path: Path) -> None:
    dense = Dense(48, 16, bias=False, activation_function=torch.nn.Identity(), **OF_TOKENS)
    modules = [Transformer(str(trunk)), dense, MultiVectorMask(["the", "absent"]), Normalize(**OF_TOKENS)]
    prompts = {"query": "where is ", "document": "it is "}
    for similarity in ("maxsim", "meanmaxsim"):
        model = MultiVectorEncoder(modules=modules, device="cpu", prompts=prompts, similarity_fn_name=similarity)
        model.save(str(tmp_path / similarity))
        wanted = model.similarity(model.encode_query(TEXTS[:1]), model.encode_document(TEXTS))[0]
        with opened(tmp_path / similarity) as llm:
            got = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        np.testing.assert_allclose(got, wanted, atol=3e-5)


def pylate(trunk: Path, folder: Path, **entries: Any) -> Path:
    """A folder as PyLate before 4 writes one."""
    dense = Dense(48, 16, bias=False, activation_function=torch.nn.Identity(), **OF_TOKENS)
    MultiVectorEncoder(modules=[Transformer(str(trunk)), dense], device="cpu").save(str(folder))
    (folder / "1_Dense" / "config.json").write_text(
        json.dumps({"in_features": 48, "out_features": 16, "bias": False,
                    "activation_function": "torch.nn.modules.linear.Identity"})
    )  # fmt: skip
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["type"] = "pylate.models.Dense.Dense"
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / TRUNK).write_text("{}")
    beside = {
        "model_type": "ColBERT",
        "query_prefix": "where is ",
        "document_prefix": "it is ",
        "query_length": 32,
        "document_length": 40,
        "attend_to_expansion_tokens": False,
        "skiplist_words": ["the"],
        **entries,
    }
    (folder / BESIDE).write_text(json.dumps(beside))
    return folder


def test_pylates_prefixes_and_skiplist_are_obeyed(trunk: Path, tmp_path: Path) -> None:
    folder = pylate(trunk, tmp_path, do_query_expansion=False)
    model = MultiVectorEncoder(str(folder), device="cpu")
    wanted = model.similarity(model.encode_query(TEXTS[:1]), model.encode_document(TEXTS))[0]
    with opened(folder) as llm:
        got = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(got, wanted, atol=3e-5)


def test_a_score_of_expanded_queries_is_refused_by_name(trunk: Path, tmp_path: Path) -> None:
    with opened(pylate(trunk, tmp_path, do_query_expansion=True)) as llm:
        with pytest.raises(ValueError, match="do_query_expansion"):
            llm.score(TEXTS[0], TEXTS)
        assert llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)[0].outputs.data.shape == (5, 16)


def test_entries_of_generation_config_that_are_not_obeyed_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = {"temperature": 0.5, "no_repeat_ngram_size": 3, "num_beams": 1, "typical_p": 1.0, "bad_words_ids": [[5]]}
    (tmp_path / "generation_config.json").write_text(json.dumps({**entries, "eos_token_id": 2}))
    with caplog.at_level("WARNING"):
        assert load_generation_config(tmp_path) == {"temperature": 0.5, "eos_token_id": [2]}
    assert "not obeyed here: no_repeat_ngram_size=3, bad_words_ids=[[5]];" in caplog.text
    caplog.clear()
    load_generation_config(tmp_path, "quintet")
    assert not caplog.text
