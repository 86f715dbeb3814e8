"""What stands between products and attention: each instruction set against float64, and the bits of rows anywhere."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.conformance.cases.random_arguments import randn
from quintet.interface.types import HeadNorms
from quintet.ops import Op, bind
from quintet.ops.activation import KINDS
from quintet.platforms.cpu.arena import Arena, use_arena
from quintet.platforms.cpu.ops import elementwise as native_elementwise
from quintet.platforms.cpu.ops import embedding as native_embedding
from quintet.platforms.cpu.ops import norm as native_norm
from quintet.platforms.cpu.ops import rotary as native_rotary
from quintet.platforms.cpu.ops.extension import missing
from quintet.platforms.cpu.providers import PRIORITY
from tests.helpers.platforms.native import native

if reason := missing("rms_norm"):
    pytest.skip(reason, allow_module_level=True)

from quintet import _cpu

TYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = TYPES[1:]
WIDTHS = (1, 3, 4, 8, 15, 16, 17, 63, 64, 65, 128, 1111)  # around the vectors, and the chains of a sum
TOKENS = 70


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = _cpu.threads()
    _cpu.set_threads(2)
    yield
    _cpu.set_threads(before)


def turned_by(dim: int, turned: int, dtype: torch.dtype, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k as slices of one product, a table, positions."""
    fused = randn(tokens, 7 * dim, dtype=dtype)
    q, k, _ = (each.reshape(tokens, -1, dim) for each in fused.split([4 * dim, 2 * dim, dim], dim=-1))
    angles = torch.arange(90)[:, None] * torch.linspace(0.01, 1, turned // 2)
    positions = (torch.arange(tokens, dtype=torch.int32) * 37) % 90
    return q, k, torch.cat([angles.cos(), angles.sin()], -1), positions.int()


def test_every_instruction_set_passes_its_probe(isa: str) -> None:
    assert [each.probe() for each in (native_elementwise, native_embedding, native_norm, native_rotary)] == [None] * 4
    assert native_rotary.probe_pairs() is None


@pytest.fixture
def relu3(monkeypatch: pytest.MonkeyPatch) -> str:
    """An activation that quintet has and the extension lacks."""
    monkeypatch.setitem(KINDS, "relu3", lambda x: x.relu().pow(3))
    native_elementwise.is_missing.cache_clear()
    return "relu3"


def test_an_activation_without_a_kernel_takes_no_other_along(relu3: str, caplog: pytest.LogCaptureFixture) -> None:
    ops = bind(PRIORITY)
    served = {name: ops.choice(name).provider for name in ("activate", "gated", "experts", "add", "scale", "softcap")}
    assert set(served.values()) == {"native"}, served
    x = randn(5, 74, dtype=torch.float32)
    for _ in range(2):
        assert torch.equal(ops.activate(x, relu3), x.relu().pow(3))
        assert torch.equal(ops.gated(x, relu3), x[:, :37].relu().pow(3) * x[:, 37:])
    (said,) = [each.message for each in caplog.records]
    assert said.startswith("activation relu3: quintet._cpu has no kernel for it"), "once"


# ----------------------------------------------------------------------------------------------------------- exactness


def exact_activation(kind: str, x: Tensor) -> Tensor:
    x = x.double()
    if kind == "relu":
        return x.clamp(min=0)
    if kind == "relu2":
        return x.clamp(min=0).square()
    if kind == "silu":
        return x * x.sigmoid()
    if kind == "gelu":
        return x * (-x / math.sqrt(2)).erfc() / 2
    return x * (math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)).sigmoid()


