"""Registers every JAX provider; imported when a device is opened, so that another platform's user never loads JAX."""

from quintet.platforms.tpu import attention
from quintet.platforms.tpu.kernels import (
    activation,
    embedding,
    heads,
    linear,
    lora,
    moe,
    norm,
    pages,
    quantized,
    rotary,
    rows,
    sampling,
    states,
    step_attention,
)

__all__ = [
    "activation",
    "attention",
    "embedding",
    "heads",
    "linear",
    "lora",
    "moe",
    "norm",
    "pages",
    "quantized",
    "rotary",
    "rows",
    "sampling",
    "states",
    "step_attention",
]
