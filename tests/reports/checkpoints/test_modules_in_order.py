"""Modules of Sentence Transformers and of ColBERTs are computed in their order, beside the library itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling
from transformers import BertConfig, BertModel

from quintet import LLM
from tests.e2e.pooling.test_scores import SIZES, WORDS, tokenizer

TEXTS = ["a cat sat", "the dog ran on the mat", "where is it"]
Plain = torch.nn.Identity
ORDERS: dict[str, Callable[[], list[Any]]] = {
    "report 5: Normalize, Dense": lambda: [Normalize(), Dense(48, 8, bias=False, activation_function=Plain())],
    "Normalize, Dense with bias and tanh": lambda: [Normalize(), Dense(48, 8)],
    "Dense, Normalize, Dense": lambda: [Dense(48, 16), Normalize(), Dense(16, 8)],
    "Normalize, Dense, Normalize": lambda: [Normalize(), Dense(48, 8), Normalize()],
    "Normalize, Normalize": lambda: [Normalize(), Normalize()],
    "Dense, Dense, Normalize": lambda: [Dense(48, 16), Dense(16, 8), Normalize()],
    "LayerNorm": lambda: [LayerNorm(48)],
    "Dense, LayerNorm, Normalize": lambda: [Dense(48, 8), LayerNorm(8), Normalize()],
    "Normalize, Dropout, Dense": lambda: [Normalize(), Dropout(0.5), Dense(48, 8)],
    "a residual, as it is": lambda: [Dense(48, 48, use_residual=True)],
    "a residual of its own width": lambda: [Dense(48, 8, use_residual=True, activation_function=torch.nn.ReLU())],
    "nothing": list,
}


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("trunk")
    BertModel(BertConfig(vocab_size=4 + len(WORDS), **SIZES)).eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def composed(trunk: Path, folder: Path, *behind: Any, **settings: Any) -> SentenceTransformer:
    torch.manual_seed(1)
    pooling = Pooling(48, pooling_mode="mean")
    model = SentenceTransformer(modules=[Transformer(str(trunk)), pooling, *behind], device="cpu", **settings)
    for module in behind:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
    model.eval().save(str(folder))
    return model


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "dtype": "float32", "use_tqdm": False, **settings})


def embedded(folder: Path, **settings: Any) -> np.ndarray:
    with opened(folder, **settings) as llm:
        return np.stack([each.outputs.data for each in llm.embed(TEXTS, use_tqdm=False)])


def edited(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


@pytest.mark.parametrize("name", ORDERS)
def test_modules_are_applied_in_their_order(name: str, trunk: Path, tmp_path: Path) -> None:
    model = composed(trunk, tmp_path, *ORDERS[name]())
    np.testing.assert_allclose(embedded(tmp_path), model.encode(TEXTS), atol=3e-5)


def test_a_request_may_still_ask_for_length_one(trunk: Path, tmp_path: Path) -> None:
    model = composed(trunk, tmp_path, Normalize(), Dense(48, 8))
    wanted = model.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(embedded(tmp_path, pooler_config={"normalize": True}), wanted, atol=3e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "mine.GELU"}, "mine.GELU"),
        ({"activation_function": "torch.nn.modules.activation.Softshrink"}, "Softshrink"),
        ({"module_input_name": "token_embeddings"}, "token_embeddings"),
        ({"module_output_name": "pooled"}, "pooled"),
        ({"in_features": 40}, "40"),
        ({"bias": False}, "linear.bias"),
        ({"use_residual": True}, "residual.weight"),
        ({"temperature": 2.0}, "temperature"),
    ],
)
def test_a_key_that_is_not_obeyed_is_refused_by_name(
    changes: dict[str, Any], message: str, trunk: Path, tmp_path: Path
) -> None:
    composed(trunk, tmp_path, Dense(48, 8))
    edited(tmp_path / "2_Dense" / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        embedded(tmp_path)


def test_modules_at_other_places_are_refused_by_name(trunk: Path, tmp_path: Path) -> None:
    composed(trunk, tmp_path, Dense(48, 8))
    listed = json.loads((tmp_path / "modules.json").read_text())
    for order, message in (([0, 2, 1], "Pooling"), ([1, 0, 2], "Pooling"), ([0, 0, 1], "Transformer")):
        (tmp_path / "modules.json").write_text(json.dumps([listed[place] for place in order]))
        with pytest.raises(ValueError, match=message):
            embedded(tmp_path)


@pytest.mark.parametrize("kind", ["sentence_transformers.models.Router", "sentence_transformers.models.Asym",
                                  "mine.Dense", "sentence_transformers.models.CNN"])  # fmt: skip
def test_other_modules_are_refused_by_name(kind: str, trunk: Path, tmp_path: Path) -> None:
    composed(trunk, tmp_path, Dense(48, 8))
    listed = json.loads((tmp_path / "modules.json").read_text())
    listed[2]["type"] = kind
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=kind.rpartition(".")[2]):
        embedded(tmp_path)


def vectors(folder: Path, ids: list[list[int]], **settings: Any) -> list[np.ndarray]:
    with opened(folder, **settings) as llm:
        prompts: list[Any] = [{"prompt_token_ids": each} for each in ids]
        outputs = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
        assert llm.pooling_bounds.tasks == ("token_embed",)
    return [each.outputs.data for each in outputs]


def tokens_of(model: Any) -> tuple[list[list[int]], list[np.ndarray]]:
    hf = tokenizer()
    ids = [hf(text)["input_ids"] for text in TEXTS]
    return ids, [np.asarray(each) for each in model.encode_document(TEXTS, convert_to_numpy=True)]


@pytest.mark.parametrize("normalized", [True, False])
def test_modules_of_tokens_are_applied_in_their_order(normalized: bool, trunk: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    of_tokens = {"module_input_name": "token_embeddings"}
    behind = [Normalize(**of_tokens), Dense(48, 16, **of_tokens), Dense(16, 16, use_residual=True, **of_tokens)]
    last = [MultiVectorMask(), Normalize(**of_tokens)] if normalized else [MultiVectorMask()]
    model = MultiVectorEncoder(modules=[Transformer(str(trunk)), *behind, *last], device="cpu")
    model.save(str(tmp_path))
    ids, wanted = tokens_of(model)
    for got, exact in zip(vectors(tmp_path, ids), wanted, strict=True):
        np.testing.assert_allclose(got, exact, atol=3e-5)


@pytest.mark.parametrize("name", ["linear.weight", "colbert_linear.weight"])
def test_a_colberts_projection_is_applied_to_each_token(name: str, trunk: Path, tmp_path: Path) -> None:
    """claim 1: as colbert-ir publishes it."""
    tensors = {f"bert.{key}": each for key, each in load_file(trunk / "model.safetensors").items()}
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(3))
    save_file({**tensors, name: weight}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((trunk / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    tokenizer().save_pretrained(tmp_path)
    model, ids = BertModel.from_pretrained(trunk).eval(), [tokenizer()(text)["input_ids"] for text in TEXTS]
    for got, each in zip(vectors(tmp_path, ids), ids, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([each])).last_hidden_state[0] @ weight.T
        np.testing.assert_allclose(got, torch.nn.functional.normalize(states, dim=-1), atol=3e-5)


def test_a_colbert_without_its_projection_is_refused(trunk: Path, tmp_path: Path) -> None:
    tensors = load_file(trunk / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((trunk / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"linear\.weight"):
        opened(tmp_path)


def test_a_projection_of_another_model_is_not_passed_over(trunk: Path, tmp_path: Path) -> None:
    tensors = load_file(trunk / "model.safetensors")
    save_file({**tensors, "linear.weight": torch.zeros(8, 48)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((trunk / "config.json").read_text())
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"linear\.weight"):
        opened(tmp_path)
