"""Texts of all lengths: one token to 8,192 beside each other, none, special ones alone, and too many."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import GteConfig, GteModel, Qwen3Config, Qwen3Model

from quintet import LLM, PoolingParams
from tests.e2e.pooling.test_scores import WORDS, tokenizer

LONGEST = 8192
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 1000, 1024, 1025, 4097, LONGEST, 3]
SIZES: dict[str, Any] = {"vocab_size": 4 + len(WORDS), "hidden_size": 32, "num_hidden_layers": 2,
                         "num_attention_heads": 2, "intermediate_size": 48, "initializer_range": 0.2,
                         "pad_token_id": 0}  # fmt: skip


@pytest.fixture(scope="module")
def gte(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    model = GteModel(GteConfig(**SIZES, max_position_embeddings=LONGEST)).eval()
    folder = tmp_path_factory.mktemp("gte")
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, head_dim=16, num_key_value_heads=1, max_position_embeddings=LONGEST)
    model = Qwen3Model(config).eval()
    folder = tmp_path_factory.mktemp("decoder")
    model.save_pretrained(folder)
    plain = tokenizer()
    plain._tokenizer.post_processor = None  # it puts nothing around a text
    plain.save_pretrained(folder)
    return folder, model


def texts() -> list[list[int]]:
    seed = torch.Generator().manual_seed(1)
    return [torch.randint(4, SIZES["vocab_size"], (length,), generator=seed).tolist() for length in LENGTHS]


def wanted(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        mean = model(torch.tensor([ids])).last_hidden_state[0].double().mean(0)
    vector: np.ndarray = functional.normalize(mean, dim=0).float().numpy()
    return vector


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder), **{"device": "cpu", "use_tqdm": False, "pooler_config": {"pooling_type": "MEAN"}, **settings}
    )


@pytest.mark.parametrize("kind", ["gte", "decoder"])
def test_texts_of_all_lengths_have_transformers_vectors_and_the_same_bits_alone(
    kind: str, request: pytest.FixtureRequest
) -> None:
    folder, model = request.getfixturevalue(kind)
    given = texts()
    with opened(folder) as llm:
        together = [each.outputs.data for each in llm.embed(given, use_tqdm=False)]
        for ids, vector in zip(given, together, strict=True):
            exact = wanted(model, ids)
            assert vector @ exact >= 0.99999
            np.testing.assert_allclose(vector, exact, atol=2e-5)
        for place in (0, 3, 9, 10, len(LENGTHS) - 2):
            assert np.array_equal(llm.embed([given[place]], use_tqdm=False)[0].outputs.data, together[place])


def test_a_decoders_mean_has_the_same_bits_in_chunks_of_any_size(decoder: tuple[Path, Any]) -> None:
    given = [each[:1100] for each in texts()[7:11]]
    found = []
    for tokens in (100, 512, 8192):
        with opened(decoder[0], max_num_batched_tokens=tokens) as llm:
            found.append(np.stack([each.outputs.data for each in llm.embed(given, use_tqdm=False)]))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_an_empty_text_is_its_special_tokens(gte: tuple[Path, Any]) -> None:
    folder, model = gte
    with opened(folder) as llm:
        [empty, special] = llm.embed(["", {"prompt_token_ids": [2, 3]}], use_tqdm=False)
        assert empty.prompt_token_ids == [2, 3]
        assert np.array_equal(empty.outputs.data, special.outputs.data)
        np.testing.assert_allclose(empty.outputs.data, wanted(model, [2, 3]), atol=3e-6)


def test_a_text_without_any_token_is_refused(decoder: tuple[Path, Any]) -> None:
    with opened(decoder[0]) as llm:
        for nothing in ("", {"prompt_token_ids": []}):
            with pytest.raises(ValueError, match="empty"):
                llm.embed([nothing])


def test_what_is_too_long_is_refused_or_cut_to_what_is_kept(gte: tuple[Path, Any]) -> None:
    folder, model = gte
    text = "the cat " * LONGEST
    with opened(folder) as llm:
        with pytest.raises(ValueError, match=f"has {2 * LONGEST + 2} tokens, and max_model_len is {LONGEST}"):
            llm.embed([text])
        for keep, length in ((-1, LONGEST), (20, 20), (2, 2), (1, 1)):
            [output] = llm.embed([text], truncate_prompt_tokens=keep, use_tqdm=False)
            ids = output.prompt_token_ids
            assert len(ids) == length and (length < 2 or ids[-1] == 3)
            np.testing.assert_allclose(output.outputs.data, wanted(model, ids), atol=2e-5)
        with pytest.raises(ValueError, match=f"is {LONGEST + 1}, and max_model_len is {LONGEST}"):
            llm.embed([text], pooling_params=PoolingParams(truncate_prompt_tokens=LONGEST + 1))
