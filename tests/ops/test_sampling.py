"""The sampling ops: their distribution is exact, and every provider does what the specification does."""

import itertools
import math

import pytest
import torch
import transformers

from quintet.ops import sampling
from quintet.ops.sampling import Draw
from tests.helpers.platforms.sampling import HOST, bits_of, bound

FAST = [HOST] if HOST != "reference" else []
PROVIDERS = ["reference", *FAST]
NEVER = float("-inf")


def draw_of(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Draw:
    def column(value, dtype=torch.float32):
        return value.to(dtype) if isinstance(value, torch.Tensor) else torch.full((rows,), value, dtype=dtype)

    keys = torch.tensor([[5, -6]], dtype=torch.int32).repeat(rows, 1)
    cuts = (column(temperature), column(top_k, torch.int32), column(top_p), column(min_p))
    return Draw(*cuts, keys, torch.arange(rows, dtype=torch.int32))


def rows_of(draw: Draw, *rows: int) -> Draw:
    return Draw(*(column[list(rows)].contiguous() for column in draw))


def exact(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The distribution, by the definitions of vLLM's documentation, one token at a time."""
    scaled = [x / temperature for x in logits]
    largest = max(scaled)
    mass = {i: math.exp(x - largest) for i, x in enumerate(scaled)}
    kept = [i for i in mass if mass[i] >= min_p]
    kept = sorted(kept, key=lambda i: -mass[i])[: top_k or None]
    total, upto, nucleus = sum(mass[i] for i in kept), 0.0, []
    for i in kept:
        if upto < top_p * total:
            nucleus.append(i)
        upto += mass[i]
    total = sum(mass[i] for i in nucleus)
    return [mass[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


def chi_squared_limit(degrees: int) -> float:
    """The 99.9% quantile, by Wilson and Hilferty 1931."""
    return degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3


COMBINATIONS = [(0.7, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.3, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1),
                (1.5, 8, 0.9, 0.0), (1.2, 0, 0.95, 0.05), (0.9, 7, 0.9, 0.02), (2.0, 1, 0.5, 0.5)]  # fmt: skip


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("cut", COMBINATIONS, ids=str)
def test_draws_follow_the_exact_distribution(provider, cut):
    num = 2500
    logits = [1.5, 0.3, -0.7, 2.1, 0.9, -2.0, 1.1, 0.0, -1.0, 1.9, 0.5, -0.2]
    expected = exact(logits, *cut)
    width = len(logits) if cut[2] < 1 and not cut[1] else cut[1]
    drawn = bound(provider).sample(torch.tensor([logits]).repeat(num, 1), draw_of(num, *cut), width)
    counts = torch.bincount(drawn, minlength=len(logits)).tolist()
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)
    parts = [(count - num * p) ** 2 / (num * p) for count, p in zip(counts, expected, strict=True) if p > 0]
    assert sum(parts) <= chi_squared_limit(max(len(parts) - 1, 1))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_cuts_equal_those_of_transformers(provider):
    torch.manual_seed(0)
    logits = torch.randn(6, 2000) * 3
    warpers = [
        (transformers.TopKLogitsWarper, "top_k", [1, 50, 700]),
        (transformers.TopPLogitsWarper, "top_p", [0.3, 0.9]),
        (transformers.MinPLogitsWarper, "min_p", [0.01, 0.2]),
    ]
    for warper, name, values in warpers:
        for value in values:
            width = {"top_k": value, "top_p": 2000, "min_p": 0}[name]
            ours = bound(provider).filter_logits(logits.clone(), draw_of(6, **{name: value}), width)
            assert torch.equal(ours, warper(value)(None, logits.clone())), (name, value)


def mixed_draw(rows: int, generator: torch.Generator, most: int) -> Draw:
    def maybe(values, off):
        return torch.where(torch.rand(rows, generator=generator) < 0.5, values, torch.tensor(off, dtype=values.dtype))

    temperature = maybe(torch.rand(rows, generator=generator) * 2 + 0.05, 1.0)
    temperature[0] = 0
    top_k = maybe(torch.randint(1, most, (rows,), generator=generator), 0)
    top_p = maybe(torch.rand(rows, generator=generator) * 0.98 + 0.01, 1.0)
    min_p = maybe(torch.rand(rows, generator=generator) * 0.3, 0.0)
    return draw_of(rows, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("provider", FAST)
@pytest.mark.parametrize("vocab, scale", list(itertools.product([1, 7, 300, 9000], [0.3, 8.0])))
def test_a_fast_provider_draws_what_the_specification_draws(provider, vocab, scale):
    generator, fast = torch.Generator().manual_seed(vocab), bound(provider)
    for rounded in (False, True):
        logits = torch.randn(6, vocab, generator=generator) * scale
        logits = logits.bfloat16().float() if rounded else logits
        logits[5, torch.rand(vocab, generator=generator) < 0.9] = NEVER
        draw = mixed_draw(6, generator, max(2, min(vocab, 400)))
        tokens = sampling.sample(logits, draw, vocab)
        assert torch.equal(fast.sample(logits, draw, vocab), tokens)
        for r in range(6):
            assert torch.equal(fast.sample(logits[r : r + 1], rows_of(draw, r), vocab), tokens[r : r + 1])


def test_the_width_changes_nothing():
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(8, 500, generator=generator) * 3).bfloat16().float()
    draw = draw_of(8, 0.9, torch.tensor([5, 0, 60, 1, 5, 0, 60, 2]), torch.tensor([0.5, 1, 0.9, 1, 1, 1, 0.99, 0.1]))
    assert torch.equal(sampling.sample(logits, draw, 60), sampling.sample(logits, draw, 500))
    assert torch.equal(sampling.filter_logits(logits, draw, 60), sampling.filter_logits(logits, draw, 500))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_equal_logits_stay_or_go_together(provider):
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    by_k = bound(provider).filter_logits(logits.clone(), draw_of(1, top_k=2), 2)
    by_p = bound(provider).filter_logits(logits.clone(), draw_of(1, top_p=0.5), 6)
    wanted = [False, True, True, True, True, False]
    assert torch.isfinite(by_k[0]).tolist() == torch.isfinite(by_p[0]).tolist() == wanted


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), NEVER], ids=str)
@pytest.mark.parametrize("cut", COMBINATIONS, ids=str)
def test_a_row_that_cannot_be_drawn_gives_minus_one_and_harms_no_other(provider, bad, cut):
    ops, logits = bound(provider), torch.randn(3, 700)
    whole = ops.sample(logits, draw_of(3, *cut), 700)
    logits[1] = bad
    if bad != NEVER:
        logits[1, 1:] = 0
    drawn = ops.sample(logits, draw_of(3, *cut), 700)
    assert drawn[1] == -1 and torch.equal(drawn[[0, 2]], whole[[0, 2]])
    assert ops.greedy(logits).tolist()[1] == -1
    assert ops.filter_logits(logits, draw_of(3, *cut), 700).shape == logits.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_greedy_takes_the_first_of_the_largest(provider, dtype):
    logits = torch.tensor([[0, 2, 2, 1], [-5, -5, -5, -5], [NEVER, NEVER, -9, NEVER]], dtype=dtype)
    tokens = bound(provider).greedy(logits)
    assert tokens.dtype == torch.int32 and tokens.tolist() == [1, 0, 2]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("num", [0, 1, 7, 900])
