"""Every accelerated operation, one file per group; importing the package fills the registry."""

from quintet.ops import (
    activation,
    attention,
    elementwise,
    embedding,
    heads,
    linear,
    moe,
    norm,
    quantized,
    random,
    rotary,
    rows,
    sampling,
    states,
    streams,
    tokens,
)
from quintet.ops.registry import Choice, Op, Ops, bind

__all__ = [
    "Choice",
    "Op",
    "Ops",
    "activation",
    "attention",
    "bind",
    "elementwise",
    "embedding",
    "heads",
    "linear",
    "moe",
    "norm",
    "quantized",
    "random",
    "rotary",
    "rows",
    "sampling",
    "states",
    "streams",
    "tokens",
]
