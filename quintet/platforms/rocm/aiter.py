"""AITER (AMD's library) for norms, fp8 products, experts and attention, where it is installed. Unverified on a GPU.

Each is tried on the device against the specification before it serves; what it does not serve goes to our Triton
kernels. Tests bind these calls to the signatures that it has.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quintet.interface.platform import Mixer
from quintet.interface.types import AttentionSpec, StepContext
from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops.attention import PagedAttention
from quintet.ops.linear import linear
from quintet.ops.moe import experts
from quintet.ops.norm import add_rms_norm, rms_norm
from quintet.ops.quantize import attributes, quantize
from quintet.ops.registry import Op, Ops
from quintet.platforms.gpu import library_checks as trials
from quintet.platforms.gpu.attention import single
from quintet.platforms.gpu.fp8_fnuz import FN, FNUZ, as_fnuz
from quintet.platforms.gpu.ops.probe import probing
from quintet.platforms.rocm.facts import facts

OPS = ("rms_norm", "add_rms_norm", "experts", "linear:fp8a8")  # that it serves
HALVES = (torch.bfloat16, torch.float16)
CHIPS = ("gfx942", "gfx950")  # that it has kernels for: on others a launch may end the process, which nothing catches
PARTS = {
    "rms_norm": "", "rmsnorm2d_fwd_with_add": "", "gemm_a8w8": "", "ActivationType": "",
    "fused_moe": ".fused_moe", "unified_attention": ".ops.triton.unified_attention",
}  # fmt: skip


@functools.cache
def library_function(name: str) -> Any:
    """One of its functions, or the reason why there is none."""
    if importlib.util.find_spec("aiter") is None:
        return "AITER is not installed (github.com/ROCm/aiter)"
    try:
        found = getattr(importlib.import_module("aiter" + PARTS[name]), name, None)
    except Exception as error:  # a library built for another torch or ROCm fails in its own ways
        return f"AITER's {name} cannot be imported: {type(error).__name__}: {error}"
    return f"this aiter has no {name}; PyPI's is another package" if found is None else found


def _probe(name: str, trial: Callable[[torch.device], tuple[Any, Any]]) -> Callable[[], str | None]:
    """A probe: is it there, and does the trial's first result equal its second, the specification's?"""

    def check(device: torch.device) -> str | None:
        return _of_chip(device) or trials.differ(*trial(device), "AITER")

    return lambda: found if isinstance(found := library_function(name), str) else probing(check)()


def _of_chip(device: torch.device) -> str | None:
    """Why its compiled kernels are not even tried; its attention is Triton's, and is."""
    if device.type == "cpu":
        return None
    arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return None if arch in CHIPS else f"AITER has no kernels for {arch}, only for {' and '.join(CHIPS)}"


def _own_provider(op: str) -> Callable[..., Any]:
    return Op.registry[op].providers["triton"]


def _try_norm(device: torch.device) -> trials.Pair:
    return trials.of_norm(device, _rms_norm)


@rms_norm.provide("aiter", _probe("rms_norm", _try_norm))
def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    if offset or x.dtype not in HALVES or weight.dtype != x.dtype:
        return _own_provider("rms_norm")(x, weight, eps, offset)
    return library_function("rms_norm")(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps).view(x.shape)


def _try_add_norm(device: torch.device) -> trials.Pair:
    return trials.of_add_norm(device, _add_rms_norm)


@add_rms_norm.provide("aiter", _probe("rmsnorm2d_fwd_with_add", _try_add_norm))
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    if offset or x.dtype not in HALVES or not x.dtype == residual.dtype == weight.dtype:
        return _own_provider("add_rms_norm")(x, residual, weight, eps, offset)
    x = x.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    library_function("rmsnorm2d_fwd_with_add")(out, x, residual.contiguous(), total, weight, eps)
    return out, total