@pytest.mark.parametrize("normalize", [True, False])
def test_top_logprobs_equal_a_stable_sort(provider, num, normalize):
    logits = (torch.randn(5, 900, generator=torch.Generator().manual_seed(2)) * 4).bfloat16()
    tokens = torch.tensor([0, 5, 899, 3, 77], dtype=torch.int32)
    every = torch.ones(5, dtype=torch.int32)
    ids, values, ranks = bound(provider).top_logprobs(logits, tokens, num, normalize, every)
    table = torch.log_softmax(logits.float(), -1) if normalize else logits.float()
    exactly = torch.log_softmax(logits.double(), -1)
    for r, token in enumerate(tokens.tolist()):
        row = logits[r].float().tolist()
        wanted = [token, *sorted(range(900), key=lambda i: (-row[i], i))[:num]]
        assert ids[r].tolist() == wanted
        if provider == "native" and normalize:  # its sum is another's, and nearer to the truth
            torch.testing.assert_close(values[r].double(), exactly[r, wanted], rtol=1e-7, atol=1e-7)
        else:
            assert torch.equal(values[r], table[r, wanted])
        assert int(ranks[r]) == 1 + sum(x > row[token] for x in row)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("num", [0, 3])
def test_top_logprobs_of_rows_that_nobody_wants_are_zeros(provider, num):
    logits = torch.randn(4, 50)
    logits[[1, 2], 7] = float("nan")
    wanted = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    tokens = torch.tensor([-1, 9, 9, 9], dtype=torch.int32)
    found = bound(provider).top_logprobs(logits, tokens, num, True, wanted)
    alone = bound(provider).top_logprobs(logits[:1], torch.zeros(1, dtype=torch.int32), num, True, wanted[:1])
    for x, of_zero in zip(found, alone, strict=True):
        assert not x[[1, 3]].any() and torch.equal(x[:1], of_zero)  # a token of -1 counts as 0


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copy", [True, False])
def test_widen_gives_the_first_rows_in_float32(provider, dtype, copy):
    logits = torch.randn(5, 30).to(dtype)
    wide = bound(provider).widen(logits, 3, copy)
    assert wide.dtype == torch.float32 and torch.equal(wide, logits[:3].float())
    if copy:
        assert wide.data_ptr() != logits.data_ptr()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "vocab, share", [(1, 0.5), (31, 0.4), (32, 0.4), (33, 0.4), (100, 0.9), (5000, 0.001), (5000, 0)]
)
def test_keep_tokens_reads_one_bit_for_each_token(provider, vocab, share):
    kept = torch.rand(5, vocab, generator=torch.Generator().manual_seed(vocab)) < share
    kept[2] = True
    bits = bits_of(kept)
    bits[2] = -1
    if vocab % 32:
        bits[3, -1] |= -(2**31)  # no token's
    logits = torch.randn(5, vocab)
    assert torch.equal(bound(provider).keep_tokens(logits.clone(), bits), logits.masked_fill(~kept, NEVER))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_places_may_be_repeated_to_fill_a_shape(provider):
    ops, base = bound(provider), torch.randn(3, 20)
    places = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 2], [4, 7, 9])]
    padded = [torch.cat([x, x[-1:], x[-1:]]) for x in places]
    penalties = torch.rand(3, 3) + 0.5
    extras = {
        "ban_tokens": ([], []),
        "bias_tokens": ([torch.tensor([1.0, 2.0, 3.0])], [torch.tensor([1.0, 2.0, 3.0, 3.0, 3.0])]),
        "penalize": ([torch.tensor([0, 2, 1], dtype=torch.int32), penalties],
                     [torch.tensor([0, 2, 1, 1, 1], dtype=torch.int32), penalties]),
    }  # fmt: skip
    for name, (short, long) in extras.items():
        op = getattr(ops, name)
        assert torch.equal(op(base.clone(), *places, *short), op(base.clone(), *padded, *long)), name


@pytest.mark.parametrize("provider", FAST)
def test_a_fast_provider_penalizes_as_the_specification_does(provider):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4, 50, generator=generator) * 5
    rows, ids = (x.to(torch.int32) for x in torch.nonzero(torch.rand(4, 50, generator=generator) < 0.4).unbind(1))
    counts = torch.randint(0, 4, rows.shape, generator=generator, dtype=torch.int32)
    penalties = torch.rand(4, 3, generator=generator) + 0.5
    wanted = sampling.penalize(logits, rows, ids, counts, penalties)
    assert torch.equal(bound(provider).penalize(logits.clone(), rows, ids, counts, penalties), wanted)
