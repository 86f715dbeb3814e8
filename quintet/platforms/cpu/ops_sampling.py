"""Providers of sampling for host memory: row by row, looking closely only at the tokens that can matter.

A row of 150,000 logits is read a few times in full (each read some 15 us); sorting and random numbers are left to the
few hundred tokens that a lower bound lets through. NumPy does most of it: its calls cost less than torch's here, and
none of them starts threads, which on a busy machine wait for each other longer than the work takes.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quintet.ops.random import LARGEST_GUMBEL, PARITY, ROTATIONS, gumbel
from quintet.ops.sampling import (
    NEVER,
    Draw,
    ban_tokens,
    bias_tokens,
    filter_logits,
    greedy,
    keep_tokens,
    penalize,
    sample,
    top_logprobs,
)

Array = np.ndarray[Any, Any]

GROUPS = 128  # a row is cut into V / 128 groups; their maxima give a lower bound of the k-th largest in one pass
HEAD = 64  # tokens to look at where nothing says how many
NUCLEUS = 256  # and where their probabilities must add up to top_p
CHUNK = 8192  # tokens whose random numbers are made at once: their words stay in the first two caches
DENSE = 8  # with a token in more than every eighth word of 32, a mask is quicker than a list of the tokens
SERIAL = 2000  # elements; from 2048 torch calls its threads for a logarithm


class _Cut(NamedTuple):
    """One row's parameters, as Python numbers; see Draw."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


class _Tokens(NamedTuple):
    """Some of a row's tokens in order of their ids; every other token's scaled logit is at most `rest`."""

    ids: Array  # [C]
    scaled: Array  # [C] float32
    rest: float


@greedy.provide("torch")
def _greedy(logits: Tensor) -> Tensor:
    rows = logits.float().numpy()
    best = np.argmax(rows, -1).astype(np.int32)
    best[~np.isfinite(rows[np.arange(len(rows)), best])] = -1
    return torch.from_numpy(best)


@sample.provide("torch")
def _sample(logits: Tensor, draw: Draw, width: int) -> Tensor:
    rows = logits.numpy()
    out = np.empty(len(rows), np.int32)
    cuts = list(map(_Cut._make, zip(*(column.tolist() for column in draw[:4]), strict=True)))
    random = []
    for r, cut in enumerate(cuts):
        best = int(rows[r].argmax())
        out[r] = best if np.isfinite(rows[r, best]) else -1
        if cut.temperature > 0 and out[r] >= 0:
            random.append(r)
    tokens = [_candidates(rows[r], cuts[r]) for r in random]
    keys, positions = draw.keys.numpy(), draw.positions.numpy()
    unsure = _pick(out, random, tokens, keys, positions) if random else []
    if unsure:
        tokens = [_reaching(rows[r], cuts[r].temperature, score - LARGEST_GUMBEL) for r, score in unsure]
        _pick(out, [r for r, _ in unsure], tokens, keys, positions)
    return torch.from_numpy(out)


def _pick(out: Array, rows: list[int], tokens: list[_Tokens], keys: Array, positions: Array) -> list[tuple[int, float]]:
    """Writes the best token of each row; returns the rows whose `rest` might still beat it, with its score."""
    ends = np.cumsum([len(t.ids) for t in tokens])
    noise = _noise(np.concatenate([t.ids for t in tokens]), np.asarray(rows), np.diff(ends, prepend=0), keys, positions)
    unsure = []
    for r, t, end in zip(rows, tokens, ends.tolist(), strict=True):
        scores = t.scaled + noise[end - len(t.ids) : end]
        best = int(scores.argmax())
        out[r] = t.ids[best]
        if t.rest + LARGEST_GUMBEL >= scores[best]:
            unsure.append((r, float(scores[best])))
    return unsure


def _candidates(row: Array, cut: _Cut) -> _Tokens:
    """The tokens that min_p, top_k and top_p leave; with none of them, the likeliest few."""
    nucleus = cut.top_p < 1 and not cut.top_k
    tokens = _head(row, cut.temperature, cut.top_k or (NUCLEUS if nucleus else HEAD))
    least = _least(tokens.scaled, cut.min_p)
    if cut.top_k or tokens.rest < least:
        tokens = tokens._replace(rest=NEVER)
    if nucleus and tokens.rest > NEVER:
        total = _mass(row, cut.temperature) if least == NEVER else np.inf
        threshold = _threshold(tokens.scaled, cut, least, total)
        if threshold is not None:
            return _above(tokens, threshold)
    if tokens.rest > NEVER and (nucleus or least > NEVER):
        tokens = _reaching(row, cut.temperature, least)
    if tokens.rest > NEVER:
        return tokens
    threshold = _threshold(tokens.scaled, cut, least, None)
    return tokens if threshold is None else _above(tokens, threshold)


