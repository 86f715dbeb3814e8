"""Numbers through a platform's cache and back: each is the V of a request of one token, with softmax weight 1."""

import itertools
import math

import torch
from torch import Tensor

from quintet.conformance.check import ContractViolation, require
from quintet.conformance.formats import (
    FLOATS,
    MAX_INT4,
    MAX_INT8,
    Float8Encoding,
    away_from_rounding_ties,
    through_cache,
)
from quintet.conformance.harness.attention import AttentionInputs, AttentionSession, first_served
from quintet.conformance.harness.batches import spec
from quintet.conformance.harness.subject import Subject
from quintet.interface.types import INT4, AttentionSpec, cache_dtype_name

HEADS = 2
DIMS = (16, 64, 128)  # of the heads, and sizes of the pages: the first that are served
SIZES = (16, 32, 64, 128)


class RoundTripCache:
    """One that keeps `cached`; Lacking if the platform refuses that type, whatever the layer's sizes."""

    def __init__(self, subject: Subject, cached: torch.dtype, dtype: torch.dtype | None = None) -> None:
        """`dtype` is the layer's: float32 where there is such a layer, since results show most in it."""
        dtypes = subject.facts.dtypes
        self.dtype = dtype or (torch.float32 if torch.float32 in dtypes else dtypes[0])
        self.cached, self._subject = cached, subject
        sizes = itertools.product(DIMS, SIZES)
        self.of: AttentionSpec = first_served(
            subject, (spec(HEADS, HEADS, d, dtype=self.dtype, page_size=s, kv_dtype=cached) for d, s in sizes)
        )

    @property
    def width(self) -> int:
        """Numbers of a row, which may share a scale."""
        return self.of.head_dim

    def rows(self, numbers: Tensor) -> Tensor:
        """[n] -> [R, width], zeros at the end; as the layer's type holds them."""
        padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % self.width))
        return padded.reshape(-1, self.width).to(self.dtype)

    def round_trip(self, rows: Tensor) -> Tensor:
        """Returns rows [R, width] as they come back from the cache, in float64."""
        tokens = -(-len(rows) // HEADS)
        v = torch.zeros(1 + tokens, HEADS, self.width, dtype=self.dtype)
        v[1:].view(-1, self.width)[: len(rows)] = rows
        nothing = torch.zeros_like(v)
        session = AttentionSession(self._subject, self.of, [1] * tokens, AttentionInputs(nothing, nothing, v))
        most = session.max_step[1]
        steps = [session.run(dict.fromkeys(range(i, min(i + most, tokens)), 1)) for i in range(0, tokens, most)]
        found = torch.cat([each for step in steps for each in step.values()])
        return found.reshape(-1, self.width)[: len(rows)].double()


def float8_codes(cache: RoundTripCache) -> None:
    """Each number of the format comes back as itself."""
    want = FLOATS[cache.cached].numbers
    require_same(cache.cached, want, cache.round_trip(cache.rows(want)).flatten()[: len(want)])


def require_same(cached: torch.dtype, want: Tensor, got: Tensor) -> None:
    """Numbers of a format; where they are others, the message says what they look like."""
    wrong = torch.nonzero(want != got).flatten()
    if not len(wrong):
        return
    first = int(wrong[0])
    codes = {FLOATS[cached].value(code): code for code in range(256)}
    misread = {
        cache_dtype_name(other): torch.tensor([of.value(codes[v]) for v in want.tolist()])
        for other, of in FLOATS.items()
    }
    looks = [name for name, values in misread.items() if torch.allclose(values.double(), got, equal_nan=True)]
    raise ContractViolation(
        f"{cache_dtype_name(cached)}, code {codes[float(want[first])]:#04x}: {float(want[first]):g} was stored, "
        f"{float(got[first]):g} came back; {len(wrong)} of {len(want)} numbers are others"
        + (f", as if they were read as {looks[0]}" if looks else "")
    )


def float8_rounding(cache: RoundTripCache) -> None:
    """The nearest number is kept; the largest of what lies beyond it, or an infinity where there is one; NaN stays."""
    of = FLOATS[cache.cached]
    x = cache.rows(_between_neighbours(of)).double()
    got = cache.round_trip(x)
    most = float(of.numbers[-1])
    clamped = x.clamp(-most, most)
    beyond = (x.abs() > most) & of.infinities & (got == x.sign() * math.inf)
    wrong = ~beyond & ~((clamped - got).abs() <= (clamped - of.nearest(x)).abs())
    if bool(wrong.any()):
        at = tuple(torch.nonzero(wrong)[0].tolist())
        raise ContractViolation(
            f"{cache_dtype_name(cache.cached)}: of {float(x[at]):g}, {float(got[at]):g} was kept, and "
            f"{float(of.nearest(x[at])):g} is nearer; {int(wrong.sum())} numbers are wrong"
        )
    _nan_stays_in_token(cache, torch.nan)


def _between_neighbours(of: Float8Encoding) -> Tensor:
    """At the quarters between neighbours, and beyond the ends."""
    low, high = of.numbers[:-1], of.numbers[1:]
    most = float(of.numbers[-1])
    beyond = [sign * most * times for sign in (1, -1) for times in (1.5, 8.0, math.inf)]
    return torch.cat([*(low + (high - low) * part for part in (0.25, 0.5, 0.75)), torch.tensor(beyond).double()])


def _nan_stays_in_token(cache: RoundTripCache, value: float) -> None:
    """A number that is none stays in its token, and shows there."""
    x = torch.ones(6 * HEADS, cache.width, dtype=cache.dtype)
    x[2 * HEADS, 3] = value
    got = cache.round_trip(x)
    require(not bool(got[2 * HEADS, 3].isfinite()), f"{value} was stored, {float(got[2 * HEADS, 3]):g} came back")
    others = torch.cat([got[: 2 * HEADS], got[3 * HEADS :]])
    same = (others - 1).abs() <= (cache.cached == INT4) * 2.0**-11  # of a scale in float16
    require(bool(same.all()), f"one token's {value} shows in another's V: 1 was stored, not {others.tolist()}")


def int8_codes(cache: RoundTripCache) -> None:
    """Each row ends at 127 steps of a power of two, so that every step is exact."""
    count = cache.width - 1
    steps = torch.arange(-MAX_INT8, MAX_INT8 + 1)
    steps = torch.nn.functional.pad(steps, (0, -len(steps) % count)).reshape(-1, count)
    rows = torch.cat([torch.full((len(steps), 1), MAX_INT8), steps], 1).double()
    for step in (1.0, 2.0**-12, 2.0**6):
        want = rows * step
        got = cache.round_trip(want)
        allowed = 4 * torch.finfo(cache.dtype).eps * (cache.dtype == torch.float32)  # of a scale; others round it away
        wrong = (got - want).abs() > allowed * want.abs()
        if bool(wrong.any()):
            at = tuple(torch.nonzero(wrong)[0].tolist())
            raise ContractViolation(
                f"int8, {float(rows[at]):g} steps of {step:g}: {float(got[at]):g} came back, {float(want[at]):g} was "
                f"stored; {int(wrong.sum())} of {wrong.numel()} numbers are wrong"
            )


def int8_rounding(cache: RoundTripCache) -> None:
    """Each number is the nearest step of its row's scale, the largest / 127; a row of zeros is one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7 * HEADS, cache.width, generator=generator) * 7
    x[3] *= 1e-4
    x[5] = 0
    x = x.to(cache.dtype).double()
    got = cache.round_trip(x)
    scale = x.abs().amax(-1, keepdim=True) / MAX_INT8
    allowed = scale * 0.501 + torch.finfo(cache.dtype).eps * x.abs()
    wrong = ~((got - x).abs() <= allowed)
    if bool(wrong.any()):
        at = tuple(torch.nonzero(wrong)[0].tolist())
        raise ContractViolation(
            f"int8, a row with steps of {float(scale[at[0]]):g}: of {float(x[at]):g}, {float(got[at]):g} was kept; "
            f"{int(wrong.sum())} of {wrong.numel()} numbers are not the nearest"
        )
    for value in (torch.nan, torch.inf):
        _nan_stays_in_token(cache, value)


def int4_codes(cache: RoundTripCache) -> None:
    """Each code of a group, in any order: what they are turned back to comes back."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.stack([torch.randperm(cache.width, generator=generator) % (MAX_INT4 + 1) for _ in range(8 * HEADS)])
    for scale, least in ((1.0, 0.0), (2.0**-8, -(2.0**-5)), (4.0, -24.0)):
        _require_int4(cache, through_cache(codes * scale + least, INT4).to(cache.dtype))


def int4_rounding(cache: RoundTripCache) -> None:
    """Each code is the nearest of its group; groups of zeros, of tiny and of large numbers among them."""
    x = torch.randn(9 * HEADS, cache.width, generator=torch.Generator().manual_seed(0)) * 7
    x[3] *= 1e-2
    x[5] = 0
    x[7, 1] *= 100
    _require_int4(cache, x.to(cache.dtype))
    for value in (torch.nan, torch.inf):
        _nan_stays_in_token(cache, value)


def _require_int4(cache: RoundTripCache, x: Tensor) -> None:
    x = away_from_rounding_ties(x, INT4)
    want, got = through_cache(x, INT4), cache.round_trip(x.double())
    allowed = 4 * torch.finfo(cache.dtype).eps * want.abs().amax(-1, keepdim=True)
    wrong = ~((got - want).abs() <= allowed)
    if bool(wrong.any()):
        at = tuple(torch.nonzero(wrong)[0].tolist())
        raise ContractViolation(
            f"int4: of {float(x[at]):g}, {float(got[at]):g} was kept, and {float(want[at]):g} is what codes of 4 bits "
            f"make of it; {int(wrong.sum())} of {wrong.numel()} numbers are wrong"
        )


def own_numbers(cache: RoundTripCache) -> None:
    """A few numbers that mean something else in every other format."""
    x = cache.rows(torch.tensor([1.0, 0.5, -16.0, 1.75, 0.015625, -7.0, 112.0, 0.0], dtype=torch.float64))
    want, got = through_cache(x, cache.cached), cache.round_trip(x)
    if cache.cached in FLOATS:
        return require_same(cache.cached, want.flatten(), got.flatten())
    off = float((got - want).abs().max())
    most = 1e-2 + (cache.cached == INT4) * torch.finfo(cache.dtype).eps * float(want.abs().max())
    require(
        off <= most, f"{cache_dtype_name(cache.cached)}: {want[0].tolist()} was stored, {got[0].tolist()} came back"
    )
