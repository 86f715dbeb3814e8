"""The rotary embedding by Triton, with the norms of heads that go before it."""

import torch
from torch import Tensor

from quintet.interface.types import HeadNorms, RotaryArgs, StepContext
from quintet.ops.attention import rotary_write_kv
from quintet.ops.rotary import norm_rotary, pair_rotary, rotary
from quintet.platforms.gpu.ops import attention as triton_attention
from quintet.platforms.gpu.ops.probe import probing


def _check(device: torch.device) -> str | None:
    """A quarter turn takes (1, 1) to (-1, 1)."""
    one, table = torch.ones(1, 1, 2, device=device), torch.tensor([[0.0, 1.0]], device=device)
    position = torch.zeros(1, dtype=torch.int32, device=device)
    got, _ = _norm_rotary(one, one, HeadNorms(one[0, 0], one[0, 0], 0.0, 0.0), table, position)
    good = torch.allclose(got, torch.tensor([-1.0, 1.0], device=device))
    return None if good else f"a quarter turn of (1, 1) gave {got.tolist()}"


def _check_written(device: torch.device) -> str | None:
    """The same quarter turn of K, and what V is, at the place of a slot."""
    one, kv = torch.ones(1, 1, 2, device=device), torch.zeros(2, 2, 1, 16, 2, device=device)
    table, context = torch.tensor([[0.0, 1.0]], device=device), triton_attention.step(0, 1, 16, device)
    _rotary_write_kv(one, one, 3 * one, RotaryArgs(table), kv, context)
    want = torch.zeros_like(kv)
    want[1, 0, 0, 0], want[1, 1, 0, 0] = torch.tensor([-1.0, 1.0], device=device), 3.0
    return None if torch.allclose(kv, want) else f"a quarter turn of (1, 1) was kept as {kv[1, :, 0, 0].tolist()}"


@rotary.provide("triton", probing(_check))
def _rotary(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return _turn(q, k, table, positions, None)


@pair_rotary.provide("triton", probing(_check))
def _pair_rotary(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return _turn(q, k, table, positions, None, neighbours=True)


@norm_rotary.provide("triton", probing(_check))
def _norm_rotary(q: Tensor, k: Tensor, norms: HeadNorms, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return _turn(q, k, table, positions, norms)


@rotary_write_kv.provide("triton", lambda: probing(_check)() or probing(_check_written)())
def _rotary_write_kv(
    q: Tensor, k: Tensor, v: Tensor, rotary: RotaryArgs, kv: Tensor, context: StepContext
) -> tuple[Tensor, Tensor]:
    """Writes in place, bit for bit as the two ops do by Triton."""
    from quintet.platforms.gpu.kernels import rotary_write

    positions = context.batch.positions
    q, k = _fitting(q, k, rotary.cos_sin, positions, rotary.norms)
    triton_attention.check_written(kv, k, v)
    if rotary.norms is not None and rotary.interleaved:
        raise ValueError("neighbours are turned without norms of heads before")
    if not q.shape[0]:
        return torch.empty_like(q), kv
    v = v if v.stride(2) == 1 else v.contiguous()
    return rotary_write.launch(q, k, v, rotary, kv, positions.contiguous(), context.group.slot_mapping), kv


def _turn(
    q: Tensor, k: Tensor, table: Tensor, positions: Tensor, norms: HeadNorms | None, neighbours: bool = False
) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.rotary import rotary as launch

    q, k = _fitting(q, k, table, positions, norms)
    return launch(q, k, table, positions.contiguous(), norms, neighbours)


def _fitting(q: Tensor, k: Tensor, table: Tensor, positions: Tensor, norms: HeadNorms | None) -> tuple[Tensor, Tensor]:
    """q and k with each head's numbers side by side."""
    tokens, _, dim = q.shape
    if (k.shape[0], k.shape[2], k.dtype) != (tokens, dim, q.dtype) or positions.shape != (tokens,):
        raise ValueError(
            f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype} and {positions.numel()} positions do not fit"
        )
    if table.dtype != torch.float32 or not table.is_contiguous() or table.shape[1] > dim:
        raise ValueError(f"a table {tuple(table.shape)} {table.dtype} does not turn heads of {dim}")
    for weight in () if norms is None else norms[:2]:
        if weight.shape != q.shape[2:] or weight.dtype != q.dtype or not weight.is_contiguous():
            raise ValueError(
                f"a norm of {tuple(weight.shape)} {weight.dtype} does not fit q {tuple(q.shape)} {q.dtype}"
            )
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    return q, k
