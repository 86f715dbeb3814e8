"""Adapters of models that give numbers: embeddings, and classes with a head of the adapter's own, against PEFT."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, Qwen3Config, Qwen3ForSequenceClassification, Qwen3ForTokenClassification, Qwen3Model

from quintet import LLM, LoRARequest, PoolingParams
from tests.e2e.lora.adapters import products, request_of
from tests.e2e.pooling.test_encoders import SIZES, TEXTS, made
from tests.helpers.lora_adapters import BUNDLED

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
RAW = {"use_activation": False}  # logits


def adapter_of(model: Any, folder: Path, seed: int, kind: str, **settings: Any) -> Any:
    """PEFT's model, with random numbers in all that it trains."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type=kind, r=3, **settings))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3 if "lora_" not in name else 0.15)
    adapted.save_pretrained(folder)
    return adapted.eval()


def opened(folder: Path, **settings: Any) -> LLM:
    sizes = {"max_num_batched_tokens": 64, "max_loras": 2, "max_lora_rank": 4, "dtype": "float32", **settings}
    return LLM(str(folder), device="cpu", skip_tokenizer_init=True, use_tqdm=False, enable_lora=True, **sizes)


def run(model: Any, ids: list[int]) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]))


def qwen3(cls: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, **settings}
    return cls(Qwen3Config(**sizes)).eval()


TRUNKS: dict[str, Callable[[], Any]] = {
    **{name: (lambda name=name: made(name, "Model")) for name in ("bert", "roberta", "mpnet", "distilbert")},
    "modernbert": lambda: made("modernbert", "Model"),
    "qwen3": lambda: qwen3(Qwen3Model),
}


@pytest.mark.parametrize("name", TRUNKS)
def test_hidden_states_with_adapters_are_pefts(name: str, tmp_path: Path) -> None:
    model = TRUNKS[name]()
    model.save_pretrained(tmp_path / "base")
    targets = products(model)
    models = [model, *(
        adapter_of(model, tmp_path / str(seed), seed, "FEATURE_EXTRACTION", target_modules=targets,
                   exclude_modules=".*pooler.*") for seed in (1, 2)
    )]  # fmt: skip
    requests = [None, request_of(tmp_path / "1"), request_of(tmp_path / "2")]
    params = PoolingParams(task="token_embed", normalize=False)
    cases = [(at, ids) for ids in TEXTS for at in range(3)]
    with opened(tmp_path / "base", runner="pooling") as llm:
        for _ in range(2):
            outputs = llm.encode(
                [ids for _, ids in cases], params, use_tqdm=False, lora_request=[requests[at] for at, _ in cases]
            )
            for (at, ids), output in zip(cases, outputs, strict=True):
                wanted = run(models[at], ids).last_hidden_state[0].numpy()
                np.testing.assert_allclose(output.outputs.data, wanted, atol=2e-5, rtol=2e-5)
    assert np.abs(run(models[0], TEXTS[0]).last_hidden_state - run(models[1], TEXTS[0]).last_hidden_state).max() > 0.1


def test_embeddings_of_the_bundled_model_are_pefts(tmp_path: Path) -> None:
    folder = BUNDLED.parent / "bundled-embed"
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    adapted = adapter_of(
        model, tmp_path / "a", 1, "FEATURE_EXTRACTION", target_modules=products(model), exclude_modules=".*pooler.*"
    )
    texts = [[5, 6, 7], [4] * 40, list(range(5, 63))]
    with opened(folder) as llm:
        outputs = llm.embed(texts, use_tqdm=False, lora_request=request_of(tmp_path / "a"))
        plain = llm.embed(texts, use_tqdm=False)
    for ids, ours, base in zip(texts, outputs, plain, strict=True):
        mean = run(adapted, ids).last_hidden_state[0].mean(0)
        wanted = torch.nn.functional.normalize(mean, dim=0).numpy()
        assert np.dot(wanted, ours.outputs.embedding) > 1 - 1e-6
        assert np.dot(base.outputs.embedding, ours.outputs.embedding) < 0.999


