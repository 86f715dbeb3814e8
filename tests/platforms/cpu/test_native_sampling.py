"""Our own sampling: each instruction set draws the specification's tokens, in whatever company and on any threads."""

import itertools
import struct
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quintet.ops import Op
from quintet.ops.sampling import Draw
from quintet.platforms.cpu.ops import sampling as native_sampling
from tests.helpers.platforms.sampling import bits_of

if reason := native_sampling.probe():
    pytest.skip(reason, allow_module_level=True)

from quintet import _cpu

NEVER, INF, NAN = float("-inf"), float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABS = (1, 2, 15, 127, 128, 129, 300, 5003)  # blocks are of 128 tokens
LARGE = 151_936
CUTS = [(1.0,), (0.6, 50, 0.95), (1.0, 0, 0.9), (1.3, 0, 1.0, 0.05), (1.0, 3000, 0.9)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Threads of torch wait by spinning: the specification takes many times as long with two on busy cores."""
    torch.set_num_threads(1)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _cpu.threads()
    _cpu.set_threads(request.param)
    yield
    _cpu.set_threads(before)


def native(name: str):  # type: ignore[no-untyped-def]
    return Op.registry[name].providers["native"]


def specified(name: str):  # type: ignore[no-untyped-def]
    return Op.registry[name].reference


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_of(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, first=0) -> Draw:  # type: ignore[no-untyped-def]
    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype)

    keys = torch.tensor([[5, -6]], dtype=torch.int32).repeat(rows, 1)
    cuts = (column(temperature), column(top_k, torch.int32), column(top_p), column(min_p))
    return Draw(*cuts, keys, torch.arange(first, first + rows, dtype=torch.int32))


def mixed_draw(rows: int, vocab: int, generator: torch.Generator) -> Draw:
    def maybe(values: Tensor, off: float) -> Tensor:
        return torch.where(torch.rand(rows, generator=generator) < 0.5, values, torch.tensor(off, dtype=values.dtype))

    draw = draw_of(rows)
    return draw._replace(
        temperature=maybe(torch.rand(rows, generator=generator) * 2 + 0.05, 0.0 if vocab % 2 else 1.0),
        top_k=maybe(torch.randint(1, vocab + 3, (rows,), generator=generator, dtype=torch.int32), 0),
        top_p=maybe(torch.rand(rows, generator=generator), 1.0),
        min_p=maybe(torch.rand(rows, generator=generator) * 0.3, 0.0),
        keys=torch.randint(-(2**31), 2**31, (rows, 2), generator=generator).int(),
    )


def row_of(draw: Draw, row: int) -> Draw:
    return Draw(*(column[row : row + 1] for column in draw))


def rows_with_ties(vocab: int, scale: float, generator: torch.Generator) -> Tensor:
    """Random numbers, rounded ones, few different ones, masked ones, equal ones."""
    logits = torch.randn(10, vocab, generator=generator) * scale
    logits[2:4] = logits[2:4].bfloat16().float()
    logits[4:6] = logits[4:6].round()
    logits[6:8, torch.rand(vocab, generator=generator) < 0.9] = NEVER
    logits[8] = -3.25
    return logits


@pytest.mark.grid
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0, 300.0])
@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_are_the_specifications_in_a_batch_and_alone(isa: str, threads: None, vocab: int, scale: float) -> None:
    generator = seeded(vocab)
    logits, draw = rows_with_ties(vocab, scale, generator), mixed_draw(10, vocab, generator)
    tokens = specified("sample")(logits, draw, vocab)
    assert torch.equal(native("sample")(logits, draw, vocab), tokens)
    for r in range(10):
        assert torch.equal(native("sample")(logits[r : r + 1], row_of(draw, r), vocab), tokens[r : r + 1])


@pytest.mark.grid
@pytest.mark.parametrize(
    "cut", [(1.0,), (0.6, 50, 0.95), (1.0, 0, 0.9), (1.3, 0, 1.0, 0.05), (1.0, 3000, 0.9)], ids=str
)
@pytest.mark.parametrize("scale", [0.02, 3.0])
def test_tokens_of_a_large_vocabulary_are_the_specifications(isa: str, cut: tuple[float, ...], scale: float) -> None:
    logits = torch.randn(2, LARGE, generator=seeded(3)) * scale
    logits[1] = logits[1].bfloat16().float()
    draw = draw_of(2, *cut, first=77)
    assert torch.equal(native("sample")(logits, draw, LARGE), specified("sample")(logits, draw, LARGE))


@pytest.mark.parametrize("vocab", VOCABS)
def test_what_cuts_leave_is_what_the_specification_leaves(isa: str, threads: None, vocab: int) -> None:
    for scale in (0.01, 1.0, 8.0, 300.0):
        generator = seeded(vocab)
        logits, draw = rows_with_ties(vocab, scale, generator), mixed_draw(10, vocab, generator)
        left = native("filter_logits")(logits, draw, vocab)
        assert torch.equal(left, specified("filter_logits")(logits, draw, vocab))
        assert left.data_ptr() != logits.data_ptr()


@pytest.mark.parametrize("top_k", [0, 300, 3000, 6000])
@pytest.mark.parametrize("top_p", [0.0, 1e-8, 0.5, 0.999, 1 - 2**-24])
def test_top_k_and_top_p_may_reach_beyond_what_a_mask_leaves(isa: str, top_k: int, top_p: float) -> None:
    logits = torch.full((2, 5003), NEVER)
    logits[0, 7:5000:9] = torch.randn(555, generator=seeded(16))
    logits[1, ::2] = -200 * torch.rand(2502, generator=seeded(17))  # most of them are worth nothing
    draw = draw_of(2, 1.0, top_k, top_p)
    assert torch.equal(native("filter_logits")(logits, draw, 5003), specified("filter_logits")(logits, draw, 5003))
    assert torch.equal(native("sample")(logits, draw, 5003), specified("sample")(logits, draw, 5003))


def test_scores_that_a_rounding_might_exchange_are_left_to_the_specification(isa: str) -> None:
    """The second token is moved, a unit in the last place at a time, past where both score the same."""
    draw, ids = draw_of(1, first=4), torch.tensor([[10, 33]], dtype=torch.int32)
    noise = specified("gumbel")(draw.keys, draw.positions, ids)[0]
    logits = torch.full((1, 200), -30.0)
    logits[0, 10], at = 2.0, 2.0 + float(noise[0] - noise[1])
    drawn = set()
    for step in range(-30, 31):
        logits[0, 33] = at + step * 2.0**-22
        (token,) = native("sample")(logits, draw, 0).tolist()
        assert token == specified("sample")(logits, draw, 0).item()
        drawn.add(token)
    assert drawn == {10, 33}
    logits[0, 33] = at
    out = torch.zeros(1, dtype=torch.int32)
    columns = [draw.temperature, draw.top_k, draw.top_p, torch.log(draw.min_p), draw.keys, draw.positions, out]
    assert _cpu.sample(_cpu.Logits(logits.data_ptr(), 200, 1, 200), *(x.data_ptr() for x in columns)) == 1
    assert out.item() == native_sampling.UNSURE


def test_few_rows_are_left_to_the_specification(isa: str) -> None:
    """Equal logits with equal random words, frequent here, are no reason."""
    rows = 3000
    logits = (torch.randn(rows, 4000, generator=seeded(8)) * 0.1).bfloat16().float()
    draw, out = draw_of(rows, 1.0, 0, 0.95), torch.zeros(rows, dtype=torch.int32)
    columns = [draw.temperature, draw.top_k, draw.top_p, torch.log(draw.min_p), draw.keys, draw.positions, out]
    assert _cpu.sample(_cpu.Logits(logits.data_ptr(), 4000, rows, 4000), *(x.data_ptr() for x in columns)) <= 5


def test_equal_logits_are_drawn_by_the_noise_alone_and_all_of_them_can_be(isa: str) -> None:
    logits = torch.zeros(1000, 50)
    tokens = native("sample")(logits, draw := draw_of(1000), 0)
    noise = specified("gumbel")(draw.keys, draw.positions, torch.arange(50, dtype=torch.int32)[None])
    assert torch.equal(tokens, noise.argmax(-1).int())
    assert set(tokens.tolist()) == set(range(50))


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, NEVER], ids=str)
@pytest.mark.parametrize("where", [0, 1, 127, 128, 299, "all"])
def test_rows_that_cannot_be_drawn_are_nobodys(isa: str, bad: float, where: int | str) -> None:
    logits = torch.randn(3, 300, generator=seeded(5))
    before = native("sample")(logits, draw_of(3, 0.7, 5, 0.9), 5)
    if where == "all":
        logits[1] = bad
    else:
        logits[1] = NEVER if bad == NEVER else logits[1]
        logits[1, where] = bad
    for cut in ((0.7,), (0.7, 5, 0.9), (0.7, 0, 0.9), (0.7, 0, 1.0, 0.1), (0.0,)):
        draw = draw_of(3, *cut)
        tokens = native("sample")(logits, draw, 300)
        assert tokens.tolist()[1] == -1 and torch.equal(tokens, specified("sample")(logits, draw, 300)), cut
        assert torch.equal(native("filter_logits")(logits, draw, 300), specified("filter_logits")(logits, draw, 300)), (
            cut
        )
    assert native("greedy")(logits).tolist() == specified("greedy")(logits).tolist()
    assert torch.equal(native("sample")(logits, draw_of(3, 0.7, 5, 0.9), 5)[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("temperature", [1e-38, 1e-42, 1e-5, 1e30])
def test_extreme_temperatures_are_the_specifications(isa: str, temperature: float) -> None:
    logits = torch.randn(4, 500, generator=seeded(6)) * 5
    logits[1] = logits[1].bfloat16().float()
    logits[2] = -logits[2].abs()
    draw = draw_of(4, temperature)
    assert torch.equal(native("sample")(logits, draw, 0), specified("sample")(logits, draw, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_takes_the_first_of_the_largest(isa: str, threads: None, dtype: torch.dtype) -> None:
    generator = seeded(9)
    for vocab, scale in itertools.product((*VOCABS, 70_001), (0.01, 4.0)):
        logits = (torch.randn(7, vocab, generator=generator) * scale).to(dtype)
        logits[1] = -logits[1].abs()
        logits[2] = logits[2].round()
        logits[3] = NEVER
        logits[4] = NEVER
        logits[4, -1] = -2.0
        assert torch.equal(native("greedy")(logits), specified("greedy")(logits)), vocab


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_zeros_are_equal_and_every_nan_counts(isa: str, dtype: torch.dtype) -> None:
    bits = {torch.float32: (torch.int32, "<i"), torch.bfloat16: (torch.int16, "<h"), torch.float16: (torch.int16, "<h")}
    zeros = torch.tensor([[-1, -0.0, 0.0], [-1, 0.0, -0.0], [-0.0, -0.0, -0.0]], dtype=dtype)
    assert native("greedy")(zeros).tolist() == [1, 1, 0]
    whole, code = bits[dtype]
    for byte in (b"\x7f", b"\xff"):  # NaN of either sign, all of its other bits set
        size = struct.calcsize(code)
        (pattern,) = struct.unpack(code, b"\xff" * (size - 1) + byte)
        logits = torch.zeros(1, 40, dtype=dtype)
        logits.view(whole)[0, 39] = pattern
        assert logits[0, 39].isnan() and native("greedy")(logits).item() == -1


def test_noise_is_within_a_rounding_of_the_specifications(isa: str) -> None:
    ids = torch.arange(300_000, dtype=torch.int32)[None]
    draw = draw_of(1)
    ours, theirs = (f("gumbel")(draw.keys, draw.positions, ids)[0] for f in (native, specified))
    step = torch.maximum((torch.nextafter(theirs, torch.tensor(INF)) - theirs), torch.tensor(2.0**-23))
    assert float(((ours - theirs).abs() / step).max()) <= 1.0


def test_noise_of_rows_with_tokens_of_their_own(threads: None) -> None:
    generator = seeded(10)
    draw = mixed_draw(5, 50, generator)
    ids = torch.randint(0, 2**31 - 1, (5, 70), generator=generator, dtype=torch.int32)
    ours, theirs = (f("gumbel")(draw.keys, draw.positions, ids) for f in (native, specified))
    torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=2e-7)
    assert torch.equal(native("gumbel")(draw.keys[:1], draw.positions[:1], ids[:1]), ours[:1])


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("vocab", VOCABS)
def test_top_logprobs_are_the_specifications(isa: str, threads: None, vocab: int, normalize: bool) -> None:
    generator = seeded(vocab)
    logits = rows_with_ties(vocab, 4.0, generator)
    tokens = torch.randint(-1, vocab, (10,), generator=generator, dtype=torch.int32)
    wanted = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 1, 1], dtype=torch.int32)
    exact = torch.log_softmax(logits.double(), -1) if normalize else logits.double()  # torch's float32: by processor
    for num in sorted({0, 1, min(5, vocab), vocab}):
        got = native("top_logprobs")(logits, tokens, num, normalize, wanted)
        want = specified("top_logprobs")(logits, tokens, num, normalize, wanted)
        assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
        truth = torch.where(wanted[:, None] != 0, exact.gather(1, want[0].long()), 0.0)
        torch.testing.assert_close(got[1].double(), truth, rtol=1.2e-7, atol=1e-6, equal_nan=True)
        for r in range(10):
            one = slice(r, r + 1)
            alone = native("top_logprobs")(logits[one], tokens[one], num, normalize, wanted[one])
            for a, b in zip(alone, got, strict=True):
                assert a.numpy().tobytes() == b[one].numpy().tobytes()  # NaN is NaN


def test_log_probabilities_of_a_large_vocabulary_are_right_to_the_last_places(isa: str) -> None:
    logits = torch.randn(1, LARGE, generator=seeded(11)) * 2
    one = torch.ones(1, dtype=torch.int32)
    ids, values, _ = native("top_logprobs")(logits, one, 1000, True, one)
    truth = torch.log_softmax(logits.double(), -1).gather(1, ids.long())
    torch.testing.assert_close(values.double(), truth, rtol=1.2e-7, atol=1e-7)


def test_top_logprobs_of_rows_that_are_not_finite_are_nan_as_the_specifications(isa: str) -> None:
    logits = torch.randn(4, 300, generator=seeded(12))
    logits[0, 7], logits[1, 9], logits[2], logits[3, 0] = NAN, INF, NEVER, NAN
    ones = torch.ones(4, dtype=torch.int32)
    got, want = (f("top_logprobs")(logits, ones, 4, True, ones) for f in (native, specified))
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    assert got[1].isnan().all() and want[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widen_and_scale_are_exact(threads: None, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(2, -1)
    logits = every.view(dtype) if dtype != torch.float32 else torch.randn(2, 70_000, generator=seeded(13))
    wide = native("widen")(logits, 2, True)
    numbers = ~logits.isnan()
    assert torch.equal(wide[numbers].view(torch.int32), logits[numbers].float().view(torch.int32))
    assert wide[~numbers].isnan().all()
    assert native("widen")(wide, 1, False).data_ptr() == wide.data_ptr()
    assert native("widen")(wide, 1, True).data_ptr() != wide.data_ptr()
    temperature = torch.tensor([0.7, 0.0])
    scaled = (f("scale_logits")(wide, temperature) for f in (native, specified))
    torch.testing.assert_close(*scaled, rtol=0, atol=0, equal_nan=True)


def test_edits_are_the_specifications() -> None:
    generator = seeded(14)
    logits = torch.randn(4, 333, generator=generator) * 5
    rows, ids = (x.to(torch.int32) for x in torch.nonzero(torch.rand(4, 333, generator=generator) < 0.4).unbind(1))
    counts = torch.randint(0, 4, rows.shape, generator=generator, dtype=torch.int32)
    penalties, values = torch.rand(4, 3, generator=generator) + 0.5, torch.randn(len(rows), generator=generator)
    kept = bits_of(torch.rand(4, 333, generator=generator) < 0.5)
    calls = {"penalize": (rows, ids, counts, penalties), "bias_tokens": (rows, ids, values), "ban_tokens": (rows, ids),
             "keep_tokens": (kept,)}  # fmt: skip
    for name, args in calls.items():
        assert torch.equal(native(name)(logits.clone(), *args), specified(name)(logits, *args)), name


def test_rows_of_a_wider_table_are_read_and_written_where_they_stand(isa: str) -> None:
    table = torch.randn(5, 400, generator=seeded(15))
    part, draw, none = table[:, :301], draw_of(5, 0.8, 7, 0.9), torch.zeros(5, dtype=torch.int32)
    whole = part.contiguous()
    table[:, 301:] = NAN
    assert torch.equal(native("sample")(part, draw, 7), specified("sample")(whole, draw, 7))
    assert torch.equal(native("greedy")(part), whole.argmax(-1).int())
    assert torch.equal(native("filter_logits")(part, draw, 7), specified("filter_logits")(whole, draw, 7))
    assert torch.equal(native("top_logprobs")(part, none, 3, False, none + 1)[1][:, 1:], whole.topk(3).values)
    assert native("ban_tokens")(part, none[:1] + 4, none[:1] + 300) is part
    assert part[4, 300] == NEVER and table[:, 301:].isnan().all()


def test_no_rows_give_no_tokens() -> None:
    empty, draw = torch.zeros(0, 30), draw_of(0)
    assert native("greedy")(empty).shape == native("sample")(empty, draw, 0).shape == (0,)
    assert native("filter_logits")(empty, draw, 0).shape == native("scale_logits")(empty, draw.top_p).shape == (0, 30)


WRONG = [
    ("greedy", lambda x: (x.double(),), "logits are torch.float32"),
    ("greedy", lambda x: (x[:, :0],), "vocab must be 1 to"),
    ("sample", lambda x: (x.bfloat16(), draw_of(2), 0), r"logits are \[R, V\] of torch.float32"),
    ("sample", lambda x: (x, draw_of(3), 0), "2 contiguous numbers"),
    ("sample", lambda x: (x, draw_of(2)._replace(top_k=torch.zeros(2)), 0), "2 contiguous numbers of torch.int32"),
    ("filter_logits", lambda x: (x, draw_of(1), 0), "2 contiguous numbers"),
    ("gumbel", lambda x: (draw_of(3).keys, draw_of(3).positions, torch.zeros(2, 4).int()), "1 row or one for each"),
    ("top_logprobs", lambda x: (x, torch.zeros(2).int(), 6, True, torch.ones(2).int()), "num must be 0 to 5, not 6"),
    ("top_logprobs", lambda x: (x, torch.full((2,), 5).int(), 1, True, torch.ones(2).int()), "there are 5 tokens"),
    ("ban_tokens", lambda x: (x, torch.tensor([2]).int(), torch.tensor([0]).int()), "place 0 is row 2, token 0"),
    ("ban_tokens", lambda x: (x, torch.tensor([1]).int(), torch.tensor([-1]).int()), "row 1, token -1"),
    ("ban_tokens", lambda x: (x.T, torch.tensor([1]).int(), torch.tensor([1]).int()), "in rows of float32"),
    ("bias_tokens", lambda x: (x, torch.tensor([0]).int(), torch.tensor([0]).int(), torch.zeros(2)), "1 contiguous"),
    ("keep_tokens", lambda x: (x, torch.zeros(2, 2).int()), "2 contiguous numbers"),
]


@pytest.mark.parametrize("name, args, words", WRONG, ids=[f"{each[0]}: {each[2]}" for each in WRONG])
def test_what_does_not_fit_is_refused(name: str, args, words: str) -> None:  # type: ignore[no-untyped-def]
    logits = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=words):
        native(name)(*args(logits))
    assert not logits.any()


@pytest.mark.parametrize(
    "table, words",
    [
        ((16, 5, -1, 5), "rows must be 0 or more"),
        ((16, 5, 2, 0), "vocab must be"),
        ((16, 5, 2, 2**31), "vocab must be"),
        ((16, 4, 2, 5), "rows of logits overlap"),
    ],
)
def test_sizes_that_cannot_be_are_refused(table: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _cpu.greedy(_cpu.Logits(*table), 32, False, 16)
    with pytest.raises(ValueError, match="16 or 32 bits, not 8"):
        _cpu.greedy(_cpu.Logits(16, 5, 2, 5), 8, False, 16)
    with pytest.raises(ValueError, match="places must be 0 or more"):
        _cpu.ban_tokens(_cpu.Logits(16, 5, 2, 5), 16, 16, -1)
