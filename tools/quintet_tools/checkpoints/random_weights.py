"""Random weights of small models: large enough that what is wrong shows, and no larger."""

from typing import Any

import torch

# of products, by a part of their names: several in a row without a residual would magnify what rounding did
SMALLER = {"adapter": 0.5, "shared_transformer": 0.8}


@torch.no_grad()
def scatter(model: Any) -> None:
    """Fills in random weights: products keep the size of their inputs, norms and biases are not 1 and 0."""
    transposed = model.config.model_type in ("gpt2", "openai-gpt")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # computed: sines of positions
            continue
        if parameter.dim() < 2:
            parameter.add_(torch.randn_like(parameter) * 0.2)
        elif "embed" in name or "wte" in name or "wpe" in name:
            parameter.normal_(0, 1)
        else:
            single = parameter.shape[-1] == 1 and parameter.dim() == 3  # a convolution over one token
            inputs = (
                parameter.shape[1]
                if single
                else parameter.shape[0]
                if transposed and "lm_head" not in name
                else parameter.shape[-1]
            )
            gain = next((by for part, by in SMALLER.items() if part in name), 1.5)
            parameter.normal_(0, gain * inputs**-0.5)
    for name, each in (*model.named_buffers(), *model.named_parameters()):
        if "correction_bias" in name:  # moves a router's choice
            each.normal_(0, 0.1)
        elif "tid2eid" in name:  # experts of each token: as many as it has, apart
            each.copy_(torch.rand(len(each), model.config.n_routed_experts).argsort(1)[:, : each.shape[1]])
