"""Gemma 3 whose tokens see both ways, as EmbeddingGemma has it: beside transformers and Sentence Transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense, Normalize, Pooling, Transformer
from transformers import Gemma3TextConfig, Gemma3TextModel

from quintet import LLM, PoolingParams
from tests.e2e.pooling.test_scores import DOCUMENTS, QUERY, WORDS, tokenizer

IDS = [[5, 6, 7], [4] * 30, [9], list(range(5, 41)) * 2]
SIZES: dict[str, Any] = {
    "vocab_size": 4 + len(WORDS), "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 72, "max_position_embeddings": 80,
    "sliding_window": 16, "query_pre_attn_scalar": 16, "initializer_range": 0.2, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
PROMPTS = {"query": "what is ", "document": "the "}


def made(folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    model = Gemma3TextModel(Gemma3TextConfig(**{**SIZES, "use_bidirectional_attention": True, **more})).eval()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "use_tqdm": False, **settings})


@pytest.mark.parametrize("window", [2, 7, 16, 64])
def test_windows_are_shared_out_to_both_sides(window: int, tmp_path: Path) -> None:
    """Windows of odd and even length, shorter and longer than the texts."""
    ids = [[token % SIZES["vocab_size"] for token in each] for each in IDS]
    model, params = made(tmp_path, sliding_window=window), PoolingParams(task="token_embed", normalize=False)
    with opened(tmp_path) as llm:
        together = [each.outputs.data for each in llm.encode(ids, params, use_tqdm=False)]
        for each, states in zip(ids, together, strict=True):
            with torch.no_grad():
                wanted = model(torch.tensor([each])).last_hidden_state[0].numpy()
            np.testing.assert_allclose(states, wanted, atol=3e-5 * max(1, np.abs(wanted).max()))
            assert np.array_equal(llm.encode([each], params, use_tqdm=False)[0].outputs.data, states)


def test_two_products_and_prompts_are_sentence_transformers(tmp_path: Path) -> None:
    made(tmp_path / "trunk")
    torch.manual_seed(1)
    identity = torch.nn.Identity
    behind = [Dense(48, 96, bias=False, activation_function=identity()),
              Dense(96, 48, bias=False, activation_function=identity()), Normalize()]  # fmt: skip
    trunk = Transformer(str(tmp_path / "trunk"), max_seq_length=80)
    model = SentenceTransformer(
        modules=[trunk, Pooling(48, pooling_mode="mean"), *behind], device="cpu", prompts=PROMPTS
    )
    model.eval().save(str(tmp_path / "whole"))
    texts = [*DOCUMENTS, QUERY, "the"]
    with opened(tmp_path / "whole") as llm:
        for name in ("query", "document"):
            wanted = model.encode(texts, prompt_name=name)
            got = [each.outputs.data for each in llm.embed(texts, prompt_name=name, use_tqdm=False)]
            np.testing.assert_allclose(np.stack(got), wanted, atol=3e-5)
        got = [each.outputs.data for each in llm.embed(texts, use_tqdm=False)]
        np.testing.assert_allclose(np.stack(got), model.encode(texts), atol=3e-5)
    with opened(tmp_path / "whole", dtype="bfloat16") as llm:
        near = np.stack([each.outputs.data for each in llm.embed(texts, use_tqdm=False)])
        assert ((near * model.encode(texts)).sum(-1) >= 0.999).all()


def test_a_text_is_not_generated_by_what_sees_both_ways(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(ValueError, match="use_bidirectional_attention=True is not supported"):
        opened(tmp_path, runner="generate", hf_overrides={"architectures": ["Gemma3ForCausalLM"]})