@pytest.mark.parametrize("kind", KINDS)
def test_activations_equal_float64(isa: str, kind: str) -> None:
    """To 8 units in the last place of float32, or 2e-7 where the result is small beside x."""
    near, far = torch.linspace(-6, 6, 300_001), torch.linspace(-95, 95, 100_001)
    x = torch.cat([near, far, randn(100_000, dtype=torch.float32, scale=1e-3), torch.tensor([0.0, 1e-38, 3e38, -3e38])])
    for dtype in TYPES:
        given = x[x.abs() < torch.finfo(dtype).max].to(dtype)
        want, got = exact_activation(kind, given), native("activate")(given, kind)
        assert got.dtype == dtype
        limit = torch.minimum(8 * 2**-23 * want.abs() + 2e-7 * given.double().abs(), 4e-7 * given.double().abs())
        limit += want.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        overflown = (want > torch.finfo(dtype).max) & (got == torch.inf)
        wrong = ~(((got.double() - want).abs() <= limit) | overflown)  # NaN is wrong, too
        assert not wrong.any(), f"{isa} {dtype}: {kind}({given[wrong][0]}) gave {got[wrong][0]}, not {want[wrong][0]}"


def test_activations_are_right_to_some_units_in_the_last_place(isa: str) -> None:
    """Also where the result is small: there the sum 1 + tanh or 1 + erf would have lost it."""
    gelu = 80 if isa == "baseline" else 8  # without a fused multiply-add, the rounding of x * x stays in
    for kind, low, units in (
        ("silu", -80, 4),
        ("gelu", -12, gelu),
        ("gelu_new", -5, 50),
    ):  # 50: the exponent's rounding
        x = torch.linspace(low, 5, 200_001)
        want = exact_activation(kind, x)
        worst = ((native("activate")(x, kind).double() - want).abs() / (want.abs() * 2**-23 + 1e-30)).max()
        assert worst <= units, f"{kind} is off by {worst:.1f}"


