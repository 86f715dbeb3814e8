"""One instantiation of a kernel, so that it can be compiled ahead where there is no GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """Argument name -> Triton type ("*bf16", "i32", "fp32"), and the values of the constexpr arguments."""

    name: str  # unique: "rms_norm bf16 4096"
    kernel: Any  # a triton.JITFunction
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    max_spills: int = 0  # registers that may go to memory
    rare: bool = False  # compiled only where all are: what it shows, another shows nearly as well
