"""Encoders beside transformers' own: hidden states in float32 and bfloat16, alone and together, with their heads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quintet import LLM, PoolingParams
from tests.helpers.platforms import tpu

TEXTS = [[5, 6, 7], [4] * 40, [9], list(range(5, 63)), [3, 70, 2]]
WIDE: dict[str, Any] = {"vocab_size": 101, "initializer_range": 0.2}
SIZES = {**WIDE, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 72,
         "max_position_embeddings": 72}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # the class without its ending, and what a small one has
    "bert": ("Bert", SIZES),
    "roberta": ("Roberta", SIZES),
    "xlm-roberta": ("XLMRoberta", {**SIZES, "type_vocab_size": 1}),
    "camembert": ("Camembert", {**SIZES, "type_vocab_size": 1}),
    "distilbert": ("DistilBert", {**WIDE, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 72,
                                  "max_position_embeddings": 72}),
    "electra": ("Electra", {**SIZES, "embedding_size": 32}),
    "mpnet": ("MPNet", SIZES),
    "deberta-v2": ("DebertaV2", {**SIZES, "relative_attention": True, "pos_att_type": "c2p|p2c", "position_buckets": 8,
                                 "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False}),
    "deberta": ("Deberta", {**SIZES, "relative_attention": True, "pos_att_type": "c2p|p2c"}),
    "megatron-bert": ("MegatronBert", SIZES),
    "roformer": ("RoFormer", {**SIZES, "embedding_size": 32}),
    "rembert": ("RemBert", {**SIZES, "input_embedding_size": 32}),
    "squeezebert": ("SqueezeBert", {**SIZES, "embedding_size": 48}),
    "albert": ("Albert", {**SIZES, "embedding_size": 32, "num_hidden_groups": 2, "inner_group_num": 2,
                          "num_hidden_layers": 5}),
    "nomic_bert": ("NomicBert", SIZES),
    "gte": ("Gte", {**SIZES, "type_vocab_size": 2}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", SIZES),
    "modernbert": ("ModernBert", {**SIZES, "local_attention": 16, "pad_token_id": 0, "bos_token_id": 1,
                                  "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}),
}  # fmt: skip
CLASSES = [name for name in FAMILIES if name not in ("nomic_bert",)]  # whose classifiers transformers has


def made(name: str, ending: str, **more: Any) -> Any:
    torch.manual_seed(0)
    stem, sizes = FAMILIES[name]
    config = getattr(transformers, f"{stem}Config")(**{**sizes, **more})
    return getattr(transformers, f"{stem}{ending}")(config).eval()


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "skip_tokenizer_init": True, "use_tqdm": False, **settings})


def hidden(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        states: np.ndarray = model(torch.tensor([ids])).last_hidden_state[0].float().numpy()
    return states


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_are_transformers_and_the_same_alone(name: str, tmp_path: Path) -> None:
    model = made(name, "Model")
    model.save_pretrained(tmp_path)
    params = PoolingParams(task="token_embed", normalize=False)
    with opened(tmp_path) as llm:
        for _ in range(3):  # the third is replayed
            got = [each.outputs.data for each in llm.encode(TEXTS, params, use_tqdm=False)]
            for ids, states in zip(TEXTS, got, strict=True):
                wanted = hidden(model, ids)
                np.testing.assert_allclose(states, wanted, atol=3e-5 * max(1, np.abs(wanted).max()))
        alone = [llm.encode(ids, params, use_tqdm=False)[0].outputs.data for ids in TEXTS]
        assert all(np.array_equal(a, b) for a, b in zip(alone, got, strict=True))


@pytest.mark.slow
@tpu.needs_jax
@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_where_shapes_are_fixed_hidden_states_are_the_same(name: str, tmp_path: Path) -> None:
    """With segments and without, and with numbers for distances: the platform tpu, on JAX's CPU device."""
    model = made(name, "Model")
    model.save_pretrained(tmp_path)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "compilation_cache_dir": tpu.programs().name}
    with opened(tmp_path, device="tpu", **sizes) as llm:
        params = PoolingParams(task="token_embed", normalize=False)
        for ids, output in zip(TEXTS, llm.encode(TEXTS, params, use_tqdm=False), strict=True):
            np.testing.assert_allclose(output.outputs.data, hidden(model, ids), atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_in_bfloat16_are_near(name: str, tmp_path: Path) -> None:
    model = made(name, "Model", initializer_range=0.05)
    model.save_pretrained(tmp_path)
    with opened(tmp_path, dtype="bfloat16", pooler_config={"pooling_type": "MEAN"}) as llm:
        for ids, output in zip(TEXTS, llm.embed(TEXTS, use_tqdm=False), strict=True):
            wanted = hidden(model, ids).mean(0)
            assert output.outputs.data @ wanted / np.linalg.norm(wanted) >= 0.999


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("ending", ["ForSequenceClassification", "ForTokenClassification"])
def test_classes_are_transformers(name: str, ending: str, tmp_path: Path) -> None:
    model = made(name, ending, num_labels=3)
    model.save_pretrained(tmp_path)
    with opened(tmp_path) as llm, torch.no_grad():
        for ids, output in zip(TEXTS, llm.encode(TEXTS, use_tqdm=False), strict=True):
            wanted = model(torch.tensor([ids])).logits[0].softmax(-1)
            np.testing.assert_allclose(output.outputs.data, wanted, atol=1e-5)


def test_a_model_with_a_head_for_masks_is_embedded_by_its_trunk(tmp_path: Path) -> None:
    model = made("modernbert", "ForMaskedLM")
    model.save_pretrained(tmp_path)
    with opened(tmp_path) as llm:
        [output] = llm.embed([TEXTS[0]], use_tqdm=False)
        wanted = hidden(model.model, TEXTS[0])[0]
        np.testing.assert_allclose(output.outputs.data, wanted / np.linalg.norm(wanted), atol=3e-6)


def test_an_encoder_of_bert_generation_is_berts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.BertGenerationEncoder(transformers.BertGenerationConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    with opened(tmp_path) as llm:
        outputs = llm.encode(TEXTS, PoolingParams(task="token_embed", normalize=False), use_tqdm=False)
        for ids, output in zip(TEXTS, outputs, strict=True):
            np.testing.assert_allclose(output.outputs.data, hidden(model, ids), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size=3 is not supported"),
        ("deberta-v2", {"embedding_size": 32}, "embedding_size=32 is not supported"),
        ("deberta", {"talking_head": True}, "talking_head=True is not supported"),
        ("roformer", {"rotary_value": True}, "rotary_value=True is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    made(name, "Model", **settings).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        opened(tmp_path)


def test_adapters_of_shared_projections_are_refused(tmp_path: Path) -> None:
    """The tables of distances were made of their weights when those were loaded."""
    made("deberta-v2", "Model").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="share_att_key projects distances"):
        opened(tmp_path, enable_lora=True)


@pytest.mark.parametrize(("name", "length"), [("bert", 72), ("roberta", 70), ("xlm-roberta", 70)])
def test_a_text_may_be_as_long_as_there_are_positions(name: str, length: int, tmp_path: Path) -> None:
    model = made(name, "Model")
    model.save_pretrained(tmp_path)
    text = [5] * length
    with opened(tmp_path) as llm:
        [output] = llm.embed([text], use_tqdm=False)
        wanted = hidden(model, text)[0]
        np.testing.assert_allclose(output.outputs.data, wanted / np.linalg.norm(wanted), atol=3e-6)
        with pytest.raises(ValueError, match=f"max_model_len is {length}"):
            llm.embed([[5] * (length + 1)])
