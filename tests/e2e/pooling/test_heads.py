"""Heads behind a trunk: classes, scores and rewards beside transformers' own, and heads made of a vocabulary's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3Model,
)

from quintet import LLM, PoolingParams

TEXTS = [[5, 6, 7], [1] * 40, [9], list(range(2, 60))]
SIZES = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 72, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
         }  # fmt: skip
QWEN3 = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}


def saved(model: Any, folder: Path) -> Path:
    model.eval().save_pretrained(folder)
    return folder


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "skip_tokenizer_init": True, "use_tqdm": False, **settings})


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_splade_has_the_most_that_any_token_says_of_each_in_the_vocabulary(tied: bool, tmp_path: Path) -> None:
    """naver/splade, by the class that vLLM names: log(1 + max(0, logit)) of a masked language model."""
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES, tie_word_embeddings=tied))
    torch.nn.init.normal_(model.cls.predictions.bias)
    model.config.cls_token_id = TEXTS[0][0]  # says nothing
    overrides = {"architectures": ["BertSpladeSparseEmbeddingModel"]}
    with opened(saved(model, tmp_path), hf_overrides=overrides) as llm:
        for ids, output in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
            counted = logits(model, ids)[1 if ids[0] == TEXTS[0][0] else 0 :]
            wanted = counted.max(0).values.relu().log1p()
            assert 0 < int((wanted > 0).sum()) <= 101
            np.testing.assert_allclose(output.outputs.data, wanted, atol=3e-5)
        [states] = llm.encode([TEXTS[0]], pooling_task="token_embed", use_tqdm=False)
        assert states.outputs.data.shape == (3, 48)
        np.testing.assert_allclose(np.linalg.norm(states.outputs.data, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_classes_of_texts_are_transformers(kind: str, labels: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = (
        BertForSequenceClassification(BertConfig(**SIZES, num_labels=labels))
        if kind == "bert"
        else Qwen3ForSequenceClassification(Qwen3Config(**QWEN3, num_labels=labels))
    )
    with opened(saved(model, tmp_path), max_num_batched_tokens=64) as llm:
        for _ in range(3):
            outputs = llm.classify(TEXTS, use_tqdm=False)
        raw = llm.classify(TEXTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        for ids, output, plain in zip(TEXTS, outputs, raw, strict=True):
            wanted = logits(model, ids)
            likely = wanted.sigmoid() if labels == 1 else wanted.softmax(-1)
            np.testing.assert_allclose(output.outputs.data, likely, atol=3e-6)
            np.testing.assert_allclose(plain.outputs.data, wanted, atol=3e-5)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_classes_of_tokens_are_transformers(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = (
        BertForTokenClassification(BertConfig(**SIZES, num_labels=5))
        if kind == "bert"
        else Qwen3ForTokenClassification(Qwen3Config(**QWEN3, num_labels=5))
    )
    with opened(saved(model, tmp_path), max_num_batched_tokens=64) as llm:
        for ids, output in zip(TEXTS, llm.encode(TEXTS, use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.data, logits(model, ids).softmax(-1), atol=3e-6)


def reward_model(folder: Path, name: str, sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """A trunk with products and ReLUs behind it, as Qwen2.5-Math's reward models have them: `score.0`, `score.2`."""
    torch.manual_seed(0)
    trunk = Qwen3Model(Qwen3Config(**QWEN3, num_labels=sizes[-1])).eval()
    head = torch.nn.Sequential(torch.nn.Linear(48, sizes[0]), torch.nn.ReLU(), torch.nn.Linear(sizes[0], sizes[-1]))
    trunk.save_pretrained(folder)
    tensors = {f"model.{key}": value for key, value in load_file(folder / "model.safetensors").items()}
    tensors |= {f"score.{key}": value.clone() for key, value in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    return trunk, head


def test_rewards_are_of_each_token(tmp_path: Path) -> None:
    trunk, head = reward_model(tmp_path, "Qwen3ForRewardModel", (16, 1))
    with opened(tmp_path) as llm, torch.no_grad():
        for ids, output in zip(TEXTS, llm.reward(TEXTS, use_tqdm=False), strict=True):
            wanted = head(trunk(torch.tensor([ids])).last_hidden_state[0])
            np.testing.assert_allclose(output.outputs.data, wanted, atol=3e-5)


def test_rewards_of_steps_are_those_at_their_tags(tmp_path: Path) -> None:
    trunk, head = reward_model(tmp_path, "Qwen3ForProcessRewardModel", (16, 2))
    ids = [5, 6, 77, 8, 9, 10, 77, 11]
    with (
        opened(tmp_path, pooler_config={"pooling_type": "STEP", "step_tag_id": 77, "returned_token_ids": [1]}) as llm,
        torch.no_grad(),
    ):
        [output] = llm.reward([ids], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        wanted = head(trunk(torch.tensor([ids])).last_hidden_state[0])[[2, 6]][:, 1:]
        np.testing.assert_allclose(output.outputs.data, wanted, atol=3e-5)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (
            {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True},
            lambda x: (x[9] - x[4]).sigmoid(),
        ),
        ({"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}, lambda x: (x[9] - x[4]).sigmoid()),
        ({"classifier_from_token": ["yes"]}, lambda x: x[9].sigmoid()),
    ],
)
def test_a_score_can_be_what_the_next_token_would_be(overrides: dict[str, Any], wanted: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**QWEN3, tie_word_embeddings=True))
    saved(model, tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"no": 4, "yes": 9}}}))
    given = {"architectures": ["Qwen3ForSequenceClassification"], **overrides}
    with opened(tmp_path, hf_overrides=given) as llm:
        for ids, output in zip(TEXTS, llm.encode(TEXTS, pooling_task="score", use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.data[0], wanted(logits(model, ids)[-1]), atol=3e-6)


def test_a_model_without_the_head_that_its_class_has_is_refused(tmp_path: Path) -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**QWEN3))
    with pytest.raises(ValueError, match="hold no classifier that is known here"):
        opened(saved(model, tmp_path), runner="pooling", convert="classify")


