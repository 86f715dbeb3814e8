"""Kimi Linear's checkpoints: what transformers' modules hold, and config.json as Moonshot published it."""

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
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.derived_families import KIN
from quintet_tools.checkpoints.tiny import SERVED, VOCAB, variant
from tests.helpers.platforms.loopback import LoopbackPlatform
from tests.helpers.platforms.run_model import Runner

PUBLISHED = {
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 48, "intermediate_size": 77, "kv_lora_rank": 20,
    "linear_attn_config": {
        "full_attn_layers": [3], "head_dim": 12, "kda_layers": [1, 2, 4], "num_heads": 4, "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True, "model_max_length": 256, "model_type": "kimi_linear", "moe_intermediate_size": 61,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 6,
    "num_expert_group": 1, "num_experts": 8, "num_experts_per_token": 3, "num_hidden_layers": 4,
    "num_key_value_heads": 6, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True,
    "v_head_dim": 10, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def test_what_transformers_modules_hold_is_the_same_model(tmp_path: Path) -> None:
    """One tensor of all convolutions, stacks of experts, and a module for what forgets."""
    tiny = variant("kimi_linear", "plain")
    held = {name: tensor.contiguous() for name, tensor in tiny.reference.state_dict().items()}
    names = {"self_attn.conv1d.weight", "self_attn.forget_gate.A_log", "mlp.experts.gate_up_proj"}
    assert names <= {name.split(".", 3)[-1] for name in held}
    assert not held.keys() <= load_file(tiny.folder / "model.safetensors").keys()
    save_file(held, tmp_path / "model.safetensors")
    prompts = random_prompts(0, (9, 20), VOCAB)
    got, want = (Runner(each).prompts(prompts) for each in (replace(tiny, folder=tmp_path), tiny))
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_a_published_config_counts_layers_from_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = load_model_config(tmp_path)
    model: Any = Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, SERVED)).main.model
    mixers = [type(layer.self_attn).__name__ for layer in model.model.layers]
    assert mixers == ["KimiDeltaAttention"] * 2 + ["LatentAttention", "KimiDeltaAttention"]
    assert [type(layer.mlp).__name__ for layer in model.model.layers] == ["GatedMLP", *["MoE"] * 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope=False is not supported; it has True"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: silu follows its convolutions"),
    ],
)
def test_what_is_not_computed_is_refused(settings: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model("kimi_linear", **{**KIN["kimi_linear"]["plain"], **settings})
    with pytest.raises(ValueError, match=message):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, SERVED))


def test_more_ranks_than_heads_are_refused() -> None:
    sizes = ModelSizes(torch.float32, 16, 64)
    with pytest.raises(ValueError, match="5 ranks cannot share 4 heads with states.*lower tensor_parallel_size to 4"):
        Worker(LoopbackPlatform(), variant("kimi_linear", "plain").config, sizes, RankInfo(0, 5, "here"))
