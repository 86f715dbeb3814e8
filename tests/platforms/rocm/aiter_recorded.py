"""AITER as it was recorded: what its functions take (github.com/ROCm/aiter, commits below), each computed by torch.

A call that does not bind to every recorded signature of a function fails, as it would there.
"""

import inspect
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from quintet.interface.types import AttentionSpec, Batch, Group, StepContext
from quintet.ops import Op

# function -> (file, commit, parameters; "=" where it has a default)
SIGNATURES: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "rms_norm": (
        ("aiter/ops/rmsnorm.py", "0bc300f740e8ac412deb6bc68c23f7a9e582413c",
         "input weight epsilon use_model_sensitive_rmsnorm="),
    ),
    "rmsnorm2d_fwd_with_add": (
        ("aiter/ops/rmsnorm.py", "0bc300f740e8ac412deb6bc68c23f7a9e582413c",
         "out input residual_in residual_out weight epsilon gemma_norm= use_model_sensitive_rmsnorm="),
    ),
    "gemm_a8w8": (
        ("aiter/ops/gemm_op_a8w8.py", "0006ebde8a078bb8bef51dd28db28dc2822f9c62",
         "XQ WQ x_scale w_scale bias= dtype= splitK="),
    ),
    "fused_moe": (
        ("aiter/fused_moe.py", "000621842c1714b1e9162fc363003dc5936abf41",
         "hidden_states w1 w2 topk_weight topk_ids expert_mask= activation= quant_type= doweight_stage1= w1_scale= "
         "w2_scale= a1_scale= a2_scale= block_size_M= num_local_tokens= moe_sorting_dispatch_policy= dtype= "
         "hidden_pad= intermediate_pad= bias1= bias2= splitk="),
    ),
    "unified_attention": (
        ("aiter/ops/triton/unified_attention.py", "80ecc7784a618f1261dafcdaff3657cc64ec04f4",
         "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table "
         "softcap q_descale k_descale v_descale alibi_slopes= output_scale= qq_bias= sinks="),
        ("aiter/ops/triton/attention/unified_attention.py", "02c43589f810b8907c134b12cb5d21675a36c382",
         "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table "
         "softcap q_descale k_descale v_descale q_scales= alibi_slopes= output_scale= qq_bias= sinks= "
         "shuffled_kv_cache= skip_reduce= backend="),
    ),
}  # fmt: skip


class ActivationType(IntEnum):
    """As aiter/ops/enum.py has it at b6d6e0db5b46c605bbf9a9443c78c03e06bb9bdc."""

    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


def signature(parameters: str) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = parameters.split()
    defaults = [None if name.endswith("=") else inspect.Parameter.empty for name in names]
    made = [
        inspect.Parameter(name.rstrip("="), kind, default=default)
        for name, default in zip(names, defaults, strict=True)
    ]
    return inspect.Signature(made)


class Library:
    """Its functions by name, as aiter.part gives them; `calls` counts them, `wrong` names one that errs."""

    def __init__(self, *missing: str, wrong: str = "") -> None:
        self.calls: dict[str, int] = {}
        self._missing, self._wrong = missing, wrong

    def part(self, name: str) -> Any:
        if name in self._missing:
            return f"AITER lacks {name}"
        return ActivationType if name == "ActivationType" else self._bound(name)

    def _bound(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            for _, _, parameters in SIGNATURES[name]:
                given = dict(signature(parameters).bind(*args, **kwargs).arguments)
            self.calls[name] = self.calls.get(name, 0) + 1
            got = globals()[f"_{name}"](**given)
            if name == self._wrong:
                (given["out"] if got is None else got).mul_(1.5)
            return got

        return call


def _rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    assert input.dim() == 2 and input.is_contiguous(), "older versions take rows alone"
    got: Tensor = Op.registry["rms_norm"].reference(input, weight, epsilon, 0.0)
    return got


def _rmsnorm2d_fwd_with_add(
    out: Tensor, input: Tensor, residual_in: Tensor, residual_out: Tensor, weight: Tensor, epsilon: float
) -> None:
    assert all(each.is_contiguous() for each in (out, input, residual_in, residual_out))
    residual_out.copy_(input + residual_in)
    out.copy_(_rms_norm(residual_out.flatten(0, -2), weight, epsilon).view(out.shape))


def _gemm_a8w8(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Scales of rows: x's [M, 1], the weight's [N, 1]."""
    assert XQ.dtype == WQ.dtype and x_scale.shape == (len(XQ), 1) and w_scale.shape == (len(WQ), 1) and bias is None
    return ((XQ.float() * x_scale) @ (WQ.float() * w_scale).T).to(dtype)


def _fused_moe(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weight: Tensor, topk_ids: Tensor, activation: ActivationType
) -> Tensor:
    assert activation == ActivationType.Silu and topk_weight.dtype == torch.float32 and topk_ids.dtype == torch.int32
    assert 0 <= int(topk_ids.min()) and int(topk_ids.max()) < len(w2), "it reads past its weights"
    got: Tensor = Op.registry["experts"].reference(hidden_states, w1, w2, topk_weight, topk_ids, "silu")
    return got


def _unified_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], block_table: Tensor,
    softcap: float, q_descale: None, k_descale: None, v_descale: None, sinks: Tensor | None,
) -> None:  # fmt: skip
    """k and v [pages, page size, KV heads, D] by their strides; rows of `out` past the last request are not written."""
    assert causal and max_seqlen_q >= int(cu_seqlens_q.diff().max()) and max_seqlen_k >= int(seqused_k.max())
    pages, size, kv_heads, dim = k.shape
    window = window_size[0] + 1 or None
    of = AttentionSpec(
        q.shape[1], kv_heads, dim, softmax_scale, q.dtype, size, window, softcap or None, sinks is not None
    )
    counts, end = cu_seqlens_q.diff(), int(cu_seqlens_q[-1])
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts).int()
    kept = zip(counts.tolist(), seqused_k.tolist(), strict=True)
    places = torch.cat([torch.arange(length - count, length) for count, length in kept])
    group = Group(places.int(), block_table, seqused_k)
    context = StepContext(Batch(places.int(), places.int(), owners, cu_seqlens_q, owners, (group,)), group)
    kv = torch.stack([k.transpose(1, 2), v.transpose(1, 2)], 1)
    out[:end] = Op.registry["paged_attention"].reference(q[:end], kv, context, of, sinks)
