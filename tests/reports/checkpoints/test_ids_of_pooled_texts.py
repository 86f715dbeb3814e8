"""Texts that become numbers have the ids that transformers gives them, also where they begin with the text of the BOS
(report 7); a prompt that text is generated for keeps one BOS."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaModel, PreTrainedTokenizerFast

from quintet import LLM, SamplingParams
from tests.helpers.servers.serving import Server

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *"old new price a red fox Fox".split()]
SIZES: dict[str, Any] = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "intermediate_size": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
TEXTS = ["a red fox", "<s> old </s> new price", "new <s> old </s>", "<s>", "<s><s>a</s></s>", " <s>a"]


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("embedder")
    model = LlamaModel(LlamaConfig(**SIZES)).eval()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), runner="pooling", device="cpu", dtype="float32", use_tqdm=False, **settings)


def test_embedded_texts_have_transformers_ids(embedder: tuple[Path, Any]) -> None:
    folder, model = embedder
    wanted = [tokenizer()(text)["input_ids"] for text in TEXTS]
    with opened(folder) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
        alone = [llm.embed([{"prompt": text}], use_tqdm=False)[0] for text in TEXTS]
        of_tokens = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
    for ids, output, one, each in zip(wanted, outputs, alone, of_tokens, strict=True):
        assert output.prompt_token_ids == one.prompt_token_ids == each.prompt_token_ids == ids
        with torch.no_grad():
            last = model(torch.tensor([ids])).last_hidden_state[0, -1]
        np.testing.assert_allclose(output.outputs.data, torch.nn.functional.normalize(last, dim=0), atol=2e-5)


def test_classified_and_scored_texts_have_transformers_ids(classifier: Path) -> None:
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    with opened(classifier, hf_overrides={"use_sep_token": True}) as llm:
        for text, output in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
            assert output.prompt_token_ids == tokenizer()(text)["input_ids"]
        pairs = llm.score(TEXTS, ["<s>old"] * len(TEXTS), use_tqdm=False)
        for text, pair in zip(TEXTS, pairs, strict=True):
            assert pair.prompt_token_ids == tokenizer()(text, "<s>old")["input_ids"]
        [rendered] = llm.score(TEXTS[1], "a", score_template=template, use_tqdm=False)
        assert rendered.prompt_token_ids == tokenizer()(TEXTS[1] + " a ")["input_ids"]


def test_the_server_embeds_transformers_ids(embedder: tuple[Path, Any]) -> None:
    folder, _ = embedder
    flags = ("--runner", "pooling", "--device", "cpu", "--dtype", "float32", "--served-model-name", "m")
    with Server(str(folder), *flags, "--api-workers", "2") as server:
        body = {"model": "m", "input": TEXTS}
        got = [
            each["embedding"]
            for each in httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json()["data"]
        ]
        ids = [tokenizer()(text)["input_ids"] for text in TEXTS]
        exact = httpx.post(f"{server.url}/v1/embeddings", json={"model": "m", "input": ids}, timeout=60).json()["data"]
        assert got == [each["embedding"] for each in exact]
        ranked = httpx.post(
            f"{server.url}/rerank", json={"model": "m", "query": TEXTS[1], "documents": TEXTS}, timeout=60
        ).json()["results"]
        best = max(ranked, key=lambda each: each["relevance_score"])
        assert best["index"] == 1
        np.testing.assert_allclose(best["relevance_score"], 1, atol=1e-5)


def test_a_prompt_that_is_continued_has_one_bos() -> None:
    with LLM("bundled", device="cpu", use_tqdm=False) as llm:
        hf, params = llm.get_tokenizer(), SamplingParams(max_tokens=1)
        for text in (f"{hf.bos_token}hello", "hello"):
            [output] = llm.generate([text], params, use_tqdm=False)
            assert list(output.prompt_token_ids or []).count(hf.bos_token_id) == 1


def test_lower_case_is_the_tokenizers_and_leaves_special_tokens(embedder: tuple[Path, Any], tmp_path: Path) -> None:
    """do_lower_case: of the prompt as well, character by character, and not of special tokens."""
    made = tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["[Q]"]})
    made.backend_tokenizer.normalizer = normalizers.NFC()
    model = embedder[1]
    model.resize_token_embeddings(len(made))
    model.save_pretrained(tmp_path / "trunk")
    made.save_pretrained(tmp_path / "trunk")
    parts = [Transformer(str(tmp_path / "trunk"), do_lower_case=True, max_seq_length=64), Pooling(32)]
    prompts = {"query": "[Q] OLD "}
    theirs = SentenceTransformer(modules=parts, device="cpu", prompts=prompts, default_prompt_name="query")
    theirs.save(str(tmp_path / "saved"))
    file = tmp_path / "saved" / "sentence_bert_config.json"  # as older releases keep it
    file.write_text('{"max_seq_length": 64, "do_lower_case": true}')
    texts = ["A red Fox", "[Q] RED", "ΟΔΟΣ fox"]
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    with opened(tmp_path / "saved") as llm:
        outputs = llm.embed(texts, use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        wanted = theirs.tokenizer(f"[Q] OLD {text}")["input_ids"]
        assert output.prompt_token_ids == wanted
    np.testing.assert_allclose([each.outputs.data for each in outputs], theirs.encode(texts), atol=2e-5)
