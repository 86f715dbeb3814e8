"""Models without a file here that give numbers, by transformers' own code on this engine, beside transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from quintet import LLM, PoolingParams
from quintet.models.transformers import TransformersEncoder, TransformersForCausalLM
from tests.e2e.pooling.test_scores import DOCUMENTS, QUERY, WORDS, crossed, tokenizer
from tests.helpers.releases import need_model_type

TEXTS = [[5, 6, 7], [4] * 40, [9], list(range(5, 63)), [3, 70, 2]]
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 72, "initializer_range": 0.2, "pad_token_id": 1,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "data2vec-text": {},  # positions begin behind the padding's
    "ernie": {"type_vocab_size": 2},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 4},
    "eurobert": {},
    "ultrabert": {"sliding_window": 16},  # windows to both sides in some layers
}
RAW = PoolingParams(task="token_embed", normalize=False)


def made(kind: str, auto: Any = AutoModel, **more: Any) -> Any:
    need_model_type(kind)
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model(kind, **{**SIZES, **ENCODERS.get(kind, {}), **more})).float().eval()


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "skip_tokenizer_init": True, "use_tqdm": False, **settings})


def model_of(llm: LLM) -> Any:
    return llm._client.engine_plan.ranks.workers[0].model  # type: ignore[attr-defined]


def hidden(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        states: np.ndarray = model(input_ids=torch.tensor([ids])).last_hidden_state[0].float().numpy()
    return states


def assert_states(llm: LLM, trunk: Any) -> None:
    """All tokens' states are transformers', and the same bits alone."""
    together = [each.outputs.data for each in llm.encode(TEXTS, RAW, use_tqdm=False)]
    for ids, states in zip(TEXTS, together, strict=True):
        wanted = hidden(trunk, ids)
        np.testing.assert_allclose(states, wanted, atol=3e-5 * max(1, np.abs(wanted).max()))
        assert np.array_equal(llm.encode([ids], RAW, use_tqdm=False)[0].outputs.data, states)


@pytest.mark.parametrize("kind", ENCODERS)
def test_hidden_states_are_transformers_and_the_same_alone(kind: str, tmp_path: Path) -> None:
    trunk = made(kind)
    trunk.save_pretrained(tmp_path)
    with opened(tmp_path) as llm:
        assert isinstance(model_of(llm), TransformersEncoder)
        assert_states(llm, trunk)


def test_a_window_to_both_sides_shows(tmp_path: Path) -> None:
    """What the test above compares depends on the window."""
    narrow, wide = (hidden(made("ultrabert", sliding_window=each), TEXTS[3]) for each in (16, 64))
    assert np.abs(narrow - wide).max() > 0.01


def test_checkpoints_with_a_head_for_masks_give_their_trunk(tmp_path: Path) -> None:
    model = made("eurobert", AutoModelForMaskedLM)
    model.save_pretrained(tmp_path)
    with opened(tmp_path, quantization="int8", activation_bits=16) as llm:
        got = [each.outputs.data for each in llm.encode(TEXTS, RAW, use_tqdm=False)]
    for ids, states in zip(TEXTS, got, strict=True):
        wanted = hidden(model.model, ids)
        lengths = np.linalg.norm(states, axis=1) * np.linalg.norm(wanted, axis=1)
        assert ((states * wanted).sum(1) / lengths).min() > 0.99, "int8 is near"


def test_the_longest_text_is_what_the_table_of_positions_is_for(tmp_path: Path) -> None:
    trunk = made("data2vec-text")
    trunk.save_pretrained(tmp_path)
    with opened(tmp_path) as llm:
        (whole,) = llm.encode([[7] * 70], RAW, use_tqdm=False)
        np.testing.assert_allclose(whole.outputs.data, hidden(trunk, [7] * 70), atol=1e-4)
        with pytest.raises(ValueError, match="71 tokens"):
            llm.encode([[7] * 71], RAW, use_tqdm=False)


def test_a_cross_encoder_with_segments_scores_as_transformers_does(tmp_path: Path) -> None:
    sizes = {"vocab_size": 4 + len(WORDS), "pad_token_id": 0, "num_labels": 1}
    model, hf = made("ernie", AutoModelForSequenceClassification, **sizes), tokenizer()
    model.save_pretrained(tmp_path)
    hf.save_pretrained(tmp_path)
    with opened(tmp_path, skip_tokenizer_init=False) as llm:
        got = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    np.testing.assert_allclose(got, [crossed(model, hf, QUERY, each) for each in DOCUMENTS], atol=3e-6)


@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
def test_a_decoder_embeds_in_chunks(pooling: str, tmp_path: Path) -> None:
    trunk = made("diffllama", num_key_value_heads=2)
    trunk.save_pretrained(tmp_path)
    settings = {"pooler_config": {"pooling_type": pooling}, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    with opened(tmp_path, **settings) as llm:
        assert type(model_of(llm)) is TransformersForCausalLM
        for _ in range(2):  # the prefix cache has them
            got = [each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)]
            for ids, vector in zip(TEXTS, got, strict=True):
                states = hidden(trunk, ids)
                wanted = states[-1] if pooling == "LAST" else states.mean(0)
                np.testing.assert_allclose(vector, wanted / np.linalg.norm(wanted), atol=3e-5)


def test_a_decoder_with_a_head_of_classes(tmp_path: Path) -> None:
    """Of a family of ours, by transformers' code because that is asked for."""
    model = made("qwen3", AutoModelForSequenceClassification, num_labels=3, head_dim=16, num_key_value_heads=2)
    model.save_pretrained(tmp_path)
    with opened(tmp_path, model_impl="transformers") as llm, torch.no_grad():
        for ids, output in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
            wanted = model(input_ids=torch.tensor([ids])).logits[0].softmax(-1).numpy()
            np.testing.assert_allclose(output.outputs.probs, wanted, atol=3e-6)


def test_an_encoder_generates_no_text(tmp_path: Path) -> None:
    made("eurobert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gives hidden states and no logits, so it generates nothing"):
        opened(tmp_path, runner="generate")
