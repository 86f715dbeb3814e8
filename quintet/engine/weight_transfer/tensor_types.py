"""Types of tensors by name, as vLLM's update_info has them: "bfloat16" or "torch.bfloat16"."""

import math
from collections.abc import Sequence
from typing import Any

import torch

DTYPES = {
    str(each).removeprefix("torch."): each
    for each in (
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16),
        *(torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


def dtype_named(name: Any) -> torch.dtype:
    """Returns the type of that name. ValueError for names of no type of weights."""
    found = DTYPES.get(str(name).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype {str(name)[:40]!r} is not one of {', '.join(DTYPES)}")
    return found


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Returns the bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize
