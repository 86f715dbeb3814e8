"""Latent attention: what its checkpoints hold besides, the temperature of scaled positions, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.hub.resolve import load_model_config
from quintet.interface.types import RankInfo
from quintet.layers.attention.mla import temperature
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.tiny import FAMILIES, VOCAB, variant
from tests.helpers.platforms.loopback import LoopbackPlatform
from tests.helpers.platforms.run_model import Runner


def test_layers_that_guess_further_tokens_are_left_in_the_file(tmp_path: Path) -> None:
    tiny = variant("deepseek_v3", "plain")
    tensors = load_file(tiny.folder / "model.safetensors")
    more = {"model.layers.3.eh_proj.weight": torch.ones(2), "model.layers.3.embed_tokens.weight": torch.ones(2)}
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    (prompt,) = random_prompts(0, (9,), VOCAB)
    (got,), (want,) = (Runner(each).prompts([prompt]) for each in (replace(tiny, folder=tmp_path), tiny))
    assert torch.equal(got, want)


def test_kimi_k2_is_read_as_the_model_that_it_is(tmp_path: Path) -> None:
    """Its class is repository code, its entries are DeepSeek's."""
    raw = json.loads((variant("deepseek_v3", "plain").folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "kimi_k2"}))
    config = load_model_config(tmp_path)
    assert (config.model_type, config.kv_lora_rank, config.qk_head_dim) == ("deepseek_v3", 20, 20)


def test_scores_are_scaled_where_positions_are() -> None:
    """R1's: (0.1 ln 40 + 1) ** 2."""
    yarn = {"rope_type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert temperature(yarn) == pytest.approx(1.3688879**2)
    assert temperature({**yarn, "mscale_all_dim": 0}) == temperature({"rope_type": "default"}) == 1.0


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not known"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported; it has 'sigmoid'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}, "attention_bias and without q_lora_rank"),
    ],
)
def test_what_is_not_computed_is_refused(family: str, settings: dict[str, Any], says: str) -> None:
    config = AutoConfig.for_model(family, **{**FAMILIES[family]["plain"], **settings})
    with pytest.raises(ValueError, match=says):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, 64))


def test_more_ranks_than_heads_are_refused() -> None:
    sizes = ModelSizes(torch.float32, 16, 64)
    with pytest.raises(ValueError, match="lower tensor_parallel_size to 6 or less"):
        Worker(LoopbackPlatform(), variant("deepseek_v3", "plain").config, sizes, RankInfo(0, 7, "here"))


def test_a_token_takes_one_latent_for_all_heads() -> None:
    worker = Worker(PLATFORM(), variant("deepseek_v3", "plain").config, ModelSizes(torch.float32, 16, 64))
    # layers, tokens of a page, numbers of a token, bytes
    assert worker.kv_cache_layout.page_bytes == 3 * 16 * (20 + 8) * 4
