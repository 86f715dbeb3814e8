"""The bundled embedding model: the library's vectors, alike for most that means the same, more found than BM25."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from sentence_transformers import SentenceTransformer

from quintet import LLM
from quintet.cli import main as cli
from quintet.config import BUNDLED_EMBED
from quintet.hub.resolve import resolve_model
from scripts.bundled_embed import sets
from scripts.bundled_embed.bm25 import BM25
from tests.helpers.logs import as_before
from tests.helpers.servers.serving import Server

SETS = sets.read(Path(__file__).parent / "bundled_embed_sets.json")
TEXTS = ["The cat sat on the mat.", "", "HTTP/1.1 200 OK", "naïve café 🦜 日本", "unbelievable " * 300]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_EMBED, device="cpu", use_tqdm=False) as opened:
        yield opened


def vectors(llm: LLM, texts: list[str]) -> np.ndarray:
    outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
    return np.stack([each.outputs.data for each in outputs])


@functools.cache
def folder() -> Path:
    from quintet.config import EngineConfig

    return resolve_model(EngineConfig(model=BUNDLED_EMBED))


def test_vectors_are_those_of_sentence_transformers(llm: LLM) -> None:
    texts = [*TEXTS, *SETS[0].queries[:20], *SETS[-1].documents[:20]]
    theirs = SentenceTransformer(str(folder()), device="cpu").encode(texts)
    ours = vectors(llm, texts)
    assert np.linalg.norm(ours, axis=-1) == pytest.approx(1, abs=1e-5)
    assert (ours * theirs).sum(-1) == pytest.approx(1, abs=1e-4)


def test_a_text_has_the_same_vector_alone_and_among_others(llm: LLM) -> None:
    together = vectors(llm, TEXTS)
    assert all(np.array_equal(vectors(llm, [text])[0], each) for text, each in zip(TEXTS, together, strict=True))


def test_most_that_means_the_same_is_nearer_than_what_has_the_same_words(llm: LLM) -> None:
    """Not all: its card shows those that are not."""
    triples = [vectors(llm, [text, same, other]) for text, same, other in sets.ALIKE]
    missed = [text for (text, *_), (one, near, far) in zip(sets.ALIKE, triples, strict=True) if one @ near <= one @ far]
    assert set(missed) <= {"He was very angry.", "A cat."}


@pytest.mark.parametrize("each", SETS, ids=lambda each: each.name)
def test_it_finds_more_than_words_alone(llm: LLM, each: sets.Retrieval) -> None:
    words = BM25(each.documents)
    by_words = sets.measured([words.scores(query) for query in each.queries])
    found = vectors(llm, list(each.queries)) @ vectors(llm, list(each.documents)).T
    ours = sets.measured(found.tolist())
    assert ours[0] > by_words[0] and ours[1] > by_words[1], f"{each.name}: {ours} beside BM25's {by_words}"


def test_bm25_by_hand() -> None:
    """log(1 + 1.5 / 1.5) for a word that one of two texts has; the texts are as long as the mean."""
    assert BM25(["a cat", "a dog"]).scores("Cat!") == pytest.approx([np.log(2), 0])


def test_the_measure_by_hand() -> None:
    """The first query's document comes first, the second's as third: 1 / log2(4); the third's ties with all."""
    scores = [[0.9, 0.1, 0.2], [0.9, 0.1, 0.2], [0.5] * 3]
    assert sets.measured(scores) == pytest.approx(((1 + 1 / 2 + 1 / 2) / 3, 1))


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in folder().rglob("*")) < 6e6


@pytest.mark.slow
def test_embed_without_a_model_and_without_a_network(llm: LLM, tmp_path: Path) -> None:
    """In a process of its own whose home is empty, and where the hub's cache would be."""
    texts = ["A cat.", "Kittens.", "Tax law."]
    command = [sys.executable, "-m", "quintet.cli.main", "embed", *texts, "--device", "cpu"]
    env = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["text"] for line in lines] == texts
    assert np.array([line["embedding"] for line in lines]) == pytest.approx(vectors(llm, texts), abs=1e-6)


def test_rerank_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("The invoice is overdue.\nDogs bark at night.\nSoup with carrots\n")
    with as_before():
        assert cli.main(["rerank", "something to eat", str(tmp_path / "in.txt"), "--device", "cpu", "-q"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("Soup with carrots")


def test_it_is_served_by_its_name(llm: LLM) -> None:
    with Server(BUNDLED_EMBED, "--device", "cpu") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        found = client.embeddings.create(model=BUNDLED_EMBED, input=TEXTS[0])
    assert found.data[0].embedding == pytest.approx(vectors(llm, TEXTS[:1])[0].tolist(), abs=1e-6)


def test_the_server_of_a_chat_model_says_what_gives_embeddings() -> None:
    with Server("--device", "cpu", "--max-model-len", "512", "--num-pages", "200") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        with pytest.raises(openai.BadRequestError) as said:
            client.embeddings.create(model="bundled", input=TEXTS[0])
    assert "generates text and gives no numbers" in said.value.message
    assert "start the server with an embedding model (`quintet serve bundled-embed`" in said.value.message


@pytest.mark.parametrize("command", ["embed", "rerank"])
def test_the_help_names_the_model_that_is_used(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "(default: bundled-embed)" in " ".join(capsys.readouterr().out.split())
