"""The rotary embedding by quintet._cpu, with the norms of heads that go before it."""

import torch
from torch import Tensor

from quintet.interface.types import HeadNorms
from quintet.ops.rotary import norm_rotary, pair_rotary, rotary
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops.extension import extension, indices, kind_of, missing


def probe() -> str | None:
    """A quarter turn takes (1, 1) to (-1, 1)."""
    if reason := missing("rotary"):
        return reason
    one, table = torch.ones(1, 1, 2), torch.tensor([[0.0, 1.0]])
    got, _ = _norm_rotary(one, one, HeadNorms(one[0, 0], one[0, 0], 0.0, 0.0), table, torch.zeros(1, dtype=torch.int32))
    return None if got.tolist() == [[[-1.0, 1.0]]] else f"a quarter turn of (1, 1) gave {got.tolist()}"


@rotary.provide("native", probe)
def _rotary(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return _turn(q, k, table, positions, None)


def probe_pairs() -> str | None:
    """A quarter turn takes (1, 2) and (3, 4), first and second of two pairs apart, to (-2, 1) and (-4, 3)."""
    if reason := missing("pair_rotary"):
        return reason
    pairs, table = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    got, _ = _pair_rotary(pairs, pairs, table, torch.zeros(1, dtype=torch.int32))
    return None if got.tolist() == [[[-2.0, -4.0, 1.0, 3.0]]] else f"quarter turns of two pairs gave {got.tolist()}"


@pair_rotary.provide("native", probe_pairs)
def _pair_rotary(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return _turn(q, k, table, positions, None, neighbours=True)


@norm_rotary.provide("native", probe)
def _norm_rotary(q: Tensor, k: Tensor, norms: HeadNorms, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    for weight in norms[:2]:
        if weight.shape != q.shape[2:] or weight.dtype != q.dtype or not weight.is_contiguous():
            raise ValueError(
                f"a norm of {tuple(weight.shape)} {weight.dtype} does not fit q {tuple(q.shape)} {q.dtype}"
            )
    return _turn(q, k, table, positions, norms)


def _turn(
    q: Tensor, k: Tensor, table: Tensor, positions: Tensor, norms: HeadNorms | None, neighbours: bool = False
) -> tuple[Tensor, Tensor]:
    (tokens, heads, dim), (k_tokens, k_heads, k_dim) = q.shape, k.shape
    there, turned = table.shape
    if (k_tokens, k_dim, k.dtype) != (tokens, dim, q.dtype) or positions.shape != (tokens,) or turned > dim:
        raise ValueError(
            f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, {positions.numel()} positions and a table of "
            f"{tuple(table.shape)} do not fit"
        )
    if table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError(f"the table is contiguous float32, not {table.dtype} with strides {table.stride()}")
    q_strides, k_strides = q.stride(), k.stride()
    if q_strides[2] != 1:
        q = q.contiguous()
        q_strides = q.stride()
    if k_strides[2] != 1:
        k = k.contiguous()
        k_strides = k.stride()
    q_out, k_out = empty((tokens, heads, dim), q.dtype), empty((tokens, k_heads, dim), q.dtype)
    q_weight, k_weight, eps, offset = (0, 0, 0.0, 0.0)
    if norms is not None:
        q_weight, k_weight, eps, offset = norms.q.data_ptr(), norms.k.data_ptr(), norms.eps, norms.offset
    turn = extension().pair_rotary if neighbours else extension().rotary
    turn(
        kind_of(q.dtype), q_out.data_ptr(), q.data_ptr(), q_weight, heads, q_strides[0], q_strides[1],
        k_out.data_ptr(), k.data_ptr(), k_weight, k_heads, k_strides[0], k_strides[1],
        table.data_ptr(), indices(positions), tokens, dim, turned, there, eps, offset,
    )  # fmt: skip
    return q_out, k_out
