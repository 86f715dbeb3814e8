"""`quintet serve` of tiny BERT models: vectors, scores and rankings as transformers makes them, by real clients."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from tests.helpers.servers.serving import PATIENCE, Server, until

WORDS = "a the cat dog sat ran on under mat table what where who is it".split()
SIZES = {"vocab_size": 4 + len(WORDS), "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 72, "max_position_embeddings": 512, "initializer_range": 0.2}  # fmt: skip
TEXTS = ["the cat sat on the mat", "a dog ran", "who is it"]


def saved(model: Any, folder: Path) -> tuple[Path, Any, Any]:
    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    model.eval().save_pretrained(folder)
    hf.save_pretrained(folder)
    return folder, model, hf


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    torch.manual_seed(0)
    return saved(BertModel(BertConfig(**SIZES)), tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def embedder(bert: tuple[Path, Any, Any]) -> Iterator[Server]:
    flags = ("--device", "cpu", "--served-model-name", "bert", "--pooler-config.pooling_type", "MEAN")
    with Server(str(bert[0]), *flags, "--api-workers", "2") as server:
        yield server


def vector(bert: tuple[Path, Any, Any], text: str) -> Any:
    _, model, hf = bert
    with torch.no_grad():
        mean = model(**hf(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
    return mean / np.linalg.norm(mean)


def test_openais_client_gets_transformers_vectors(bert: tuple[Path, Any, Any], embedder: Server) -> None:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as ai:
        answer = ai.embeddings.create(model="bert", input=TEXTS)
    for text, each in zip(TEXTS, answer.data, strict=True):
        np.testing.assert_allclose(each.embedding, vector(bert, text), atol=2e-6)
    assert answer.usage.prompt_tokens == sum(len(bert[2](text)["input_ids"]) for text in TEXTS)


def test_many_texts_are_the_same_as_each_alone(bert: tuple[Path, Any, Any], embedder: Server) -> None:
    texts = [" ".join((WORDS * 3)[at % 15 : at % 15 + 1 + at % 25]) for at in range(600)]
    with httpx.Client(base_url=embedder.url, timeout=PATIENCE) as http:
        whole = http.post("/v1/embeddings", json={"input": texts}).json()["data"]
        for at in (0, 17, 256, 599):
            alone = http.post("/v1/embeddings", json={"input": texts[at]}).json()["data"]
            assert alone[0]["embedding"] == whole[at]["embedding"]


def test_a_ranking_by_cosine(bert: tuple[Path, Any, Any], embedder: Server) -> None:
    cohere = pytest.importorskip("cohere", reason="pip install cohere")
    answer = cohere.ClientV2("none", base_url=embedder.url).rerank(model="bert", query="a cat", documents=TEXTS)
    wanted = [float(vector(bert, "a cat") @ vector(bert, text)) for text in TEXTS]
    assert [each.index for each in answer.results] == sorted(range(3), key=lambda at: -wanted[at])
    for each in answer.results:
        assert each.relevance_score == pytest.approx(wanted[each.index], abs=2e-6)


def test_what_it_does_not_do(embedder: Server) -> None:
    answer = httpx.post(f"{embedder.url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE)
    assert answer.status_code == 400 and "/v1/embeddings" in answer.json()["error"]["message"]
    answer = httpx.post(f"{embedder.url}/v1/embeddings", json={"input": ["a", "cat " * 600]}, timeout=PATIENCE)
    assert answer.status_code == 400 and "input[1] has 602 tokens" in answer.json()["error"]["message"]


def test_what_is_counted(embedder: Server) -> None:
    httpx.post(f"{embedder.url}/v1/embeddings", json={"input": TEXTS}, timeout=PATIENCE)
    lines = httpx.get(f"{embedder.url}/metrics", timeout=PATIENCE).text.splitlines()
    found = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line and line[0] != "#"}
    assert found["vllm:request_prefill_time_seconds_count"] >= 3
    assert found["vllm:e2e_request_latency_seconds_count"] >= 3 and found["vllm:request_prompt_tokens_sum"] >= 15
    assert any('request_success_total' in line and 'finished_reason="stop"' in line and not line.endswith(" 0.0")
               for line in lines)  # fmt: skip


def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder, model, hf = saved(BertForSequenceClassification(BertConfig(num_labels=1, **SIZES)), tmp_path)
    with torch.no_grad():
        logits = [model(**hf("where is it", text, return_tensors="pt")).logits[0, 0] for text in TEXTS]
    wanted = [float(torch.sigmoid(each)) for each in logits]
    with Server(str(folder), "--device", "cpu") as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        scores = http.post("/score", json={"text_1": "where is it", "text_2": TEXTS}).json()["data"]
        plain = http.post("/score", json={"text_1": "where is it", "text_2": TEXTS, "use_activation": False}).json()
        ranked = http.post("/rerank", json={"query": "where is it", "documents": TEXTS, "top_n": 1}).json()["results"]
        said = http.post("/v1/embeddings", json={"input": "a"})
    np.testing.assert_allclose([each["score"] for each in scores], wanted, atol=2e-6)
    np.testing.assert_allclose([each["score"] for each in plain["data"]], logits, atol=2e-5)
    assert [each["index"] for each in ranked] == [int(np.argmax(wanted))] and said.status_code == 400


def test_the_io_processor_of_the_docs(
    bert: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "server.md").read_text()
    [block] = [each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "class Nearest" in each]
    (tmp_path / "nearest.py").write_text(block.replace("print(", "str("))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Server(str(bert[0]), "--device", "cpu", "--io-processor-plugin", "nearest:Nearest") as server:
        asked = {"to": TEXTS[1], "among": [TEXTS[0], TEXTS[1], TEXTS[2]]}
        answer = httpx.post(f"{server.url}/pooling", json={"data": asked}, timeout=PATIENCE)
        wrong = httpx.post(f"{server.url}/pooling", json={"data": 3}, timeout=PATIENCE)
    assert answer.json()["data"] == {"nearest": 1}
    assert wrong.status_code == 400 and "must have `to` and `among`" in wrong.json()["error"]["message"]


def test_a_batch_file(bert: tuple[Path, Any, Any], embedder: Server, tmp_path: Path) -> None:
    lines = [
        {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": TEXTS[0]}},
        {"custom_id": "s", "method": "POST", "url": "/v1/score", "body": {"data_1": "a", "data_2": "the"}},
        {"custom_id": "r", "method": "POST", "url": "/v1/rerank", "body": {"query": "a", "documents": TEXTS}},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    words = ["run-batch", "-i", source, "-o", target, "--url", embedder.url, "-q"]
    subprocess.run([sys.executable, "-m", "quintet.cli.main", *words], check=True)
    answers = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, target.read_text().splitlines())}
    np.testing.assert_allclose(answers["e"]["data"][0]["embedding"], vector(bert, TEXTS[0]), atol=2e-6)
    assert len(answers["r"]["results"]) == 3 and len(answers["s"]["data"]) == 1


def test_a_batch_file_with_a_bad_line(bert: tuple[Path, Any, Any], embedder: Server, tmp_path: Path) -> None:
    """A refusal is that line's answer: the others have their numbers."""
    bodies = [{"input": TEXTS}, {"input": ["a", "cat " * 600]}, {"input": TEXTS[1], "dimensions": 3}, {"input": "a"}]
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/embeddings", "body": body}
        for at, body in enumerate(bodies)
    ]
    scores = {"data_1": TEXTS[0], "data_2": TEXTS}
    lines += [
        {"custom_id": "score", "method": "POST", "url": "/v1/score", "body": scores},
        {"custom_id": "counts", "method": "POST", "url": "/v1/score", "body": {**scores, "data_1": ["a", "the"]}},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    words = ["run-batch", "-i", source, "-o", target, "--url", embedder.url, "-q"]
    assert subprocess.run([sys.executable, "-m", "quintet.cli.main", *words], check=False).returncode == 1
    answers = {each["custom_id"]: each["response"] for each in map(json.loads, target.read_text().splitlines())}
    assert {name: each["status_code"] for name, each in answers.items()} == {
        "0": 200, "1": 400, "2": 400, "3": 200, "score": 200, "counts": 400
    }  # fmt: skip
    assert "input[1] has 602 tokens" in answers["1"]["body"]["error"]["message"]
    assert len(answers["0"]["body"]["data"]) == 3 and answers["score"]["body"]["data"][0]["score"] > 0.9999


def running(server: Server) -> float:
    """Requests that the engine has."""
    lines = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))
    )


