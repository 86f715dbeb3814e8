"""Gates, the soft cap, the look-up of rows and of sampled tokens by Triton: the specification takes several passes.

activate, add and scale have no kernel: in torch they are one launch and one pass already.
"""

import torch
from torch import Tensor

from quintet.ops.activation import gated
from quintet.ops.elementwise import softcap
from quintet.ops.embedding import embedding, place_tokens
from quintet.platforms.gpu.ops.probe import probing


def _check_gated(device: torch.device) -> str | None:
    """Checks that every activation of 0 is 0, and of 20 nearly 20, or its square."""
    from quintet.platforms.gpu.kernels.activation import KINDS

    rows = torch.tensor([[0.0, 3.0], [20.0, 0.5]], device=device)
    got = torch.stack([_gated(rows, kind)[:, 0] for kind in KINDS])
    good = not got[:, 0].any() and all(abs(float(x) - 10) < 1e-3 or abs(float(x) - 200) < 1e-3 for x in got[:, 1])
    return None if good else f"gates of 0 and 20 gave {got.tolist()}"


def _check_softcap(device: torch.device) -> str | None:
    """0 stays, and what is large comes to the cap."""
    got = _softcap(torch.tensor([0.0, -1000.0], device=device), 5.0).tolist()
    return None if got == [0.0, -5.0] else f"capped at 5, 0 and -1000 gave {got}"


def _check_embedding(device: torch.device) -> str | None:
    """The middle of three ids, of which the first two are there."""
    ids, table = torch.tensor([4, 6], dtype=torch.int32, device=device), torch.ones(2, 3, device=device)
    got = _embedding(ids, table, 3, True).tolist()
    return None if got == [[1.0] * 3, [0.0] * 3] else f"a row of ones and one of another rank gave {got}"


def _check_tokens(device: torch.device) -> str | None:
    """One of each kind: known, sampled, and sampled where nothing could be drawn."""
    ids, sampled, rows = torch.tensor([[5, -1, -1], [8, 9, -1], [-1, 1, 2]], dtype=torch.int32, device=device)
    got = _place_tokens(ids, sampled, rows).tolist()
    return None if got == [5, 9, 0] else f"5, 9 and no token came as {got}"


@gated.provide("triton", probing(_check_gated))
def _gated(x: Tensor, kind: str) -> Tensor:
    from quintet.platforms.gpu.kernels.activation import KINDS
    from quintet.platforms.gpu.kernels.activation import gated as launch

    if kind not in KINDS:  # torch computes it, as the specification says
        plain: Tensor = gated.reference(x, kind)
        return plain
    if x.shape[1] % 2:
        raise ValueError(f"gate beside up are {x.shape[1]} wide, which is odd")
    return launch(x if x.stride(1) == 1 else x.contiguous(), kind)


@softcap.provide("triton", probing(_check_softcap))
def _softcap(x: Tensor, cap: float) -> Tensor:
    from quintet.platforms.gpu.kernels.activation import softcap as launch

    x = x.contiguous()
    launch(x, cap)
    return x


@embedding.provide("triton", probing(_check_embedding))
def _embedding(ids: Tensor, weight: Tensor, first: int, partial: bool) -> Tensor:
    """An id outside of a whole table gives zeros here, where torch would end the process."""
    from quintet.platforms.gpu.kernels.embedding import embedding as launch

    return launch(ids.contiguous(), weight if weight.stride(1) == 1 else weight.contiguous(), first * partial)


@place_tokens.provide("triton", probing(_check_tokens))
def _place_tokens(token_ids: Tensor, sampled: Tensor, rows: Tensor) -> Tensor:
    from quintet.platforms.gpu.kernels.tokens import place_tokens as launch

    return launch(token_ids.contiguous(), sampled.contiguous(), rows.contiguous())
