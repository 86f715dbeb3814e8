"""Registers every JAX provider; imported when a device is opened, so that another platform's user never loads JAX."""

from quintet.platforms.tpu import attention
from quintet.platforms.tpu.kernels import (
    activation,
    embedding,
    linear,
    moe,
    norm,
    quantized,
    rotary,
    rows,
    sampling,
    step_attention,
)

__all__ = [
    "activation",
    "attention",
    "embedding",
    "linear",
    "moe",
    "norm",
    "quantized",
    "rotary",
    "rows",
    "sampling",
    "step_attention",
]
