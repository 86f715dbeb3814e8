"""Random adapters (LoRA) for a small model, and the reference model with one written into its weights."""

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch

from quintet.conformance.harness.reference_model import Tiny
from quintet.layers.lora import LoRAMatrices

SIZE = 0.5  # of what an adapter adds to a product, beside inputs of size 1


def random_adapter(tiny: Tiny, seed: int, rank: int, skipped: str = "") -> dict[str, LoRAMatrices]:
    """Returns an adapter of all products of a model whose checkpoint has a tensor for each, by their modules' names;
    but those with `skipped` in the name."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, module in tiny.reference.named_modules():
        if isinstance(module, torch.nn.Linear) and (not skipped or skipped not in name):
            outputs, inputs = module.weight.shape
            a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, rank, generator=generator) * SIZE * rank**-0.5
            found[name] = LoRAMatrices(a, b)
    return found


@torch.no_grad()
def merged(tiny: Tiny, adapter: Mapping[str, LoRAMatrices]) -> Tiny:
    """The reference with the adapter in its weights; the checkpoint is as it was."""
    model = copy.deepcopy(tiny.reference)
    for name, (a, b) in adapter.items():
        product = model.get_submodule(name)
        product.weight = torch.nn.Parameter(product.weight + b @ a)  # an embedding that a head is tied to keeps its own
    return replace(tiny, reference=model)
