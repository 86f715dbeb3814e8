"""/score, /rerank, /classify and /pooling in vLLM's shapes; Cohere's embed and rerank as its own client reads them."""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quintet.engine.pooling.scoring import PairTemplate, cosine, max_sim
from quintet.pooling_params import PoolingParams
from tests.server.fakes import MODEL, WIDTH, FakeBackend, fake_numbers
from tests.server.http.pooling.test_embeddings import backend
from tests.server.http.serving import Live, client, serving

CROSS: dict[str, Any] = {"tasks": ("classify", "score", "token_classify"), "labels": ("LABEL_0",)}


async def ask(fake: FakeBackend, path: str, status: int = 200, **body: Any) -> Any:
    async with client(fake) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def numbers(fake: FakeBackend, text: str, task: str) -> Any:
    assert fake.tokenizer is not None
    return fake_numbers(fake.tokenizer.encode(text), PoolingParams(task=task), len(fake.labels))


def scores(answer: Any) -> list[float]:
    return [each["score"] for each in answer["data"]]


async def test_a_bi_encoder_scores_by_cosine() -> None:
    fake = backend()
    answer = await ask(fake, "/score", text_1="sun", text_2=["moon", "sun"])
    vectors = {text: numbers(fake, text, "embed") for text in ("sun", "moon")}
    assert scores(answer) == [cosine(vectors["sun"], vectors["moon"]), pytest.approx(1.0, abs=1e-6)]
    assert answer["object"] == "list" and answer["data"][1]["index"] == 1 and answer["data"][1]["object"] == "score"
    assert answer["usage"]["prompt_tokens"] == sum(len(each.prompt.token_ids) for each in fake.submitted)
    assert len(fake.submitted) == 3  # the query once


async def test_late_interaction() -> None:
    fake = backend(tasks=("token_embed",))
    answer = await ask(fake, "/v1/score", data_1=["a b"], data_2=["c d e"])
    assert scores(answer) == [max_sim(numbers(fake, "a b", "token_embed"), numbers(fake, "c d e", "token_embed"))]


async def test_a_cross_encoder_reads_both_texts_together() -> None:
    fake = backend(**CROSS)
    answer = await ask(fake, "/score", queries=["a", "b"], documents=["c", {"text": "d"}])
    assert fake.tokenizer is not None
    template = PairTemplate(fake.tokenizer)
    prompts = [template.prompt("a", "c").token_ids, template.prompt("b", "d").token_ids]
    assert [each.prompt.token_ids for each in fake.submitted] == prompts
    assert scores(answer) == [float(fake_numbers(each, PoolingParams(task="score"), 1)[0]) for each in prompts]


async def test_counts_that_do_not_fit_are_refused_in_vllms_words() -> None:
    fake = backend()
    said = await ask(fake, "/score", 400, data_1=["a", "b"], data_2=["c", "d", "e"])
    assert "Input lengths must be either 1:1, 1:N or N:N, not 2:3" in said["error"]["message"]
    said = await ask(fake, "/score", 400, data_1="a", data_2=[])
    assert "At least one text_pair element must be given" in said["error"]["message"]
    said = await ask(fake, "/rerank", 400, query="a", documents=[])
    assert said["error"]["message"].endswith("documents has none") and said["error"]["param"] == "documents"
    said = await ask(fake, "/score", 400, text_1=[], text_2="a")
    assert said["error"]["message"].endswith("text_1 has none") and said["error"]["param"] == "text_1"
    said = await ask(fake, "/score", 400, data_1="a", text_1="b", data_2="c")
    assert "give exactly one of them" in said["error"]["message"]
    said = await ask(fake, "/score", 400, data_1="a", data_2=["b", {"image": "c"}])
    assert said["error"]["message"].startswith("data_2[1] must be text") and not fake.submitted


async def test_a_pair_that_is_too_long_is_named() -> None:
    fake = backend(**CROSS)
    said = await ask(fake, "/score", 400, data_1="a", data_2=["b", "word " * 90])
    assert said["error"]["code"] == "context_length_exceeded" and "pair 1 has" in said["error"]["message"]
    await ask(fake, "/score", data_1="a", data_2=["b", "word " * 90], truncate_prompt_tokens=-1)
    assert len(fake.submitted[1].prompt.token_ids) == 64


async def test_documents_are_ranked() -> None:
    fake = backend()
    documents = ["moon", {"text": "sun"}, "star"]
    answer = await ask(fake, "/rerank", query="sun", documents=documents, top_n=2, request_id="mine")
    assert answer["id"] == "rerank-mine" and answer["model"] == MODEL and len(answer["results"]) == 2
    assert answer["results"][0]["index"] == 1 and answer["results"][0]["document"] == {"text": "sun"}
    found = [each["relevance_score"] for each in answer["results"]]
    assert found == sorted(found, reverse=True)
    bare = await ask(fake, "/v2/rerank", query="sun", documents=documents, return_documents=False)
    assert len(bare["results"]) == 3 and "document" not in bare["results"][0]
    assert bare["meta"]["api_version"] == {"version": "2"}
    said = await ask(fake, "/v1/rerank", 400, query="sun", documents=["a"], rank_fields=["title"])
    assert said["error"]["param"] == "rank_fields"


async def test_documents_are_cut_one_by_one() -> None:
    fake = backend(**CROSS)
    await ask(fake, "/rerank", query="a b", documents=["word " * 90, "c"], max_tokens_per_doc=3)
    assert fake.tokenizer is not None
    plain = [len(fake.tokenizer.encode(each, add_special_tokens=False)) for each in ("a b", "c")]
    special = fake.tokenizer.backend.num_special_tokens_to_add(True)
    assert len(fake.submitted[0].prompt.token_ids) == plain[0] + 3 + special


