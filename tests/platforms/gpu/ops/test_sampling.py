"""The Triton providers of sampling do what the specification does, without sorting."""

import pytest
import torch
from torch import Tensor

import quintet.platforms.gpu.ops.sampling  # noqa: F401  registers its providers
from quintet.ops import sampling
from quintet.ops.random import gumbel, uniform
from quintet.ops.registry import Op
from quintet.ops.sampling import NEVER, Draw
from quintet.platforms.gpu.kernels import logprobs as kernels_of_logprobs
from quintet.platforms.gpu.kernels import sampling as kernels_of_sampling
from quintet.platforms.gpu.kernels.order import CHUNK
from tests.helpers.platforms.triton import needs_triton, triton_op

DEVICE = needs_triton()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # NumPy's, of NaN
NAN, INF = float("nan"), float("inf")
VOCABS = (7, 2 * CHUNK + 300)


def rows_of_logits(rng: torch.Generator, vocab: int, rounded: bool) -> Tensor:
    """Random rows; with ties if they are rounded; one with holes, one of zeros of both signs, one flat."""
    logits = torch.randn(8, vocab, generator=rng) * 4
    logits = logits.bfloat16().float() if rounded else logits
    logits[2, torch.rand(vocab, generator=rng) < 0.8] = NEVER
    logits[2, 0] = 1
    logits[3] = logits[3].sign() * 0.0
    logits[7] *= 0.01
    return logits


def broken(logits: Tensor) -> Tensor:
    """Rows from which nothing can be drawn, for reasons of all kinds."""
    logits = logits.clone()
    logits[0, -1], logits[1, 0], logits[4], logits[5, -2:] = NAN, INF, NEVER, float("-nan")
    return logits


def random_draw(rng: torch.Generator, vocab: int, rows: int = 8) -> Draw:
    def maybe(values: Tensor, off: float) -> Tensor:
        return torch.where(torch.rand(rows, generator=rng) < 0.5, values, torch.tensor(off, dtype=values.dtype))

    values = torch.rand(4, rows, generator=rng)
    keys = torch.randint(-(2**31), 2**31, (rows, 2), generator=rng).int()
    positions = torch.randint(0, 9999, (rows,), generator=rng).int()
    top_k = maybe(torch.randint(1, 2 * vocab, (rows,), generator=rng).int(), 0)
    top_k[2:5] = torch.where(top_k[2:5] > 0, top_k[2:5].clamp(max=3), 0)  # few enough for a bound
    temperature = maybe(values[0] * 2 + 0.05, 0.0)
    return Draw(temperature, top_k, maybe(values[1], 1.0), maybe(values[2] * 0.3, 0.0), keys, positions)


def off(rows: int) -> Draw:
    """Temperature 1 and no cuts."""
    keys, positions = torch.arange(2 * rows).int().view(rows, 2), torch.arange(rows).int()
    return Draw(torch.ones(rows), torch.zeros(rows).int(), torch.ones(rows), torch.zeros(rows), keys, positions)


def test_noise_equals_the_specifications_to_a_rounding_of_each_logarithm() -> None:
    rng = torch.Generator().manual_seed(0)
    draw, ids = random_draw(rng, 100), torch.arange(601, dtype=torch.int32)[None] * 3571
    want, got = gumbel(draw.keys, draw.positions, ids), triton_op("gumbel", DEVICE)(draw.keys, draw.positions, ids)
    assert bool(((got - want).abs() <= 2 * torch.finfo(torch.float32).eps * (1 + want.abs())).all())
    some = torch.randint(0, 2**31 - 1, (8, 5), generator=rng).int()
    torch.testing.assert_close(
        triton_op("gumbel", DEVICE)(draw.keys, draw.positions, some), gumbel(draw.keys, draw.positions, some)
    )


