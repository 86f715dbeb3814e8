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


def with_extras(tiny: Tiny, adapter: Mapping[str, LoRAMatrices], seed: int) -> dict[str, LoRAMatrices]:
    """Returns the same adapter where half of the products have magnitudes and half biases, and the embedding of tokens
    has a change."""
    generator, found = torch.Generator().manual_seed(seed), dict[str, LoRAMatrices]()
    for number, (name, each) in enumerate(adapter.items()):
        numbers = torch.rand(len(each.lora_b), generator=generator)
        if number % 2:
            norms = (tiny.reference.get_submodule(name).weight + each.lora_b @ each.lora_a).detach().norm(dim=1)
            found[name] = each._replace(magnitude=norms * (0.5 + numbers))
        else:
            found[name] = each._replace(bias=SIZE * (numbers - 0.5))
    table, rank = tiny.reference.get_input_embeddings(), len(next(iter(adapter.values())).lora_a)
    path = next(name for name, module in tiny.reference.named_modules() if module is table)
    a = torch.randn(rank, table.weight.shape[0], generator=generator)
    b = torch.randn(table.weight.shape[1], rank, generator=generator) * float(table.weight.detach().std()) * rank**-0.5
    return {path: LoRAMatrices(a, b, embedding=True), **found}


@torch.no_grad()
def merged(tiny: Tiny, adapter: Mapping[str, LoRAMatrices]) -> Tiny:
    """The reference with the adapter in its weights; the checkpoint is as it was."""
    model = copy.deepcopy(tiny.reference)
    for name, each in adapter.items():
        product, change = model.get_submodule(name), each.lora_b @ each.lora_a
        weight = product.weight + (change.T if each.embedding else change)
        if each.magnitude is not None:
            weight *= (each.magnitude / weight.norm(dim=1))[:, None]
        product.weight = torch.nn.Parameter(weight)  # an embedding that a head is tied to keeps its own
        if each.bias is not None:
            own = 0 if product.bias is None else product.bias
            product.bias = torch.nn.Parameter(own + each.bias)
    return replace(tiny, reference=model)