MANY = [" ".join((WORDS * 30)[at % 15 : at % 15 + 400]) for at in range(2048)]  # seconds of work, wherever it runs


def test_a_small_call_ends_before_a_large_one_that_came_first(embedder: Server) -> None:
    with httpx.Client(base_url=embedder.url, timeout=PATIENCE) as http, ThreadPoolExecutor(1) as other:
        large = other.submit(httpx.post, f"{embedder.url}/v1/embeddings", json={"input": MANY}, timeout=PATIENCE)
        assert until(lambda: running(embedder) > 0 or large.done()) and not large.done()
        assert http.post("/v1/embeddings", json={"input": "a cat"}).status_code == 200
        assert not large.done(), "the small call waited for all of 2,048 texts"
        assert len(large.result().json()["data"]) == 2048


@pytest.mark.slow
def test_the_engine_is_free_when_a_caller_hangs_up(embedder: Server) -> None:
    address = urlsplit(embedder.url)
    body = json.dumps({"input": MANY}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    before = counted(embedder, "vllm:prompt_tokens_total")
    with socket.create_connection((address.hostname, address.port)) as wire:
        wire.sendall(head + body)
        assert until(lambda: running(embedder) > 0)
    assert until(lambda: running(embedder) == 0)
    whole = sum(len(text.split()) + 2 for text in MANY)
    assert counted(embedder, "vllm:prompt_tokens_total") - before < whole, "all texts were computed for nobody"


def counted(server: Server, name: str) -> float:
    """Of all engines."""
    lines = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
