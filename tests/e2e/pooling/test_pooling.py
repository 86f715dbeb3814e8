"""Models that answer with numbers, by LLM: beside transformers' own, alone and together, and what is refused."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from quintet import LLM, AsyncLLM, PoolingParams
from quintet.pooling_outputs import PoolingRequestOutput, Unanswered

TEXTS = [[5, 6, 7], [1] * 40, [9], list(range(2, 60))]
BERT = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 72, "max_position_embeddings": 64, "initializer_range": 0.2}  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**BERT)).eval()
    folder = tmp_path_factory.mktemp("bert")
    model.save_pretrained(folder)
    return folder, model


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "skip_tokenizer_init": True, "use_tqdm": False, **settings})


def hidden(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        states: np.ndarray = model(torch.tensor([ids])).last_hidden_state[0].float().numpy()
    return states


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)


@pytest.mark.parametrize("kind", ["CLS", "LAST", "MEAN"])
def test_vectors_are_transformers_and_the_same_alone(bert: tuple[Path, Any], kind: str) -> None:
    folder, model = bert
    pick = {"CLS": lambda h: h[0], "LAST": lambda h: h[-1], "MEAN": lambda h: h.mean(0)}[kind]
    with opened(folder, pooler_config={"pooling_type": kind}) as llm:
        for _ in range(4):  # from the third on the step is replayed
            got = [each.outputs.data for each in llm.embed(TEXTS, use_tqdm=False)]
            for ids, vector in zip(TEXTS, got, strict=True):
                np.testing.assert_allclose(vector, unit(pick(hidden(model, ids))), atol=2e-6)
        alone = [llm.embed(ids, use_tqdm=False)[0].outputs.data for ids in TEXTS]
        assert all(np.array_equal(a, b) for a, b in zip(alone, got, strict=True))


def test_each_token_has_a_vector_where_that_is_asked(bert: tuple[Path, Any]) -> None:
    folder, model = bert
    with opened(folder) as llm:
        params = PoolingParams(task="token_embed", normalize=False)
        for ids, output in zip(TEXTS, llm.encode(TEXTS, params, use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.data, hidden(model, ids), atol=2e-5)


def test_segments_are_those_that_a_prompt_names(bert: tuple[Path, Any]) -> None:
    folder, model = bert
    ids, types = [5, 6, 7, 8], [0, 0, 1, 1]
    with torch.no_grad():
        wanted = model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).last_hidden_state[0, 0].numpy()
    with opened(folder) as llm:
        [output] = llm.embed({"prompt_token_ids": ids, "token_type_ids": types}, use_tqdm=False)
        np.testing.assert_allclose(output.outputs.data, unit(wanted), atol=2e-6)
        with pytest.raises(ValueError, match="must be a list of 4 ints"):
            llm.embed({"prompt_token_ids": ids, "token_type_ids": [0]})


def test_what_is_too_long_is_refused_or_cut(bert: tuple[Path, Any]) -> None:
    folder, model = bert
    with opened(folder) as llm:
        with pytest.raises(ValueError, match="the text has 70 tokens, and max_model_len is 64"):
            llm.embed([[3], [2] * 70])
        [output] = llm.embed([[2] * 70], truncate_prompt_tokens=-1, use_tqdm=False)
        assert output.prompt_token_ids == [2] * 64
        np.testing.assert_allclose(output.outputs.data, unit(hidden(model, [2] * 64)[0]), atol=2e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate([[1, 2]]), r"gives numbers \(embed, token_embed\), and no text"),
        (lambda llm: llm.classify([[1, 2]]), "'classify' is not what this model gives"),
        (lambda llm: llm.embed([[1]], pooling_params=PoolingParams(dimensions=8)), "dimensions cannot be chosen"),
        (lambda llm: llm.embed([[1]], pooling_params=PoolingParams(task="token_embed")), "task is 'token_embed'"),
        (lambda llm: llm.encode([[1]], [PoolingParams()] * 2), "has 2 entries for 1 prompts"),
    ],
)
def test_what_a_model_has_not_is_said(bert: tuple[Path, Any], call: Any, message: str) -> None:
    with opened(bert[0]) as llm, pytest.raises(ValueError, match=message):
        call(llm)


def test_first_numbers_stand_for_all_where_the_model_was_made_so(bert: tuple[Path, Any]) -> None:
    folder, model = bert
    with opened(folder, hf_overrides={"matryoshka_dimensions": [8, 16]}) as llm:
        [output] = llm.embed([TEXTS[0]], pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
        np.testing.assert_allclose(output.outputs.data, unit(hidden(model, TEXTS[0])[0, :8]), atol=2e-6)
        with pytest.raises(ValueError, match="must be one of 8, 16"):
            llm.embed([[1]], pooling_params=PoolingParams(dimensions=9))


async def test_texts_of_coroutines_share_steps_and_have_the_same_bits(bert: tuple[Path, Any]) -> None:
    folder, _ = bert
    with opened(folder) as llm:
        wanted = [each.outputs.data for each in llm.embed(TEXTS, use_tqdm=False)]
    engine = AsyncLLM(str(folder), device="cpu", skip_tokenizer_init=True)

    async def vector(ids: list[int]) -> np.ndarray:
        [output] = [each async for each in engine.encode(ids, PoolingParams(task="embed"))]
        return output.outputs.data

    try:
        got = await asyncio.gather(*map(vector, TEXTS))
        assert all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))
        added = await (await engine.add_request("a", TEXTS[0], PoolingParams())).get()
        assert isinstance(added, PoolingRequestOutput) and np.array_equal(added.outputs.data, wanted[0])
        with pytest.raises(ValueError, match="and no text"):
            await anext(engine.generate([1, 2]))
    finally:
        engine.shutdown()


def test_a_step_that_fails_is_said_and_the_next_text_is_answered(
    bert: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(bert[0]) as llm:
        worker = llm._client.engine_plan.ranks.workers[0]
        whole, calls = worker.main.step, []

        def failing(*given: Any) -> Any:
            calls.append(given)
            if len(calls) == 1:
                raise RuntimeError("a kernel failed")
            return whole(*given)

        monkeypatch.setattr(worker.main, "step", failing)
        with pytest.raises(Unanswered, match="a kernel failed"):
            llm.embed(TEXTS, use_tqdm=False)
        assert llm.embed(TEXTS[:1], use_tqdm=False)[0].outputs.data.shape == (48,)


def test_numbers_that_are_not_finite_are_an_error_of_their_text_alone(bert: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = bert
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][7] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with opened(tmp_path) as llm:
        with pytest.raises(Unanswered, match="no finite numbers for this text"):
            llm.embed([[5, 6], [7]], use_tqdm=False)
        assert np.isfinite(llm.embed([[5, 6]], use_tqdm=False)[0].outputs.data).all()


def test_a_model_that_generates_has_no_vectors_unless_it_is_run_for_them() -> None:
    with LLM("bundled", device="cpu", use_tqdm=False) as llm, pytest.raises(ValueError, match="runner='pooling'"):
        llm.embed("a text")