def test_noise_is_never_out_of_the_bounds_that_spare_draws() -> None:
    """The draw leaves out what no noise lets win: 19.5 below the likeliest."""
    edges = uniform(torch.tensor([0, -1], dtype=torch.int32))
    least, most = (-torch.log(-torch.log(edges))).tolist()
    assert most < 16.6356 and most - least < 19.49  # the largest uniform is 1 - 2**-24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_equals_the_specification(dtype: torch.dtype, vocab: int) -> None:
    logits = broken(rows_of_logits(torch.Generator().manual_seed(vocab), vocab, True)).to(dtype)
    assert torch.equal(triton_op("greedy", DEVICE)(logits), sampling.greedy(logits))
    wide = torch.cat([logits, torch.full((8, 9), INF, dtype=dtype)], 1)
    assert torch.equal(triton_op("greedy", DEVICE)(wide[2:7, :vocab]), sampling.greedy(logits[2:7]))


@pytest.mark.grid(cases=2)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("vocab", VOCABS)
def test_cuts_equal_the_specification_but_for_roundings_at_their_border(vocab: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, draw = rows_of_logits(rng, vocab, seed % 2 == 0), random_draw(rng, vocab)
    scaled = sampling.scale_logits(logits, draw.temperature)
    left = triton_op("filter_logits", DEVICE)(scaled, draw, vocab)
    kept = torch.isfinite(left)
    assert torch.equal(left, torch.where(kept, scaled, NEVER))
    margin = 1e-5
    nucleus = draw.top_p < 1
    tight = draw._replace(top_p=torch.where(nucleus, draw.top_p - margin, 1.0), min_p=draw.min_p * (1 + margin))
    loose = draw._replace(
        top_p=torch.where(nucleus, (draw.top_p + margin).clamp(max=1 - 1e-7), 1.0), min_p=draw.min_p * (1 - margin)
    )
    fewest, most = (torch.isfinite(sampling.filter_logits(scaled, each, vocab)) for each in (tight, loose))
    assert not (fewest & ~kept).any() and not (kept & ~most).any()


def test_top_k_keeps_what_the_specification_keeps() -> None:
    """One row has more candidates than are looked at at once; the bound helps only where k is at most its 3 chunks."""
    vocab = VOCABS[-1]
    logits = rows_of_logits(torch.Generator().manual_seed(vocab), vocab, True)
    for k in ([1, 2, 3, 5, 4, 3, 2, 1], [50, 9, 700, vocab, vocab - 1, vocab + 1, 1, 2300]):
        draw = off(8)._replace(top_k=torch.tensor(k, dtype=torch.int32))
        left = triton_op("filter_logits", DEVICE)(logits, draw, min(max(k), vocab))
        assert torch.equal(left, sampling.filter_logits(logits, draw, min(max(k), vocab)))


def test_the_only_token_stays() -> None:
    draw = random_draw(torch.Generator().manual_seed(1), 1)
    logits = torch.linspace(-3, 3, 8)[:, None]
    assert torch.equal(triton_op("filter_logits", DEVICE)(logits, draw, 1), logits)
    assert triton_op("sample", DEVICE)(logits, draw, 1).tolist() == [0] * 8


def test_equal_logits_stay_together_and_count_one_by_one() -> None:
    """The last of top_k's tokens is one of three equal ones: all stay, and one of them counts for top_p."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]] * 4 + [[0.0, -0.0, 0.0, -1.0, -2.0, NEVER]] * 2)
    draw = off(6)._replace(
        top_k=torch.tensor([2, 2, 4, 0, 1, 0], dtype=torch.int32),
        top_p=torch.tensor([0.74, 0.73, 1.0, 0.4, 1.0, 0.0]),  # of two, the best has 0.731 of the mass; of all, 0.45
    )
    tied, best, zeros = [0, 1, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]
    kept = torch.isfinite(triton_op("filter_logits", DEVICE)(logits, draw, 6)).int().tolist()
    assert kept == [tied, best, tied, best, zeros, zeros]


@pytest.mark.grid(cases=3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_equal_the_specification(vocab: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, draw = rows_of_logits(rng, vocab, seed % 2 == 0), random_draw(rng, vocab)
    logits = broken(logits) if seed % 3 == 0 else logits
    run = triton_op("sample", DEVICE)
    want = sampling.sample(logits, draw, vocab)
    assert torch.equal(run(logits, draw, vocab), want)
    assert torch.equal(run(logits[6:7], Draw(*(c[6:7] for c in draw)), vocab), want[6:7])
    uncut = draw._replace(top_k=torch.zeros_like(draw.top_k), top_p=torch.ones_like(draw.top_p))
    assert torch.equal(run(logits, uncut, 0), sampling.sample(logits, uncut, 0))


def test_tokens_of_a_large_vocabulary_are_the_specifications() -> None:
    """20 chunks; the bound of top_k spares all but a few tokens."""
    logits = torch.randn(2, 20 * CHUNK - 1, generator=torch.Generator().manual_seed(1)) * 3
    draw = off(2)._replace(top_k=torch.tensor([12, 0]).int(), top_p=torch.tensor([0.95, 0.9]))
    vocab = logits.shape[1]
    assert torch.equal(triton_op("sample", DEVICE)(logits, draw, vocab), sampling.sample(logits, draw, vocab))


@pytest.mark.grid(cases=4)
@pytest.mark.parametrize(
    ("num", "normalize", "dtype"),
    [
        *((num, True, torch.float32) for num in (0, 1, 5, 20, 100)),
        *((num, False, torch.bfloat16) for num in (0, 3)),
        (5, False, torch.float32),
        (5, True, torch.float16),
    ],
    ids=str,
)
def test_top_logprobs_equal_the_specification(num: int, normalize: bool, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(num)
    vocab = 6 * CHUNK + 10 if num == 5 else 900
    logits = rows_of_logits(rng, vocab, True).to(dtype)
    logits[6] = NAN
    tokens = torch.tensor([0, 5, 899, 3, -1, 7, 8, 77], dtype=torch.int32)
    wanted = torch.tensor([1, 0, 1, 2, 1, 1, 1 - num % 2, 1], dtype=torch.int32)
    got = triton_op("top_logprobs", DEVICE)(logits, tokens, num, normalize, wanted)
    want = sampling.top_logprobs(logits, tokens, num, normalize, wanted)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-5, equal_nan=True)


def test_rows_that_do_not_fit_at_once_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(5)
    logits, draw, every = rows_of_logits(rng, 50, True)[:5], random_draw(rng, 50, 5), torch.ones(5).int()
    drawn, found = (
        triton_op("sample", DEVICE)(logits, draw, 50),
        triton_op("top_logprobs", DEVICE)(logits, every, 2, True, every),
    )
    for kernels, room in ((kernels_of_sampling, 3 * kernels_of_sampling.FOUND), (kernels_of_logprobs, 3 * 50)):
        monkeypatch.setattr(kernels, "SCRATCH", room)
    assert torch.equal(triton_op("sample", DEVICE)(logits, draw, 50), drawn)
    again = triton_op("top_logprobs", DEVICE)(logits, every, 2, True, every)
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


def test_no_rows_give_no_rows() -> None:
    none, empty = torch.empty(0, 100), torch.empty(0, dtype=torch.int32)
    assert triton_op("greedy", DEVICE)(none).shape == (0,)
    assert triton_op("sample", DEVICE)(none, off(0), 100).shape == (0,)
    assert triton_op("filter_logits", DEVICE)(none, off(0), 100).shape == (0, 100)
    assert triton_op("top_logprobs", DEVICE)(none, empty, 2, True, empty)[0].shape == (0, 3)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="logits are"):
        triton_op("sample", DEVICE)(torch.ones(2, 3).half(), off(2), 3)
    with pytest.raises(ValueError, match="2 rows of logits"):
        triton_op("sample", DEVICE)(torch.ones(2, 3), off(3), 3)


@pytest.mark.parametrize("name", ["gumbel", "greedy", "filter_logits", "sample", "top_logprobs"])
def test_probes_find_that_they_serve(name: str) -> None:
    assert Op.registry[name].probes["triton"]() is None