def test_softcap_equals_float64(isa: str) -> None:
    for dtype, cap in itertools.product(TYPES, (1.0, 30.0)):
        x = torch.linspace(-200, 200, 100_001).to(dtype)
        want = cap * (x.double() / cap).tanh()
        off = (native("softcap")(x.clone(), cap).double() - want).abs()
        assert (off <= want.abs() * (4 * 2**-23 + torch.finfo(dtype).eps / 2)).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sums_and_scalings_have_the_specifications_bits(isa: str, dtype: torch.dtype) -> None:
    """With every half-precision number among them: infinities, subnormals, ties."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype) if dtype in HALVES else randn(60_001, dtype=dtype)
    for shift in (1, 77, 4099, 30_000):
        y = x.roll(shift)
        torch.testing.assert_close(native("add")(x.clone(), y), x + y, rtol=0, atol=0, equal_nan=True)
    for factor in (0.3, -7.0, 1e-3):
        torch.testing.assert_close(native("scale")(x.clone(), factor), x * factor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norms_equal_float64(isa: str, dtype: torch.dtype) -> None:
    """To the roundings of the type that the specification has, and those of float32."""
    eps = torch.finfo(dtype).eps
    for width, offset in itertools.product(WIDTHS, (0.0, 1.0)):
        x, weight, bias = (randn(*s, dtype=dtype) for s in ((9, width), (width,), (width + 1,)))
        x, bias = x + 3, bias[1:].contiguous()
        y = x.double()
        want = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (offset + weight.double())
        got = native("rms_norm")(x, weight, 1e-5, offset)
        assert got.dtype == dtype
        assert ((got.double() - want).abs() <= want.abs() * (1.01 * eps + 6 * 2**-23) + 1e-7).all(), (width, offset)
        for shift in (bias, None):
            y = x.double() - x.double().mean(-1, keepdim=True)
            y = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
            want = y if shift is None else y + shift.double()
            got = native("layer_norm")(x, weight, shift, 1e-5)
            assert ((got.double() - want).abs() <= want.abs() * 0.51 * eps + 4e-6).all(), width


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_sum_is_rounded_before_it_is_normalised(isa: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        x, residual = randn(9, width, dtype=dtype), randn(width, 9, dtype=dtype, scale=3.0).reshape(9, width)
        weight = randn(width, dtype=dtype)
        out, total = native("add_rms_norm")(x, residual, weight, 1e-5, 0.0)
        assert torch.equal(total, x + residual)
        assert torch.equal(out, native("rms_norm")(total, weight, 1e-5, 0.0))


def test_a_normalised_number_is_rounded_before_its_weight(isa: str) -> None:
    """1 + 3/256 becomes 1 + 1/64 in bfloat16, and 3 times that a number that 3 * (1 + 3/256) does not become."""
    x = torch.tensor([[1.0, 1.015625]], dtype=torch.bfloat16)
    weight = torch.full((2,), 3.0, dtype=torch.bfloat16)
    for offset in (0.0, 1.0):
        want = Op.registry["rms_norm"].reference(x, weight, 0.0, offset)
        assert torch.equal(native("rms_norm")(x, weight, 0.0, offset), want)
    row = randn(200, 128, dtype=torch.bfloat16)
    ones = torch.full((128,), 1.0078125, dtype=torch.bfloat16)
    exact = row.double() * (row.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    twice = exact.to(torch.bfloat16).double() * ones.double()  # rounded once before, once after
    assert (native("rms_norm")(row, ones, 1e-6, 0.0) != twice.to(torch.bfloat16)).float().mean() < 1e-3
    assert (exact * ones.double()).to(torch.bfloat16).ne(twice.to(torch.bfloat16)).float().mean() > 1e-2


def test_gated_rounds_the_activation_first(isa: str) -> None:
    for dtype, kind in itertools.product(TYPES, KINDS):
        for tokens, width in ((1, 1), (3, 37), (5, 1111), (40, 3000)):
            x = randn(tokens, 2 * width, dtype=dtype, scale=3.0)
            gate, up = x.chunk(2, dim=-1)
            assert torch.equal(native("gated")(x, kind), native("activate")(gate.contiguous(), kind) * up)


@pytest.mark.parametrize("op", ["rotary", "pair_rotary"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_heads_are_turned_as_the_specification_does(isa: str, dtype: torch.dtype, op: str) -> None:
    """Half-precision bit for bit: cosines, sines and products are rounded there too."""
    for dim, turned in ((8, 8), (64, 64), (80, 32), (24, 10), (6, 2), (128, 128)):
        q, k, table, positions = turned_by(dim, turned, dtype)
        exact = torch.float64 if dtype == torch.float32 else dtype
        wants = Op.registry[op].reference(q.to(exact), k.to(exact), table, positions)
        for got, want in zip(native(op)(q, k, table, positions), wants, strict=True):
            assert got.dtype == dtype and got.is_contiguous()
            if dtype == torch.float32:
                torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
            else:
                assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_neighbours_are_turned_as_the_specification_does(isa: str, dtype: torch.dtype) -> None:
    for dim, turned in ((8, 8), (64, 64), (80, 32), (24, 10), (6, 2), (200, 192)):
        q, k, table, positions = turned_by(dim, turned, dtype)
        exact = torch.float64 if dtype == torch.float32 else dtype
        wants = Op.registry["pair_rotary"].reference(q.to(exact), k.to(exact), table, positions)
        for got, want in zip(native("pair_rotary")(q, k, table, positions), wants, strict=True):
            torch.testing.assert_close(got.to(exact), want, rtol=0, atol=2e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norm_and_turn_at_once_equal_one_after_the_other(isa: str, dtype: torch.dtype) -> None:
    for (dim, turned), offset in itertools.product(((8, 8), (80, 32), (128, 128)), (0.0, 1.0)):
        q, k, table, positions = turned_by(dim, turned, dtype)
        norms = HeadNorms(randn(dim, dtype=dtype), randn(dim + 1, dtype=dtype)[:dim].contiguous(), 1e-6, offset)
        normed = [native("rms_norm")(x, w, 1e-6, offset) for x, w in ((q, norms.q), (k, norms.k))]
        wants = native("rotary")(*normed, table, positions)
        gots = native("norm_rotary")(q, k, norms, table, positions)
        assert all(torch.equal(got, want) for got, want in zip(gots, wants, strict=True))


def test_rows_are_looked_up_bit_for_bit() -> None:
    for dtype, width in itertools.product(TYPES, (1, 33, 1024)):
        table = randn(50, 2 * width, dtype=dtype)[:, width:]
        ids = (torch.arange(301, dtype=torch.int32) * 17) % 50
        assert torch.equal(native("embedding")(ids, table, 5, False), table[ids.long()])
        part = native("embedding")(ids, table[:20], 10, True)
        inside = (ids >= 10) & (ids < 30)
        assert torch.equal(part[inside], table[ids[inside].long() - 10]) and not part[~inside].any()


# ---------------------------------------------------------------------------------------------------------- invariance

Rowwise = Callable[[slice], tuple[Tensor, ...]]


def rowwise(dtype: torch.dtype, width: int) -> Iterator[tuple[str, Rowwise]]:
    """Each op as a function of the rows that it is given of one batch."""
    x, y, wide = (randn(*s, dtype=dtype) for s in ((TOKENS, width), (TOKENS, width + 1), (TOKENS, 2 * width)))
    y, weight = y[:, 1:].contiguous(), randn(width, dtype=dtype)
    q, k, table, positions = turned_by(width + width % 2, 2 * (width // 3), dtype)
    norms = HeadNorms(*(randn(q.shape[2], dtype=dtype) for _ in range(2)), 1e-6, 0.0)
    ids = positions.clone() % TOKENS
    yield "rms_norm", lambda at: (native("rms_norm")(x[at], weight, 1e-6, 0.0),)
    yield "rms_norm of heads", lambda at: (native("rms_norm")(q[at], norms.q, 1e-6, 1.0),)
    yield "add_rms_norm", lambda at: native("add_rms_norm")(x[at], y[at], weight, 1e-6, 0.0)
    yield "layer_norm", lambda at: (native("layer_norm")(x[at], weight, weight, 1e-6),)
    yield "rotary", lambda at: native("rotary")(q[at], k[at], table, positions[at])
    yield "pair_rotary", lambda at: native("pair_rotary")(q[at], k[at], table, positions[at])
    yield "norm_rotary", lambda at: native("norm_rotary")(q[at], k[at], norms, table, positions[at])
    yield "embedding", lambda at: (native("embedding")(ids[at], x, 0, False),)
    yield "add", lambda at: (native("add")(x[at].clone(), y[at]),)
    yield "scale", lambda at: (native("scale")(x[at].clone(), 0.7),)
    yield "softcap", lambda at: (native("softcap")(x[at].clone(), 2.0),)
    for kind in KINDS:
        yield kind, lambda at, kind=kind: (native("activate")(x[at], kind),)  # type: ignore[misc]
        yield f"gated {kind}", lambda at, kind=kind: (native("gated")(wide[at], kind),)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch_on_any_threads(isa: str, dtype: torch.dtype) -> None:
    parts = [slice(first, first + count) for first, count in ((0, 1), (13, 1), (69, 1), (1, 16), (3, 64), (35, 35))]
    for width in (2, 17, 129, 1111):
        for what, of in rowwise(dtype, width):
            _cpu.set_threads(1)
            whole = of(slice(0, TOKENS))
            for count in (1, 2, 3):
                _cpu.set_threads(count)
                for part in [slice(0, TOKENS), *parts]:
                    for got, want in zip(of(part), whole, strict=True):
                        assert torch.equal(got, want[part]), f"{what}, {width} wide, {part}, {count} threads"


def test_strided_rows_are_as_good_as_contiguous_ones(isa: str) -> None:
    for dtype in TYPES:
        q, k, table, positions = turned_by(24, 16, dtype)
        weight, wide = randn(24, dtype=dtype), randn(9, 400, dtype=dtype)
        assert torch.equal(native("rms_norm")(q, weight, 0.0, 0.0), native("rms_norm")(q.clone(), weight, 0.0, 0.0))
        flat = randn(96, dtype=dtype)
        got = native("rms_norm")(q.flatten(1), flat, 0.0, 0.0)
        assert torch.equal(got, native("rms_norm")(q.flatten(1).contiguous(), flat, 0.0, 0.0))
        for a, b in zip(
            native("rotary")(q, k, table, positions),
            native("rotary")(q.contiguous(), k.transpose(0, 1).contiguous().transpose(0, 1), table, positions),
            strict=True,
        ):
            assert torch.equal(a, b)
        part = wide[:, 100:300]
        assert torch.equal(native("gated")(part, "silu"), native("gated")(part.contiguous(), "silu"))
        assert torch.equal(native("activate")(part, "silu"), native("activate")(part.contiguous(), "silu"))
        assert torch.equal(native("add")(part, part), native("add")(part.contiguous(), part.contiguous()))


# ------------------------------------------------------------------------------------------------- memory and refusals


def test_a_tensor_of_its_own_is_overwritten_and_a_part_of_one_is_not() -> None:
    for name, more in (("add", (torch.ones(4, 6),)), ("scale", (2.0,)), ("softcap", (3.0,))):
        x = randn(4, 6, dtype=torch.float32)
        assert native(name)(x, *more).data_ptr() == x.data_ptr()
        bigger = randn(8, 6, dtype=torch.float32)
        before = bigger.clone()
        native(name)(bigger[2:6], *more)
        assert torch.equal(bigger, before)
    x = randn(4, 6, dtype=torch.float32)
    before = x.clone()
    native("activate")(x, "silu")
    native("add_rms_norm")(x, x, torch.ones(6), 0.0, 0.0)
    assert torch.equal(x, before)


def test_recorded_calls_run_again_on_new_numbers(isa: str) -> None:
    def step() -> tuple[Tensor, ...]:
        rows = native("embedding")(ids, table, 0, False)
        normed, total = native("add_rms_norm")(rows, x, weight, 1e-6, 0.0)
        q, k = normed.view(TOKENS, -1, 16).split([3, 1], dim=1)
        turned = native("norm_rotary")(q, k, HeadNorms(weight[:16], weight[16:32], 1e-6, 0.0), angles, positions)
        activated = native("gated")(native("scale")(native("layer_norm")(total, weight, None, 1e-6), 3.0), "silu")
        return *turned, native("softcap")(native("add")(activated, activated), 2.0)

    *_, angles, positions = turned_by(16, 16, torch.bfloat16)
    ids, table, x = positions.clone() % 50, randn(50, 64, dtype=torch.bfloat16), randn(TOKENS, 64, dtype=torch.bfloat16)
    weight, graph, arena = randn(64, dtype=torch.bfloat16), _cpu.Graph(), Arena()
    with use_arena(arena):
        graph.begin()
        results = step()
        graph.end()
    x.copy_(randn(64, TOKENS, dtype=torch.bfloat16).reshape(TOKENS, 64))
    ids.copy_(ids.flip(0))
    graph.run()
    assert len(graph) == 8
    assert all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))


def test_no_rows_give_no_rows() -> None:
    for dtype in TYPES:
        x, weight, ids = torch.empty(0, 8, dtype=dtype), randn(8, dtype=dtype), torch.empty(0, dtype=torch.int32)
        assert (
            native("rms_norm")(x, weight, 0.0, 0.0).shape == native("layer_norm")(x, weight, None, 0.0).shape == (0, 8)
        )
        assert native("gated")(x, "silu").shape == (0, 4) and native("activate")(x, "gelu").shape == (0, 8)
        heads = x.view(0, 2, 4)
        assert native("rotary")(heads, heads, torch.ones(3, 4), ids)[0].shape == (0, 2, 4)
        assert native("embedding")(ids, weight[None], 0, False).shape == (0, 8)


def test_positions_and_ids_outside_of_their_tables_are_refused() -> None:
    q, k, table, positions = turned_by(8, 8, torch.float32, 4)
    for wrong in (90, -1):
        positions[2] = wrong
        with pytest.raises(ValueError, match=f"position {wrong} is outside"):
            native("rotary")(q, k, table, positions)
        with pytest.raises(ValueError, match=f"id {wrong} is outside"):
            native("embedding")(positions, table, 0, False)
    with pytest.raises(ValueError, match="int32"):
        native("embedding")(positions.long(), table, 0, False)


def test_what_does_not_fit_is_refused() -> None:
    x, weight = randn(4, 8, dtype=torch.bfloat16), randn(8, dtype=torch.bfloat16)
    q, k, table, positions = turned_by(8, 8, torch.float32, 4)
    calls: list[tuple[str, tuple[Any, ...], str]] = [
        ("rms_norm", (x, weight[1:], 0.0, 0.0), "does not fit"),
        ("rms_norm", (x, weight.float(), 0.0, 0.0), "does not fit"),
        ("rms_norm", (x.double(), weight.double(), 0.0, 0.0), "float64"),
        ("add_rms_norm", (x, x[1:], weight, 0.0, 0.0), "do not match"),
        ("layer_norm", (x, weight, weight[1:], 0.0), "does not fit"),
        ("add", (x, x.float()), "do not match"),
        ("gated", (x[:, 1:], "silu"), "odd"),
        ("rotary", (q, k, torch.ones(9, 10), positions), "do not fit"),
        ("rotary", (q, k, table, positions[1:]), "do not fit"),
        ("rotary", (q, k, table.double(), positions), "float32"),
        ("norm_rotary", (q, k, HeadNorms(weight, weight, 0.0, 0.0), table, positions), "does not fit"),
    ]
    for name, args, message in calls:
        with pytest.raises(ValueError, match=message):
            native(name)(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_take_the_places_of_others_wherever_they_lie(dtype: torch.dtype) -> None:
    place, choose = (Op.registry[name].providers["native"] for name in ("place_rows", "choose_rows"))
    rng = torch.Generator().manual_seed(3)
    for tokens, rows, width in ((1, 1, 1), (7, 3, 12), (300, 40, 129), (0, 2, 5)):
        x, given = torch.randn(tokens, width, generator=rng).to(dtype), torch.randn(rows, width, generator=rng)
        y, places = x * 2 + 1, torch.randint(-1, rows, (tokens,), generator=rng, dtype=torch.int32)
        for table in (
            given,
            given.to(dtype),
            given.to(dtype).T.contiguous().T,
            torch.cat([given, given], 1)[:, :width],
        ):
            assert torch.equal(place(x, table, places), Op.registry["place_rows"].reference(x, table, places))
        assert torch.equal(
            place(x[:, 1:], given[:, 1:], places),
            torch.where(places[:, None] < 0, x, given.to(dtype)[places.long()])[:, 1:],
        )
        assert torch.equal(choose(x, y, places), torch.where(places[:, None] < 0, x, y))
        assert torch.equal(choose(x, y, places + 1000), y), "a place is no number of a row here"
    with pytest.raises(ValueError, match="place 3 is outside of the 3 rows"):
        place(torch.zeros(2, 4, dtype=dtype), torch.zeros(3, 4), torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match="do not fit"):
        place(torch.zeros(2, 4, dtype=dtype), torch.zeros(3, 5), torch.tensor([0, 1], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_stand_side_by_side_wherever_they_lie(dtype: torch.dtype) -> None:
    x, y = torch.randn(7, 12).to(dtype), torch.randn(5, 7).to(dtype)
    joined = Op.registry["beside"].providers["native"]
    for a, b in ((x, y.T), (x[:, 3:8], x[:, :1]), (x[:0], y.T[:0])):
        assert torch.equal(joined(a, b), torch.cat([a, b], -1))
    with pytest.raises(ValueError, match="no rows in common"):
        joined(x, y)


@pytest.mark.parametrize("kind", [-1, 3])
def test_types_that_there_are_not_are_refused(kind: int) -> None:
    """Before anything is read: the addresses are none."""
    message = f"kind .* must be 0 to 2, not {kind}"
    with pytest.raises(ValueError, match=message):
        _cpu.scale_rows(kind, 0, 0, 0, 0, 1, 1)
    with pytest.raises(ValueError, match=message):
        _cpu.route(kind, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, False)


@pytest.mark.parametrize("width", [1, 5, 17, 19, 64])
def test_nothing_is_written_behind_the_rows(width: int) -> None:
    x, factors = randn(3, width, dtype=torch.float32), torch.tensor([2.0, -1.0, 0.5])
    out = torch.full((3 * width + 40,), 7.0)
    _cpu.scale_rows(0, out.data_ptr(), x.data_ptr(), factors.data_ptr(), 3, width, width)
    torch.testing.assert_close(out[: 3 * width].view(3, width), x * factors[:, None])
    assert (out[3 * width :] == 7.0).all()