def _above(tokens: _Tokens, threshold: float) -> _Tokens:
    kept = tokens.scaled >= threshold
    return _Tokens(tokens.ids[kept], tokens.scaled[kept], NEVER)


def _least(scaled: Array, min_p: float) -> float:
    if min_p == 0:
        return NEVER
    return float(scaled.max() + np.log(np.float32(min_p)))


def _threshold(scaled: Array, cut: _Cut, least: float, total: float | None) -> float | None:
    """The smallest of these logits to keep; None if they do not reach top_p of the total mass (None: theirs)."""
    ranked = np.sort(scaled)[::-1]
    ranked = ranked[: cut.top_k or None]
    ranked = ranked[: max(1, int(np.count_nonzero(ranked >= least)))]
    if cut.top_p >= 1 or len(ranked) == 1:
        return float(ranked[-1])
    upto = np.cumsum(np.exp(ranked - ranked[0]), dtype=np.float64)
    wanted = cut.top_p * (upto[-1] if total is None else total)
    if upto[-1] < wanted:
        return None
    return float(ranked[np.searchsorted(upto[:-1], wanted)])


def _mass(row: Array, temperature: float) -> float:
    """The sum of exp(scaled - largest) over a row."""
    scaled = row if temperature == 1 else row / np.float32(temperature)
    return math.exp(-float(_log_softmax(scaled).max()))


def _log_softmax(row: Array) -> Array:
    """torch's: twice as fast as NumPy's exponential, and one row is one thread's."""
    return torch.log_softmax(torch.from_numpy(row), 0).numpy()


def _head(row: Array, temperature: float, num: int) -> _Tokens:
    """At least the `num` largest, and all that equal the last of them once scaled; never a token at -inf."""
    bound = _bound(row, num)
    if bound == NEVER:
        return _reaching(row, temperature, NEVER)
    bound -= abs(bound) * 1e-6  # the division may make neighbours equal
    ids = np.flatnonzero(row >= bound)
    return _Tokens(ids, row[ids] / np.float32(temperature), float(np.float32(bound) / np.float32(temperature)))


def _bound(row: Array, num: int) -> float:
    """What at least `num` elements reach, not far below the num-th largest; -inf where none are told apart."""
    size = len(row) // GROUPS
    if num >= len(row):
        return NEVER
    if num > size // 2:
        return float(np.partition(row, len(row) - num)[len(row) - num])
    largest = np.maximum.reduce(row[: size * GROUPS].reshape(GROUPS, size))
    return float(np.partition(largest, size - num)[size - num])


def _reaching(row: Array, temperature: float, least: float) -> _Tokens:
    """Every token whose scaled logit may reach `least`, but none at -inf."""
    bound = least * temperature - abs(least * temperature) * 1e-6
    ids = np.flatnonzero(row >= bound if bound > NEVER else row > NEVER)
    return _Tokens(ids, row[ids] / np.float32(temperature), NEVER)


def _noise(ids: Array, rows: Array, lengths: Array, keys: Array, positions: Array) -> Array:
    """gumbel() for tokens [N] of several rows: lengths[i] of rows[i], one after the other -> [N] float32."""
    owners = np.repeat(rows, lengths)
    words, places = keys.view(np.uint32), positions.view(np.uint32)
    uniform = np.empty(len(ids), np.float32)
    for start in range(0, len(ids), CHUNK):
        part, owner = ids[start : start + CHUNK], owners[start : start + CHUNK]
        x0, x1 = _threefry(words[owner, 0], words[owner, 1], places[owner], part.astype(np.uint32) >> 1)
        bits = np.where(part & 1, x1, x0) >> 9
        uniform[start : start + CHUNK] = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    for u in torch.from_numpy(uniform).split(SERIAL):
        u.log_().neg_().log_().neg_()  # torch's logarithm, as in the specification
    return uniform


