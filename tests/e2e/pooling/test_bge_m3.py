"""BGE M3's three answers: a vector, one for each token (ColBERT), and how much each token counts (sparse)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import XLMRobertaConfig, XLMRobertaModel

from quintet import LLM, PoolingParams

BOS, EOS = 0, 2
TEXTS = [[BOS, 5, 6, 7, EOS], [BOS, *[4] * 30, EOS], [9], list(range(3, 63)), [BOS, EOS]]
SIZES = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 72, "max_position_embeddings": 72, "type_vocab_size": 1, "initializer_range": 0.2,
         "pad_token_id": 1, "bos_token_id": BOS, "eos_token_id": EOS}  # fmt: skip
NAMED = {"architectures": ["BgeM3EmbeddingModel"]}


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, Any]:
    """Saved as published: the heads stand beside the weights, each as torch.save writes its state_dict."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("m3")
    trunk = XLMRobertaModel(XLMRobertaConfig(**SIZES)).eval()
    trunk.save_pretrained(folder)
    sparse, colbert = torch.nn.Linear(48, 1), torch.nn.Linear(48, 48)
    torch.save(sparse.state_dict(), folder / "sparse_linear.pt")
    torch.save(colbert.state_dict(), folder / "colbert_linear.pt")
    return folder, trunk, sparse, colbert


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "skip_tokenizer_init": True, "hf_overrides": NAMED, **settings})


def hidden(trunk: Any, ids: list[int]) -> torch.Tensor:
    states: torch.Tensor = trunk(torch.tensor([ids])).last_hidden_state[0]
    return states


def test_each_answer_is_the_papers(m3: tuple[Path, Any, Any, Any]) -> None:
    """A text's first token has no vector of its own, and its last one counts for nothing either."""
    folder, trunk, sparse, colbert = m3
    with opened(folder) as llm, torch.no_grad():
        vectors = llm.embed(TEXTS, use_tqdm=False)
        tokens = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
        weights = llm.encode(TEXTS, pooling_task="token_classify", use_tqdm=False)
        for place, ids in enumerate(TEXTS):
            states = hidden(trunk, ids)
            dense = functional.normalize(states[0], dim=0)
            np.testing.assert_allclose(vectors[place].outputs.data, dense, atol=3e-6)
            first, last = int(ids[0] == BOS), len(ids) - int(ids[-1] == EOS)
            of_tokens = functional.normalize(colbert(states[first:]), dim=-1)
            np.testing.assert_allclose(tokens[place].outputs.data, of_tokens, atol=3e-6)
            counts = sparse(states[first:last]).relu()[:, 0]
            assert weights[place].outputs.data.shape == (last - first,)
            np.testing.assert_allclose(weights[place].outputs.data, counts, atol=3e-5)


def test_weights_are_plain_where_that_is_asked(m3: tuple[Path, Any, Any, Any]) -> None:
    folder, trunk, sparse, _ = m3
    params = PoolingParams(task="token_classify", use_activation=False)
    with opened(folder) as llm, torch.no_grad():
        [output] = llm.encode([TEXTS[3]], params, use_tqdm=False)
        plain = sparse(hidden(trunk, TEXTS[3]))[:, 0].numpy()
        assert (plain < 0).any()
        np.testing.assert_allclose(output.outputs.data, plain, atol=3e-5)


def test_without_that_class_the_model_gives_vectors_alone(m3: tuple[Path, Any, Any, Any]) -> None:
    with opened(m3[0], hf_overrides=None) as llm, pytest.raises(ValueError, match="'token_classify' is not what"):
        llm.encode([TEXTS[0]], pooling_task="token_classify")


def test_a_head_that_is_not_there_or_no_tensors_is_refused(m3: tuple[Path, Any, Any, Any], tmp_path: Path) -> None:
    XLMRobertaModel(XLMRobertaConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"colbert_linear.pt is not there, and colbert_linear.pt is a head"):
        opened(tmp_path)
    (tmp_path / "colbert_linear.pt").write_bytes((m3[0] / "colbert_linear.pt").read_bytes())
    torch.save({"weight": print}, tmp_path / "sparse_linear.pt")
    with pytest.raises(ValueError, match="sparse_linear.pt is refused"):
        opened(tmp_path)
