"""The rotary embedding by Triton, with the norms of heads that go before it."""

import torch
from torch import Tensor

from quintet.ops.rotary import HeadNorms, norm_rotary, pair_rotary, rotary
from quintet.platforms.gpu.triton_probe import probing


def _check(device: torch.device) -> str | None:
    """A quarter turn takes (1, 1) to (-1, 1)."""
    one, table = torch.ones(1, 1, 2, device=device), torch.tensor([[0.0, 1.0]], device=device)
    position = torch.zeros(1, dtype=torch.int32, device=device)
    got, _ = _norm_rotary(one, one, HeadNorms(one[0, 0], one[0, 0], 0.0, 0.0), table, position)
    good = torch.allclose(got, torch.tensor([-1.0, 1.0], device=device))
    return None if good else f"a quarter turn of (1, 1) gave {got.tolist()}"


@rotary.provide("triton", probing(_check))
def _rotary(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return _turn(q, k, table, positions, None)


@pair_rotary.provide("triton", probing(_check))
def _pair_rotary(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return _turn(q, k, table, positions, None, neighbours=True)


@norm_rotary.provide("triton", probing(_check))
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
    from quintet.platforms.gpu.kernels.rotary import rotary as launch

    tokens, _, dim = q.shape
    if (k.shape[0], k.shape[2], k.dtype) != (tokens, dim, q.dtype) or positions.shape != (tokens,):
        raise ValueError(
            f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype} and {positions.numel()} positions do not fit"
        )
    if table.dtype != torch.float32 or not table.is_contiguous() or table.shape[1] > dim:
        raise ValueError(f"a table {tuple(table.shape)} {table.dtype} does not turn heads of {dim}")
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    return launch(q, k, table, positions.contiguous(), norms, neighbours)