async def test_classes() -> None:
    fake = backend(tasks=("classify", "token_classify"), labels=("no", "yes", "perhaps"))
    answer = await ask(fake, "/classify", input=["one", "two"])
    for text, each in zip(("one", "two"), answer["data"], strict=True):
        found = numbers(fake, text, "classify")
        assert each["probs"] == found.tolist() and each["num_classes"] == 3
        assert each["label"] == fake.labels[int(found.argmax())]
    said = await ask(fake, "/score", 400, data_1="a", data_2="b")
    assert "of which no score comes" in said["error"]["message"]


async def test_any_task() -> None:
    fake = backend()
    rows = (await ask(fake, "/pooling", input="one two", task="token_embed"))["data"][0]["data"]
    assert rows == numbers(fake, "one two", "token_embed").tolist()
    one = (await ask(fake, "/pooling", input=["one two"]))["data"][0]
    assert (one["object"], one["data"]) == ("pooling", numbers(fake, "one two", "embed").tolist())
    packed = (await ask(fake, "/pooling", input="a", task="token_embed", encoding_format="base64"))["data"][0]["data"]
    assert (
        np.frombuffer(base64.b64decode(packed), "<f4").reshape(-1, WIDTH).tolist()
        == numbers(fake, "a", "token_embed").tolist()
    )
    said = await ask(fake, "/pooling", 400, input="a", task="reward")
    assert "it has embed, token_embed" in said["error"]["message"]


async def test_a_generating_model_ranks_nothing() -> None:
    for path, body in (
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/score", {"data_1": "a", "data_2": "b"}),
        ("/classify", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/v2/embed", {"texts": ["a"]}),
    ):
        assert "--runner pooling" in (await ask(FakeBackend(), path, 400, **body))["error"]["message"]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(backend(matryoshka_dims=True, prompts={"query": "query: "}), api_key=("secret",)) as server:
        yield server


def test_coheres_client_embeds(live: Live) -> None:
    cohere = pytest.importorskip("cohere", reason="pip install cohere")
    ai = cohere.ClientV2("secret", base_url=live.url)
    kinds = ["float", "int8", "uint8", "binary", "ubinary"]
    texts = ["sun", "moon"]
    answer = ai.embed(model=MODEL, texts=texts, input_type="search_document", embedding_types=kinds)
    vectors = [numbers(live.backend, text, "embed") for text in texts]
    assert answer.texts == texts and answer.embeddings.float_ == [each.tolist() for each in vectors]
    assert answer.embeddings.int8[0] == np.rint(vectors[0] * 127).astype(int).tolist()
    assert answer.embeddings.ubinary[0] == np.packbits(vectors[0] >= 0).tolist()
    assert [each - 128 for each in answer.embeddings.ubinary[1]] == answer.embeddings.binary[1]
    assert answer.meta.billed_units.input_tokens > 0
    short = ai.embed(
        model=MODEL, texts=["sun"], input_type="search_query", embedding_types=["float"], output_dimension=8
    )
    assert len(short.embeddings.float_[0]) == 8
    assert str(live.backend.tokenizer.decode(live.backend.submitted[-1].prompt.token_ids)).startswith("query: sun")


def test_coheres_client_refuses_what_we_do(live: Live) -> None:
    cohere = pytest.importorskip("cohere", reason="pip install cohere")
    ai = cohere.ClientV2("secret", base_url=live.url)
    with pytest.raises(cohere.errors.BadRequestError, match="input_type"):
        ai.embed(model=MODEL, texts=["a"], input_type="poetry", embedding_types=["float"])
    with pytest.raises(cohere.errors.BadRequestError, match="max_tokens"):
        ai.embed(model=MODEL, texts=["a b c d e"], input_type="clustering", truncate="NONE", max_tokens=2)


@pytest.mark.parametrize("kind", ["ClientV2", "Client"])
def test_coheres_client_ranks(live: Live, kind: str) -> None:
    cohere = pytest.importorskip("cohere", reason="pip install cohere")
    ai = getattr(cohere, kind)("secret", base_url=live.url)
    answer = ai.rerank(model=MODEL, query="sun", documents=["moon", "sun", "star"], top_n=2)
    assert answer.results[0].index == 1 and answer.results[0].relevance_score == pytest.approx(1.0, abs=1e-6)
    assert len(answer.results) == 2


def test_openais_client(live: Live) -> None:
    import openai

    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="secret", max_retries=0) as ai:
        packed = ai.embeddings.create(model=MODEL, input=["sun", "moon"])  # base64 by itself
        listed = ai.embeddings.create(model=MODEL, input=["sun", "moon"], encoding_format="float", dimensions=4)
    assert packed.data[1].embedding == numbers(live.backend, "moon", "embed").tolist()
    assert [len(each.embedding) for each in listed.data] == [4, 4] and listed.usage.prompt_tokens > 0


def test_langchain(live: Live) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    ai = langchain.OpenAIEmbeddings(
        model=MODEL, base_url=f"{live.url}/v1", api_key="secret", check_embedding_ctx_length=False
    )
    assert ai.embed_query("sun") == numbers(live.backend, "sun", "embed").tolist()
    assert ai.embed_documents(["sun", "moon"])[1] == numbers(live.backend, "moon", "embed").tolist()


def test_llama_index(live: Live) -> None:
    found = pytest.importorskip("llama_index.embeddings.openai", reason="pip install llama-index-embeddings-openai")
    ai = found.OpenAIEmbedding(model_name=MODEL, api_base=f"{live.url}/v1", api_key="secret", max_retries=0)
    assert ai.get_text_embedding("sun") == numbers(live.backend, "sun", "embed").tolist()
    assert len(ai.get_text_embedding_batch(["sun", "moon"])) == 2
