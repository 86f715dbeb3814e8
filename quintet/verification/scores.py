"""Log-probabilities of sequences, and how far two givers of them are apart."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have
MAX_SHOWN = 5  # positions that a comparison lists


class Likeliest(NamedTuple):
    """The token with the largest log-probability at a position."""

    token: int
    logprob: float


@dataclass(frozen=True)
class SequenceScores:
    """Log-probabilities of one sequence's tokens, in nats, at temperature 1, each given the tokens before it.

    `ids`: token ids of prompt and output; `num_prompt` of them are the prompt. `logprobs`: one per id, None where it is
    not known, as at position 0. `likeliest`: one per id, or empty where none is known.
    """

    ids: Sequence[int]
    num_prompt: int
    logprobs: Sequence[float | None]
    likeliest: Sequence[Likeliest | None] = ()
    drawn: bool = False  # the output was sampled, not chosen


@dataclass(frozen=True)
class Limits:
    """Largest differences of log-probabilities that count as close, in nats."""

    mean: float = 0.0
    max: float = 0.0


@dataclass(frozen=True)
class Position:
    """A position at which two log-probabilities of one token differ."""

    sequence: int  # from 1
    position: int  # from 0, in the sequence's ids
    token: int
    text: str
    here: float
    there: float


@dataclass(frozen=True)
class Split:
    """The first position at which two outputs of one prompt have different tokens. `gap`: how much likelier the token
    `here` is to this engine than that `there`, in nats; None if it is not known."""

    sequence: int
    position: int
    here: int
    there: int
    texts: tuple[str, str]
    gap: float | None


@dataclass(frozen=True)
class Comparison:
    """Differences over all positions that both givers know.

    `mean`, `p99`, `max`: of the absolute differences, in nats. `bias`: mean of here minus there. `kl`: estimate of the
    Kullback-Leibler divergence of here from there on sampled outputs, mean of exp(d) - 1 - d with d = there - here;
    None without any. `likeliest_differ`: share of positions whose likeliest token differs; None if it is not known.
    """

    positions: int
    equal: bool  # all tokens and log-probabilities, to the bit
    mean: float
    p99: float
    max: float
    bias: float
    kl: float | None
    likeliest_differ: float | None
    worst: list[Position]
    splits: list[Split]

    def is_within(self, limits: Limits) -> bool:
        """True if all differences are small enough, and different tokens were about equally likely."""
        near = all(split.gap is not None and split.gap <= limits.max for split in self.splits)
        return self.positions > 0 and near and self.mean <= limits.mean and self.max <= limits.max

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Pair(NamedTuple):
    sequence: int
    position: int
    here: float
    there: float
    drawn: bool


Text = Callable[[int], str]


def compare(here: Sequence[SequenceScores], there: Sequence[SequenceScores], text: Text = str) -> Comparison:
    """Compares two givers' scores of the same prompts, sequence by sequence, up to the first token that differs.

    `text` returns a token's text for the positions that are listed.
    """
    pairs: list[_Pair] = []
    splits: list[Split] = []
    likeliest = [0, 0]  # positions where both know it, and where it differs
    for number, (ours, theirs) in enumerate(zip(here, there, strict=True), 1):
        same = _common(ours.ids, theirs.ids)
        if same < min(len(ours.ids), len(theirs.ids)):
            splits.append(_split(number, same, ours, theirs, text))
        pairs += _pairs(number, same, ours, theirs)
        for one, other in zip(ours.likeliest[:same], theirs.likeliest[:same], strict=False):
            if one is not None and other is not None:
                likeliest[0] += 1
                likeliest[1] += one.token != other.token
    shown = [pair for pair in sorted(pairs, key=_size, reverse=True)[:MAX_SHOWN] if _size(pair)]
    worst = [_position(pair, here[pair.sequence - 1].ids[pair.position], text) for pair in shown]
    return _summary(pairs, splits, likeliest, worst)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many tokens at the beginning are the same."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def _split(number: int, at: int, ours: SequenceScores, theirs: SequenceScores, text: Text) -> Split:
    left, right = ours.ids[at], theirs.ids[at]
    return Split(number, at, left, right, (text(left), text(right)), None)


def _pairs(number: int, same: int, ours: SequenceScores, theirs: SequenceScores) -> Iterator[_Pair]:
    for at in range(same):
        one, other = ours.logprobs[at], theirs.logprobs[at]
        if one is not None and other is not None:
            drawn = ours.drawn and at >= ours.num_prompt
            yield _Pair(number, at, max(one, LOWEST), max(other, LOWEST), drawn)


def _size(pair: _Pair) -> float:
    return abs(pair.here - pair.there)


def _position(pair: _Pair, token: int, text: Text) -> Position:
    return Position(pair.sequence, pair.position, token, text(token), pair.here, pair.there)


def _summary(pairs: list[_Pair], splits: list[Split], likeliest: list[int], worst: list[Position]) -> Comparison:
    if not pairs:
        return Comparison(0, False, 0.0, 0.0, 0.0, 0.0, None, None, [], splits[:MAX_SHOWN])
    sizes = sorted(map(_size, pairs))
    drawn = [pair.there - pair.here for pair in pairs if pair.drawn]
    return Comparison(
        positions=len(pairs),
        equal=sizes[-1] == 0 and not splits,
        mean=math.fsum(sizes) / len(sizes),
        p99=sizes[int(0.99 * (len(sizes) - 1))],
        max=sizes[-1],
        bias=math.fsum(pair.here - pair.there for pair in pairs) / len(pairs),
        kl=math.fsum(math.expm1(min(d, 50.0)) - d for d in drawn) / len(drawn) if drawn else None,
        likeliest_differ=likeliest[1] / likeliest[0] if likeliest[0] else None,
        worst=worst,
        splits=splits[:MAX_SHOWN],
    )


def choices(scored: Sequence[SequenceScores], text: Text = str) -> list[Split]:
    """Returns the first position of each output whose token is not the likeliest to this engine, which scored them:
    outputs that another chose greedily."""
    found = []
    for number, each in enumerate(scored, 1):
        for at in range(each.num_prompt, len(each.ids)):
            best, logprob = each.likeliest[at], each.logprobs[at]
            if best is not None and logprob is not None and best.token != each.ids[at]:
                gap = best.logprob - max(logprob, LOWEST)
                token = each.ids[at]
                found.append(Split(number, at, best.token, token, (text(best.token), text(token)), gap))
                break
    return found