def _try_linear(device: torch.device) -> tuple[Tensor, Tensor]:
    fmt = WeightFormat("fp8a8", 8, 8, dtype=FN)
    found = attributes(quantize(trials.test_numbers(device, 256, 512), fmt))
    found = as_fnuz(found) if getattr(facts(), "fp8", FN) == FNUZ else found
    weight = Matrix(found["weight"], found["scales"], format=fmt)
    x = trials.test_numbers(device, 5, 512)
    return _linear(x, weight, None, (256,)), linear.reference(x, weight, None, (256,))


@linear.provide("aiter", _probe("gemm_a8w8", _try_linear), kinds=("fp8a8",))
def _linear(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    whole = weight.format.group == 0 and weight.input_order is None and weight.values.dtype in (FN, FNUZ)
    if not whole or x.dtype not in HALVES or x.shape[1] % 128 or sum(outputs) % 128 or not len(x):
        return _own_provider("linear:fp8a8")(x, weight, bias, outputs)
    from quintet.platforms.gpu.kernels.rows import quantized

    assert weight.scales is not None, "what is quantized has scales"
    values, own = quantized(x.contiguous(), x.shape[1], weight.values.dtype)
    y: Tensor = library_function("gemm_a8w8")(
        values.view(weight.values.dtype), weight.values, own, weight.scales.contiguous(), None, x.dtype
    )  # fmt: skip
    return y if bias is None else y + bias


def _try_experts(device: torch.device) -> trials.Pair:
    return trials.of_experts(device, _experts)


@experts.provide("aiter", _probe("fused_moe", _try_experts))
def _experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    if kind != "silu" or x.dtype not in HALVES or x.shape[1] % 128 or down.shape[2] % 128 or not len(x):
        return _own_provider("experts")(x, gate_up, down, weights, ids, kind)
    served = (ids >= 0) & (ids < len(down))  # it knows no id that adds nothing
    weights, ids = torch.where(served, weights.float(), 0.0), torch.where(served, ids, 0)
    silu = library_function("ActivationType").Silu
    out: Tensor = library_function("fused_moe")(x.contiguous(), gate_up, down, weights, ids, activation=silu)
    return out


def refusals(spec: AttentionSpec) -> list[str]:
    """Everything about the layer that its attention lacks."""
    reasons = {
        f"queries in {spec.dtype}": spec.dtype not in HALVES,
        f"a cache in {spec.cache_name}": spec.cache_dtype != spec.dtype,
        "slopes (ALiBi)": spec.alibi is not None,
        "V as a part of K": bool(spec.shared),
        "windows (it multiplies by 0 what lies behind one, and that may be NaN)": spec.window is not None,
        "chunks": spec.chunk is not None,
        "layers that are not causal": not spec.causal,
        f"layers of {spec.source!r} attention": spec.source != "self",
    }
    return [name for name, lacking in reasons.items() if lacking]


def mixer(spec: AttentionSpec, ops: Ops) -> Mixer:
    """Returns a mixer that writes by the bound ops, then runs AITER's unified attention over the pages. No plan."""
    return PagedAttention(spec, ops, attend=attend)


def attend(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """As paged_attention. Sizes that it asks the host for are what a captured step has at most."""
    (batch, group), out = context, torch.zeros_like(q)  # padding is not written
    keys, values = (each.transpose(1, 2) for each in kv.unbind(1))  # [P, page_size, Hkv, D]
    library_function("unified_attention")(
        q=q.contiguous(), k=keys, v=values, out=out, cu_seqlens_q=batch.query_start_loc,
        max_seqlen_q=1 if single(group) else len(q), seqused_k=group.seq_lens,
        max_seqlen_k=group.block_table.shape[1] * spec.page_size, softmax_scale=spec.scale, causal=True,
        window_size=((spec.window or 0) - 1, 0 if spec.window else -1), block_table=group.block_table,
        softcap=spec.softcap or 0.0, q_descale=None, k_descale=None, v_descale=None, sinks=sinks,
    )  # fmt: skip
    return out


def trial(spec: AttentionSpec, device: torch.device) -> str | None:
    """Returns what is wrong with its attention for such layers."""
    found = library_function("unified_attention")
    return found if isinstance(found, str) else trials.of_attention(spec, device, attend, "AITER")