def _threefry(k0: Array, k1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """threefry2x32 on uint32 of one shape; overwrites x0 and x1."""
    schedule = (k0, k1, k0 ^ k1 ^ np.uint32(PARITY))
    high = np.empty_like(x1)
    x0 += k0
    x1 += k1
    for group in range(5):
        for rotation in ROTATIONS[4 * (group % 2) : 4 * (group % 2) + 4]:
            x0 += x1
            np.left_shift(x1, rotation, out=high)
            x1 >>= 32 - rotation
            x1 |= high
            x1 ^= x0
        x0 += schedule[(group + 1) % 3]
        x1 += schedule[(group + 2) % 3]
        x1 += np.uint32(group + 1)
    return x0, x1


@filter_logits.provide("torch")
def _filter_logits(logits: Tensor, draw: Draw, width: int) -> Tensor:
    rows = logits.numpy()
    out = rows.copy()
    columns = (draw.top_k.tolist(), draw.top_p.tolist(), draw.min_p.tolist())
    for r, (top_k, top_p, min_p) in enumerate(zip(*columns, strict=True)):
        uncut = top_k == 0 and top_p >= 1 and min_p == 0
        if uncut or not np.isfinite(rows[r].max()):  # from the latter nothing can be drawn
            continue
        tokens = _candidates(rows[r], _Cut(1.0, top_k, top_p, min_p))
        if tokens.rest == NEVER:
            out[r] = NEVER
            out[r, tokens.ids] = tokens.scaled
    return torch.from_numpy(out)


@gumbel.provide("torch")
def _gumbel(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    ids = np.broadcast_to(token_ids.numpy(), (len(keys), token_ids.shape[1]))
    lengths = np.full(len(keys), ids.shape[1])
    noise = _noise(ids.ravel(), np.arange(len(keys)), lengths, keys.numpy(), positions.numpy())
    return torch.from_numpy(noise).view(ids.shape)


@top_logprobs.provide("torch")
def _top_logprobs(
    logits: Tensor, token_ids: Tensor, num: int, normalize: bool, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.float().numpy()
    ids = np.zeros((len(rows), num + 1), np.int32)
    values = np.zeros((len(rows), num + 1), np.float32)
    ranks = np.zeros(len(rows), np.int32)
    own = token_ids.numpy()
    for r in np.flatnonzero(wanted.numpy()).tolist():
        row = rows[r]
        ids[r, 0] = max(own[r], 0)
        if num:
            ids[r, 1:] = _best(row, num)
        values[r] = (_log_softmax(row) if normalize else row)[ids[r]]
        ranks[r] = np.count_nonzero(row > row[ids[r, 0]]) + 1
    return torch.from_numpy(ids), torch.from_numpy(values), torch.from_numpy(ranks)


def _best(row: Array, num: int) -> Array:
    """The ids of the `num` largest, best first, equal ones in order of their ids."""
    bound = _bound(row, num)
    ids = np.flatnonzero(row >= bound)
    if len(ids) < num:  # the row holds NaN
        ids = np.arange(len(row))
    return ids[np.argsort(-row[ids], kind="stable")[:num]]


@penalize.provide("torch")
def _penalize(logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    out, places, count = logits.numpy(), (rows.numpy(), ids.numpy()), counts.numpy()
    repetition, frequency, presence = penalties.numpy()[places[0]].T
    values = out[places]
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= frequency * count.astype(np.float32)
    values -= np.where(count > 0, presence, np.float32(0))
    out[places] = values
    return logits


@bias_tokens.provide("torch")
def _bias_tokens(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    out, places = logits.numpy(), (rows.numpy(), ids.numpy())
    out[places] = out[places] + values.numpy()
    return logits


@ban_tokens.provide("torch")
def _ban_tokens(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    logits.numpy()[rows.numpy(), ids.numpy()] = NEVER
    return logits


@keep_tokens.provide("torch")
def _keep_tokens(logits: Tensor, bits: Tensor) -> Tensor:
    out, words = logits.numpy(), bits.numpy()
    rows = np.flatnonzero((words != -1).any(-1))
    part = words[rows].ravel()
    held = np.flatnonzero(part)
    if len(held) > len(part) // DENSE:
        for r in rows.tolist():
            kept = np.unpackbits(words[r].view(np.uint8), bitorder="little", count=out.shape[1])
            np.copyto(out[r], NEVER, where=kept == 0)
        return logits
    found = np.flatnonzero(np.unpackbits(part[held].view(np.uint8), bitorder="little"))
    at, word = np.divmod(held[found >> 5], words.shape[1])
    ids = 32 * word + (found & 31)
    inside = ids < out.shape[1]  # the last word may have bits to spare
    places = rows[at[inside]], ids[inside]
    values = out[places]
    out[rows] = NEVER
    out[places] = values
    return logits
