"""Specifications of sampling. R rows of logits over V tokens; every row's result is its own, whatever the others are.

An edit of a few tokens is a list of M distinct places: rows [M] and ids [M], int32. A place may be repeated with the
same data, to fill a fixed shape. Edits may overwrite the logits they are given; callers use what they return.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quintet.ops.random import gumbel
from quintet.ops.registry import Op

NEVER = float("-inf")


class Draw(NamedTuple):
    """Sampling parameters of each row."""

    temperature: Tensor  # [R] float32; 0 is greedy
    top_k: Tensor  # [R] int32; 0 is off
    top_p: Tensor  # [R] float32; 1 is off
    min_p: Tensor  # [R] float32; 0 is off
    keys: Tensor  # [R, 2] int32, of the random numbers
    positions: Tensor  # [R] int32: the place in the request of the token that is drawn


@Op
def widen(logits: Tensor, count: int, copy: bool) -> Tensor:
    """The first `count` rows of logits [L, V] of any float type, as float32; in memory of their own if `copy`."""
    return logits[:count].to(torch.float32, copy=copy)


@Op
def greedy(logits: Tensor) -> Tensor:
    """The first of the largest: [R, V] -> [R] int32; -1 if that is NaN or infinite, so that no token can be drawn."""
    best = logits.argmax(-1, keepdim=True)
    finite = torch.isfinite(torch.take_along_dim(logits, best, 1))
    return torch.where(finite, best.to(torch.int32), -1)[:, 0]


@Op
def scale_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits [R, V] / temperature [R]; a row with temperature 0 stays as it is."""
    return logits / torch.where(temperature > 0, temperature, 1.0)[:, None]


@Op
def filter_logits(logits: Tensor, draw: Draw, width: int) -> Tensor:
    """-inf outside of min_p, top_k and top_p, in this order, of scaled logits [R, V] float32.

    Each cut keeps the tokens that reach a threshold, so tokens with equal logits stay or go together: the k-th largest
    logit (Fan et al. 2018), the least of the fewest largest that hold top_p of the mass that min_p and top_k left
    (Holtzman et al. 2020), the largest plus log(min_p) (Nguyen et al. 2024). The likeliest token always stays.
    `width` says how many of the largest logits the thresholds can depend on: V if a row cuts by top_p alone, else the
    largest top_k, 0 without either. It changes the cost, never the result.
    """
    least = logits.amax(-1) + torch.log(draw.min_p)
    if width > 0:
        least = torch.maximum(least, _last_kept(logits, least, draw, width))
    return torch.where(logits >= least[:, None], logits, NEVER)


def _last_kept(logits: Tensor, least: Tensor, draw: Draw, width: int) -> Tensor:
    """The smallest logit [R] that top_k and top_p leave of those >= least [R]; -inf where both are off."""
    ranked = _largest(logits, width)  # [R, W]
    place = torch.arange(width, dtype=torch.int32, device=logits.device)
    live = (place < torch.where(draw.top_k > 0, draw.top_k, width)[:, None]) & (ranked >= least[:, None])
    mass = torch.where(live, torch.exp(ranked - ranked[:, :1]), 0.0)
    upto = mass.cumsum(-1)
    before = torch.cat([torch.zeros_like(upto[:, :1]), upto[:, :-1]], -1)
    enough = (before >= draw.top_p[:, None] * upto[:, -1:]) & (draw.top_p < 1)[:, None] & (place > 0)
    last = torch.where(live & ~enough, ranked, float("inf")).amin(-1)
    return torch.where((draw.top_k > 0) | (draw.top_p < 1), last, NEVER)


def _largest(logits: Tensor, width: int) -> Tensor:
    if width < logits.shape[1]:
        return torch.topk(logits, width, -1).values
    return torch.sort(logits, -1, descending=True).values


@Op
def sample(logits: Tensor, draw: Draw, width: int) -> Tensor:
    """One token per row of logits [R, V] float32, not yet scaled -> [R] int32. Does not overwrite the logits.

    Gumbel-max: the largest of scaled, filtered logits plus noise follows their softmax (Gumbel 1954; Maddison, Tarlow
    and Minka 2014). Greedy rows get no noise. A row gives -1 if its largest logit is NaN or infinite. `width` as in
    filter_logits.
    """
    kept = filter_logits.reference(scale_logits.reference(logits, draw.temperature), draw, width)
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)[None]
    noise = gumbel.reference(draw.keys, draw.positions, token_ids)
    return greedy.reference(kept + torch.where((draw.temperature > 0)[:, None], noise, 0.0))


@Op
def top_logprobs(
    logits: Tensor, token_ids: Tensor, num: int, normalize: bool, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A token of each row, token_ids [R] int32, and the `num` likeliest: ids and values [R, num + 1], ranks [R].

    Column 0 is the token; -1 counts as 0. Values are log_softmax(logits), or the float32 logits if not `normalize`.
    Equal logits come in order of their ids. A rank is 1 + the number of tokens with a larger logit. Rows where wanted
    [R] int32 is 0 are all zeros.
    """
    logits = logits.float()
    values = torch.log_softmax(logits, -1) if normalize else logits
    own = token_ids.clamp(min=0)[:, None].long()
    ranks = (logits > torch.take_along_dim(logits, own, 1)).sum(-1, dtype=torch.int32) + 1
    if num:
        own = torch.cat([own, torch.sort(logits, stable=True, dim=-1, descending=True).indices[:, :num]], -1)
    asked = wanted[:, None] != 0
    values = torch.where(asked, torch.take_along_dim(values, own, 1), 0.0)
    return torch.where(asked, own, 0).to(torch.int32), values, torch.where(asked[:, 0], ranks, 0)


@Op
def penalize(logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Penalties on tokens that a request has: counts [M] int32 in its output, 0 if in the prompt alone.

    penalties [R, 3] float32 are repetition (Keskar et al. 2019: divides a positive logit, multiplies a negative one),
    frequency (taken once per count) and presence (taken if there is a count), in this order.
    """
    repetition, frequency, presence = penalties[rows].unbind(1)
    values = logits[rows, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * counts - torch.where(counts > 0, presence, 0.0)
    return logits.index_put((rows, ids), values)


@Op
def bias_tokens(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Adds values [M] float32 at the places."""
    return logits.index_put((rows, ids), logits[rows, ids] + values)


@Op
def ban_tokens(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """-inf at the places."""
    return logits.index_put((rows, ids), torch.full_like(logits[rows, ids], NEVER))


@Op
def keep_tokens(logits: Tensor, bits: Tensor) -> Tensor:
    """-inf where a token's bit is 0: bits [R, ceil(V / 32)] int32, token t is bit t % 32 of word t // 32.

    A row of words -1 is unrestricted. May overwrite the logits, as an edit.
    """
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    kept = ((bits[:, :, None] >> places) & 1).flatten(1)[:, : logits.shape[1]]
    return torch.where(kept != 0, logits, NEVER)