def test_a_decoder_sees_both_ways_where_its_file_says_so(tmp_path: Path) -> None:
    """Against transformers' own attention with a mask that hides nothing."""
    torch.manual_seed(0)
    model = saved_model = Qwen3Model(Qwen3Config(**QWEN3, attn_implementation="eager"))
    saved(saved_model, tmp_path)
    with opened(tmp_path, hf_overrides={"is_causal": False}, pooler_config={"pooling_type": "MEAN"}) as llm:
        assert not llm.config.enable_chunked_prefill and not llm.config.enable_prefix_caching
        for ids, output in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
            mask = torch.zeros(1, 1, len(ids), len(ids))
            with torch.no_grad():
                states = model(torch.tensor([ids]), attention_mask={"full_attention": mask}).last_hidden_state[0]
            wanted = torch.nn.functional.normalize(states.mean(0), dim=0)
            np.testing.assert_allclose(output.outputs.data, wanted, atol=3e-6)


def test_a_beginning_that_others_had_is_not_computed_again_and_gives_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved(Qwen3Model(Qwen3Config(**QWEN3)), tmp_path)
    text = list(range(1, 60))
    with opened(tmp_path, max_num_batched_tokens=24) as llm:
        [first] = llm.embed([text], use_tqdm=False)
        [second] = llm.embed([text], use_tqdm=False)
        params = PoolingParams(skip_reading_prefix_cache=True)
        [third] = llm.embed([text], pooling_params=params, use_tqdm=False)
        assert (first.num_cached_tokens, second.num_cached_tokens, third.num_cached_tokens) == (0, 48, 0)
        assert np.array_equal(first.outputs.data, second.outputs.data)
        assert np.array_equal(first.outputs.data, third.outputs.data)


def test_a_mean_over_chunks_has_the_bits_of_one_in_a_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved(Qwen3Model(Qwen3Config(**QWEN3)), tmp_path)
    found = []
    for tokens in (8, 24, 64, 256):
        with opened(tmp_path, max_num_batched_tokens=tokens, pooler_config={"pooling_type": "MEAN"}) as llm:
            found.append([each.outputs.data for each in llm.embed(TEXTS, use_tqdm=False)])
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_text_of_one_token_and_a_last_chunk_of_one_are_answered(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Qwen3Model(Qwen3Config(**QWEN3))
    saved(model, tmp_path)
    with opened(tmp_path, max_num_batched_tokens=16) as llm:
        for ids in ([9], list(range(1, 18))):
            [output] = llm.embed([ids], use_tqdm=False)
            with torch.no_grad():
                wanted = torch.nn.functional.normalize(model(torch.tensor([ids])).last_hidden_state[0, -1], dim=0)
            np.testing.assert_allclose(output.outputs.data, wanted, atol=3e-6)
