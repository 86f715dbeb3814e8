"""Inkling: the files of its wrapper, whose tensors have other names and orders; what is not computed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, InklingConfig, InklingForConditionalGeneration

from quintet import LLM, SamplingParams
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.interface.types import AttentionSpec
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.random_weights import scatter
from quintet_tools.checkpoints.sizes import INKLING, INKLING_SCALED
from quintet_tools.checkpoints.tiny import SERVED, variant

PROMPT = [5, 9, 33, 21, 8, 40, 11] * 4
TOWERS: dict[str, Any] = {
    "vision_config": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8},
    "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
}
EAGER = {"_experts_implementation": "eager", "_attn_implementation": "eager"}


@pytest.mark.parametrize("more", [{}, INKLING_SCALED], ids=["plain", "scaled by position"])
def test_text_of_published_files_is_transformers(more: dict[str, Any], tmp_path: Path) -> None:
    """transformers writes them as they are published: gate and up take turns, shared experts have their own stacks."""
    text = {**INKLING, **more, "model_type": "inkling_text"}
    config = InklingConfig(text_config=text, image_token_id=3, audio_token_id=4, **TOWERS)
    for each in (config, config.text_config):
        for name, value in EAGER.items():
            setattr(each, name, value)
    torch.manual_seed(0)
    model = InklingForConditionalGeneration(config).eval()
    scatter(model)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    settings = {"skip_tokenizer_init": True, "use_tqdm": False, "dtype": "float32", "max_model_len": 64}
    with LLM(str(tmp_path), device="cpu", **settings) as llm:
        [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == tokens[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shared_expert_sink": False}, "shared_expert_sink=False"),
        ({"layer_types": ["hybrid", "full_attention", "hybrid"]}, "is 'full_attention'"),
    ],
)
def test_what_is_not_computed_is_refused(settings: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model("inkling_text", **{**INKLING, **settings})
    with pytest.raises(ValueError, match=message):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, SERVED))


def test_an_int4_cache_is_served() -> None:
    tiny = variant("inkling_text", "plain")
    with LLM(str(tiny.folder), device="cpu", skip_tokenizer_init=True, num_pages=40, kv_cache_dtype="int4") as llm:
        (output,) = llm.generate(
            [{"prompt_token_ids": [3, 4, 5]}], SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        )
        assert len(output.outputs[0].token_ids) == 4


def test_a_platform_without_numbers_of_distances_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLATFORM, "optional_spec_fields", PLATFORM.optional_spec_fields - {"distances"})
    config = AutoConfig.for_model("inkling_text", **INKLING)
    with pytest.raises(ValueError, match="adds no numbers of distances to scores, and layers of inkling_text"):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, SERVED))


def test_numbers_are_of_causal_layers() -> None:
    with pytest.raises(AssertionError, match="distances are behind"):
        AttentionSpec(1, 1, 8, 1.0, torch.float32, 16, causal=False, distances=3)
