"""Sampling by Triton: no row is sorted, and nothing waits for the host.

widen and scale_logits have no kernel: in torch they are one pass over memory already. A draw is the specification's but
where the roundings of a logarithm or of a sum of probabilities decide: a draw in some 100,000.
"""

import torch
from torch import Tensor

from quintet.ops.random import gumbel
from quintet.ops.sampling import Draw, filter_logits, greedy, sample, top_logprobs
from quintet.platforms.gpu.ops.probe import probing

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _check_gumbel(device: torch.device) -> str | None:
    """The noise of three tokens, as quintet/ops/random.py gives it on the host."""
    given = [torch.tensor(x, dtype=torch.int32) for x in ([[5, -6]], [7], [[0, 1, 99_999]])]
    got, want = _gumbel(*(x.to(device) for x in given)).cpu(), gumbel.reference(*given)
    return None if torch.allclose(got, want, rtol=1e-5, atol=1e-5) else f"noise is {got.tolist()}, not {want.tolist()}"


def _check_greedy(device: torch.device) -> str | None:
    """Two rows, one of which cannot be drawn."""
    found = _greedy(torch.tensor([[1.0, 3.0, 2.0], [0.0, float("nan"), 0.0]], device=device)).tolist()
    return None if found == [1, -1] else f"the largest of two rows stood at {found}, not [1, -1]"


def _check_cuts(device: torch.device) -> str | None:
    """top_k, top_p and min_p leave the best two of three; so the draw is one of these."""
    logits = torch.tensor([[0.0, -1.0, -9.0]], device=device).expand(3, 3)
    top_k, zeros = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([2, 0, 0], [0, 0, 0]))
    top_p, min_p = (torch.tensor(x, device=device) for x in ([1.0, 0.9, 1.0], [0.0, 0.0, 0.1]))
    draw = Draw(torch.ones_like(top_p), top_k, top_p, min_p, zeros[:, None].repeat(1, 2), zeros)
    left = torch.isfinite(_filter_logits(logits, draw, 3)).tolist()
    if left != [[True, True, False]] * 3:
        return f"of three tokens, {left} were left"
    drawn = _sample(logits, draw, 3).tolist()
    return None if set(drawn) <= {0, 1} else f"drawn were {drawn}, of tokens 0 and 1"


def _check_logprobs(device: torch.device) -> str | None:
    """Two equal tokens of three, the other without a chance."""
    logits, zero = torch.tensor([[0.0, -1e9, 0.0]], device=device), torch.zeros(1, dtype=torch.int32, device=device)
    ids, values, ranks = (x.tolist() for x in _top_logprobs(logits, zero + 2, 2, True, zero + 1))
    good = ids == [[2, 0, 2]] and ranks == [1] and all(abs(v + 0.693147) < 1e-5 for v in values[0])
    return None if good else f"two equal tokens gave {ids}, {values}, {ranks}"


@gumbel.provide("triton", probing(_check_gumbel))
def _gumbel(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    from quintet.platforms.gpu.kernels.random import gumbel as launch

    return launch(keys.contiguous(), positions.contiguous(), token_ids.contiguous())


@greedy.provide("triton", probing(_check_greedy))
def _greedy(logits: Tensor) -> Tensor:
    from quintet.platforms.gpu.kernels.order import best_of_parts, winner

    return winner(best_of_parts(_rows(logits, *FLOATS)))


@filter_logits.provide("triton", probing(_check_cuts))
def _filter_logits(logits: Tensor, draw: Draw, width: int) -> Tensor:
    from quintet.platforms.gpu.kernels.sampling import filter_logits as launch

    logits = _rows(logits, torch.float32)
    return launch(logits, _dense(draw, logits), width > 0)


@sample.provide("triton", probing(_check_cuts))
def _sample(logits: Tensor, draw: Draw, width: int) -> Tensor:
    from quintet.platforms.gpu.kernels.sampling import sample as launch

    logits = _rows(logits, torch.float32)
    return launch(logits, _dense(draw, logits), width > 0)


@top_logprobs.provide("triton", probing(_check_logprobs))
def _top_logprobs(
    logits: Tensor, token_ids: Tensor, num: int, normalize: bool, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Uses the specification's sort for more tokens than are quickly taken one by one."""
    from quintet.platforms.gpu.kernels.logprobs import MOST
    from quintet.platforms.gpu.kernels.logprobs import top_logprobs as launch

    if num > MOST:
        return top_logprobs.reference(logits, token_ids, num, normalize, wanted)
    return launch(_rows(logits, *FLOATS), token_ids.contiguous(), num, normalize, wanted.contiguous())


def _rows(logits: Tensor, *types: torch.dtype) -> Tensor:
    """Returns logits [R, V] with dense rows."""
    if logits.dim() != 2 or logits.dtype not in types:
        raise ValueError(f"logits are [R, V] of {' or '.join(map(str, types))}, not {logits.shape} {logits.dtype}")
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _dense(draw: Draw, logits: Tensor) -> Draw:
    """Returns a draw with dense columns, which must have one entry per row."""
    if any(len(column) != len(logits) for column in draw):
        raise ValueError(f"{len(logits)} rows of logits have columns of {', '.join(str(len(c)) for c in draw)}")
    return Draw(*(column.contiguous() for column in draw))
