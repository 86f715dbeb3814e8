"""Which provider serves which op on a GPU, best first, and how weights are packed for those that serve.

The modules register when a device is opened, not before: a provider's name may mean another function on another
platform of this process.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence

from torch import Tensor

from quintet.ops.quantize import quantize
from quintet.ops.registry import Op
from quintet.platforms.gpu import packing
from quintet.types import Scheme

MODULES = (
    *("triton_attention", "triton_edits", "triton_elementwise", "triton_moe", "triton_norm", "triton_quantized"),
    *("triton_rotary", "triton_sampling", "gathered_attention"),
)
# Left to the specification: `linear`, which is the vendor's library here; `activate`, `add`, `scale`, `widen`,
# `scale_logits`, `layer_norm`, `take_rows` and `place_rows`, which torch does in one pass or two.
PRIORITY: Mapping[str, Sequence[str]] = {
    "paged_attention": ("triton", "gathered"),
    "attention": ("gathered",),
    **dict.fromkeys(("write_kv", "embedding", "place_tokens", "rotary", "norm_rotary"), ("triton",)),
    **dict.fromkeys(("rms_norm", "add_rms_norm", "gated", "softcap"), ("triton",)),
    **dict.fromkeys(("greedy", "sample", "gumbel", "top_logprobs", "filter_logits"), ("triton",)),
    **dict.fromkeys(("penalize", "bias_tokens", "ban_tokens", "keep_tokens"), ("triton",)),
    **dict.fromkeys(("route", "route_grouped", "grouped_linear", "experts"), ("triton",)),
    **dict.fromkeys(("linear_int8", "linear_int4", "linear_fp8", "linear_fp8_dynamic"), ("triton",)),
    **dict.fromkeys(("linear_w8a8", "linear_w4a8"), ("triton",)),
}


def register() -> None:
    """Imports every module that is there."""
    package = __name__.rpartition(".")[0]
    for name in MODULES:
        if importlib.util.find_spec(f"{package}.{name}") is not None:
            importlib.import_module(f"{package}.{name}")


def packs(scheme: Scheme, priority: Mapping[str, Sequence[str]]) -> bool:
    """Whether products by this scheme read weights as packing.py lays them: where bind() chose their own provider."""
    op = Op.registry[f"linear_{scheme.name}"]
    if "triton" not in priority.get(op.name, ()) or "triton" not in op.providers:
        return False
    probe = op.probes.get("triton")
    return probe is None or probe() is None


def pack(weight: Tensor, scheme: Scheme, packed: bool) -> Mapping[str, Tensor]:
    """A weight [N, K] on the device, for the provider or for the specification."""
    if packed:
        return packing.pack(weight, scheme)
    values, scales = quantize(weight, scheme)
    return {"weight": values, "scales": scales}