def test_an_adapter_of_a_pooler_that_was_not_trained_is_served(tmp_path: Path) -> None:
    """Its B is zero, as PEFT makes it; one that was trained is refused, by name."""
    model = made("bert", "Model")
    model.save_pretrained(tmp_path / "base")
    requests = []
    for trained in (False, True):
        adapted = adapter_of(model, tmp_path / str(trained), 1, "FEATURE_EXTRACTION", target_modules=["dense"])
        if not trained:
            torch.nn.init.zeros_(adapted.base_model.model.pooler.dense.lora_B["default"].weight)
            adapted.save_pretrained(tmp_path / str(trained))
        requests.append(request_of(tmp_path / str(trained)))
    with opened(tmp_path / "base", runner="pooling") as llm:
        assert len(llm.embed(TEXTS, use_tqdm=False, lora_request=requests[0])) == len(TEXTS)
        with pytest.raises(ValueError, match=r"changes pooler\.dense, which this model has no product for"):
            llm.embed(TEXTS, use_tqdm=False, lora_request=requests[1])


CLASSIFIERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "bert": (lambda: made("bert", "ForSequenceClassification", num_labels=3), {"task_type": "SEQ_CLS"}),
    "roberta": (lambda: made("roberta", "ForSequenceClassification", num_labels=3), {"task_type": "SEQ_CLS"}),
    "distilbert": (
        lambda: made("distilbert", "ForSequenceClassification", num_labels=3),
        {"task_type": "SEQ_CLS", "modules_to_save": ["pre_classifier", "classifier"]},
    ),
    "modernbert": (lambda: made("modernbert", "ForSequenceClassification", num_labels=3), {"task_type": "SEQ_CLS"}),
    "qwen3": (lambda: qwen3(Qwen3ForSequenceClassification, num_labels=3), {"task_type": "SEQ_CLS"}),
    "bert of tokens": (lambda: made("bert", "ForTokenClassification", num_labels=5), {"task_type": "TOKEN_CLS"}),
    "qwen3 of tokens": (lambda: qwen3(Qwen3ForTokenClassification, num_labels=5), {"task_type": "TOKEN_CLS"}),
}
TARGETS = {
    "bert": ["query", "value"], "roberta": ["query", "value"], "distilbert": ["q_lin", "v_lin"],
    "modernbert": ["Wqkv", "Wo"], "qwen3": ["q_proj", "v_proj", "down_proj"],
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_with_a_head_of_the_adapter_are_pefts(name: str, tmp_path: Path) -> None:
    make, settings = CLASSIFIERS[name]
    model, kind, of_tokens = make(), settings["task_type"], name.endswith("tokens")
    model.save_pretrained(tmp_path / "base")
    more = {entry: value for entry, value in settings.items() if entry != "task_type"}
    models = [model, *(
        adapter_of(model, tmp_path / str(seed), seed, kind, target_modules=TARGETS[name.split()[0]], **more)
        for seed in (1, 2)
    )]  # fmt: skip
    requests: list[LoRARequest | None] = [None, request_of(tmp_path / "1"), request_of(tmp_path / "2")]
    cases = [(at, ids) for ids in TEXTS for at in range(3)]
    with opened(tmp_path / "base") as llm:
        outputs = llm.encode(
            [ids for _, ids in cases], PoolingParams(task="token_classify" if of_tokens else "classify", **RAW),
            use_tqdm=False, lora_request=[requests[at] for at, _ in cases],
        )  # fmt: skip
    for (at, ids), output in zip(cases, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, run(models[at], ids).logits[0].numpy(), atol=5e-5, rtol=2e-5)
    heads = [run(each, TEXTS[0]).logits for each in models]
    assert (heads[0] - heads[1]).abs().max() > 0.1 and (heads[1] - heads[2]).abs().max() > 0.1


def test_a_head_with_other_labels_and_other_whole_tensors_are_refused_by_name(tmp_path: Path) -> None:
    model = made("bert", "ForSequenceClassification", num_labels=3)
    model.save_pretrained(tmp_path / "base")
    five = made("bert", "ForSequenceClassification", num_labels=5)
    adapter_of(five, tmp_path / "five", 1, "SEQ_CLS", target_modules=["query"])
    adapter_of(model, tmp_path / "norms", 1, "SEQ_CLS", target_modules=["query"], modules_to_save=["LayerNorm"])
    with opened(tmp_path / "base") as llm:
        with pytest.raises(ValueError, match=r"classifier\.weight: .*\[5, 48\].*\[3, 48\].*as many labels"):
            llm.classify(TEXTS, use_tqdm=False, lora_request=request_of(tmp_path / "five"))
        with pytest.raises(ValueError, match=r"LayerNorm.*quintet merge-lora"):
            llm.classify(TEXTS, use_tqdm=False, lora_request=request_of(tmp_path / "norms"))
        assert len(llm.classify(TEXTS, use_tqdm=False)) == len(TEXTS)
