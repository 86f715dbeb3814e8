"""Dtypes that a model computes in and its KV cache is kept in: those asked for, if the device has them."""

from typing import Any

import torch

from quintet.config import EngineConfig
from quintet.interface.platform import Capabilities
from quintet.interface.types import INT4


def dtype_of(config: EngineConfig, hf_config: Any, facts: Capabilities, reasons: list[str]) -> torch.dtype:
    """Returns the dtype that was asked for; for "auto" the checkpoint's if the device has it, else its first."""
    if config.dtype != "auto":
        asked: torch.dtype = getattr(torch, config.dtype)
        if asked not in facts.dtypes:
            shown = ", ".join(name_of(each) for each in facts.dtypes)
            raise ValueError(
                f"dtype={config.dtype!r} is not among what this device computes in: {shown}; use one of them"
            )
        return asked
    saved = getattr(hf_config, "dtype", None) or torch.float32
    saved = getattr(torch, saved) if isinstance(saved, str) else saved
    dtype = saved if saved in facts.dtypes else facts.dtypes[0]
    why = "the checkpoint's" if dtype == saved else f"the checkpoint's {name_of(saved)} is not computed in here"
    reasons.append(f"dtype {name_of(dtype)}: {why}")
    return dtype


def kv_dtype_of(config: EngineConfig, facts: Capabilities) -> torch.dtype | None:
    """Returns the KV cache's dtype; None: the layers'. The device chooses which fp8 "fp8" is."""
    known = {"auto": None, "int8": torch.int8, "int4": INT4, "fp8_e5m2": torch.float8_e5m2}
    return {**known, "fp8": facts.fp8 or torch.float8_e4m3fn}[config.kv_cache_dtype]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
