"""Random adapters (LoRA) for the bundled model, in folders as PEFT writes them."""

import json
from pathlib import Path

import torch

from quintet.lora.adapter import write_adapter

BUNDLED = Path(__file__).parents[2] / "quintet" / "bundled"


def bundled_adapter(folder: Path, seed: int, rank: int = 4, base: str = "bundled") -> Path:
    """Writes an adapter of all products of the attention and the MLP, with weights that change the output."""
    config = json.loads((BUNDLED / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    sizes = {
        "self_attn.q_proj": (hidden, queries), "self_attn.k_proj": (hidden, keys), "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (inputs, outputs) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * 0.2
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * 0.2
    targets = [module.partition(".")[2] for module in sizes]
    entries = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets,
        "base_model_name_or_path": base,
    }  # fmt: skip
    write_adapter(folder, entries, tensors)
    return folder
