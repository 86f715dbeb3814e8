"""Random adapters (LoRA) of tiny models as PEFT writes them, and requests that name these."""

from pathlib import Path

from torch import Tensor

from quintet import LoRARequest
from quintet.conformance.harness.random_adapters import random_adapter
from quintet.conformance.harness.reference_model import Tiny
from quintet.lora.adapter import write_adapter


def adapter_request(tiny: Tiny, folder: Path, seed: int, rank: int = 4, skipped: str = "lm_head") -> LoRARequest:
    """Writes a random adapter of all products but those with `skipped` in the name."""
    tensors: dict[str, Tensor] = {}
    for name, each in random_adapter(tiny, seed, rank, skipped).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = each.lora_a
        tensors[f"base_model.model.{name}.lora_B.weight"] = each.lora_b
    modules = sorted({name.split(".")[-3] for name in tensors})
    place = folder / f"adapter-{seed}"
    write_adapter(place, {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}, tensors)
    return LoRARequest(f"adapter {seed}", seed, str(place))
