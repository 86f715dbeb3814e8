"""LFM2 as an embedder: late interaction (LFM2-ColBERT), and tokens that see those after them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from torch import Tensor
from torch.nn.functional import conv1d, normalize
from transformers import Lfm2Config, Lfm2Model
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from tests.e2e.pooling.test_scores import WORDS, tokenizer
from tests.reports.checkpoints.test_files_beside_a_checkpoint import TEXTS, opened, pylate


def trunk(folder: Path) -> Lfm2Model:
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=4 + len(WORDS), hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"], max_position_embeddings=64,
        block_multiple_of=8, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    model = Lfm2Model(config).eval()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["Lfm2Model", "ColBERTLfm2Model"])  # as published, and as vLLM's guide has it
def test_scores_of_late_interaction_are_the_librarys(tmp_path: Path, name: str) -> None:
    trunk(tmp_path / "trunk")
    folder = pylate(tmp_path / "trunk", tmp_path / "model", do_query_expansion=False)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": [name]}))
    model = MultiVectorEncoder(str(folder), device="cpu")
    wanted = model.similarity(model.encode_query(TEXTS[:1]), model.encode_document(TEXTS))[0]
    with opened(folder) as llm:
        got = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(got, wanted, atol=3e-5)


def both_ways(self: Lfm2ShortConv, hidden_states: Tensor, **_: Any) -> Tensor:
    """The convolution over tokens on both sides, as vLLM computes Lfm2BidirectionalModel."""
    before, after, taken = self.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
    weight = self.conv.weight
    mixed = conv1d(before * taken, weight, self.conv.bias, padding=weight.shape[-1] // 2, groups=len(weight))
    return self.out_proj((after * mixed[..., : taken.shape[-1]]).transpose(-1, -2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_a_bidirectional_lfm2_see_those_after_them(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pooled by the first token, in one step with texts of other lengths."""
    model = trunk(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["Lfm2BidirectionalModel"]}))
    with opened(tmp_path, dtype=dtype) as llm:
        got = np.stack([each.outputs.data for each in llm.embed(TEXTS, use_tqdm=False)])
    monkeypatch.setattr(Lfm2ShortConv, "forward", both_ways)
    for text, each in zip(TEXTS, got, strict=True):
        ids = torch.tensor([tokenizer()(text)["input_ids"]])
        masks = {"full_attention": torch.zeros(1, 1, ids.shape[1], ids.shape[1]), "conv": None}
        with torch.inference_mode():
            state = model(ids, attention_mask=masks, use_cache=False).last_hidden_state[0, 0]
        np.testing.assert_allclose(each, normalize(state, dim=0), atol=3e-5 if dtype == "float32" else 0.03)
