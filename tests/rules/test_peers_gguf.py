"""The GGUF files that a peer is measured on hold what the checkpoint says."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.checkpoints import SHAPES
from benchmarks.peers.gguf_file import write
from quintet import LLM, SamplingParams

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 160}


def made(folder: Path, name: str, **sizes: Any) -> Path:
    """A small checkpoint of that shape."""
    shape = {**SHAPES[name], **SMALL, **sizes}
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def test_latent_attention_is_split_into_what_q_and_values_go_through(tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    folder = made(tmp_path / "model", "deepseek-v2-lite-3-layers", num_key_value_heads=2, **latent, **experts)
    write(folder, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {each.name: torch.from_numpy(each.data.copy()) for each in reader.tensors}
    want = load_file(folder / "model.safetensors")
    both = want["model.layers.1.self_attn.kv_b_proj.weight"].reshape(2, 24 + 16, 32)
    assert torch.equal(found["blk.1.attn_k_b.weight"].view(torch.bfloat16), both[:, :24].mT)
    assert torch.equal(found["blk.1.attn_v_b.weight"].view(torch.bfloat16), both[:, 24:])
    expert = want["model.layers.2.mlp.experts.3.down_proj.weight"]
    assert torch.equal(found["blk.2.ffn_down_exps.weight"].view(torch.bfloat16)[3], expert)
    fields = {name: reader.fields[f"deepseek2.{name}"].contents() for name in KEYS}
    assert fields == KEYS


KEYS = {
    "attention.head_count_kv": 1,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 32,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 8,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
}


def test_gemma_3_says_the_same_tokens_from_the_file(tmp_path: Path) -> None:
    """Its norms multiply by 1 + w, its windows turn by another base, and every sixth layer has none."""
    folder = made(tmp_path / "model", "gemma-3-1b-6-layers", head_dim=32, query_pre_attn_scalar=32, sliding_window=16)
    write(folder, tmp_path / "model.gguf")
    prompt = [(7 * i) % 150 + 5 for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)

    def says(model: Path) -> Any:
        settings: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "max_model_len": 64, "num_pages": 64}
        llm = LLM(str(model), skip_tokenizer_init=True, use_tqdm=False, **settings)
        return llm.generate([prompt], params)[0].outputs[0].token_ids

    assert says(tmp_path / "model.gguf") == says(folder)


def test_scaled_positions_are_refused(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    folder = made(tmp_path / "model", "qwen3-0.6b", num_key_value_heads=1, num_hidden_layers=1, rope_parameters=yarn)
    with pytest.raises(ValueError, match="is a qwen3 with yarn positions"):
        write(folder, tmp_path / "model.gguf")
