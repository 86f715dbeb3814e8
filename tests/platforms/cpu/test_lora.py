"""Low-rank adapters beside a product: each instruction set against float64, and the bits of a token in any batch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.conformance.cases.model_ops import CASES
from quintet.conformance.cases.random_arguments import randn
from quintet.ops import Op
from quintet.platforms.cpu.arena import Arena, use_arena
from quintet.platforms.cpu.ops import lora
from tests.helpers.platforms.native import native

if reason := lora.probe():
    pytest.skip(reason, allow_module_level=True)

from quintet import _cpu

TYPES = (torch.float32, torch.bfloat16, torch.float16)
Args = tuple[Any, ...]
# columns (part, width), inputs: parts of several pieces of B, of a vector and less, in strips; a K of whole vectors
SHAPES = (
    (((0, 700), (1, 35), (2, 1)), 67),
    (((1, 33), (0, 130), (1, 96)), 256),
    (((0, 5),), 7),
)
RANK = 19


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = _cpu.threads()
    _cpu.set_threads(2)
    yield
    _cpu.set_threads(before)


def drawn(slots: Tensor, columns: tuple[tuple[int, int], ...], inputs: int, dtype: torch.dtype) -> Args:
    """Arguments with four adapters of ranks 0 to RANK in each part; what lies beyond a rank is NaN."""
    parts, width = 1 + max(part for part, _ in columns), sum(width for _, width in columns)
    y, x = randn(len(slots), width, dtype=dtype), randn(len(slots), inputs, dtype=dtype)
    lora_a = randn(4, parts, RANK, inputs, dtype=dtype, scale=inputs**-0.5)
    lora_b = randn(4, RANK, width, dtype=dtype)
    ranks = torch.tensor([[5, 0, RANK, 8], [5, 3, 0, 1], [5, RANK, 16, 7], [5, 0, 0, 0]], dtype=torch.int32)
    for adapter, (_, *used) in enumerate(ranks.tolist()):
        for part in range(parts):
            lora_a[adapter, part, used[part] :] = torch.nan
        for column, part in enumerate(part for part, width in columns for _ in range(width)):
            lora_b[adapter, used[part] :, column] = torch.nan
    return y, x, lora_a, lora_b, ranks, slots, 1, columns


def mixed(tokens: int) -> Tensor:
    """Slots of all adapters and of none, shuffled; the first and the last tokens have neighbours of one adapter."""
    slots = torch.randint(0, 5, (tokens,), generator=torch.Generator().manual_seed(tokens), dtype=torch.int32)
    slots[:7], slots[-3:] = 2, 1
    return slots


def run(args: Args) -> Tensor:
    """The native provider's result; y is kept."""
    result: Tensor = native("add_lora")(args[0].clone(), *args[1:])
    return result


def rows(args: Args, which: Any) -> Args:
    """The same arguments for some of the tokens."""
    y, x, lora_a, lora_b, ranks, slots, *rest = args
    return y[which], x[which], lora_a, lora_b, ranks, slots[which].contiguous(), *rest


def exact(args: Args) -> tuple[Tensor, Tensor]:
    """The result in float64, and the sum of its terms' sizes."""
    y, x, lora_a, lora_b, ranks, slots, first, columns = args
    total, size, start = y.double(), y.double().abs(), 0
    for part, width in columns:
        for token, slot in enumerate(slots.tolist()):
            if slot == 0:
                continue
            rank = int(ranks[slot - 1, first + part])
            a, b = lora_a[slot - 1, part, :rank].double(), lora_b[slot - 1, :rank, start : start + width].double()
            total[token, start : start + width] += (a @ x[token].double()) @ b
            size[token, start : start + width] += (a.abs() @ x[token].double().abs()) @ b.abs()
        start += width
    return total, size


def test_the_platform_serves_it_everywhere(isa: str) -> None:
    assert lora.probe() is None


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_instruction_set_equals_float64(isa: str, dtype: torch.dtype) -> None:
    """To half a unit of the type at the result's size, and what float32 sums of such terms may be off."""
    for columns, inputs in SHAPES:
        for slots in (mixed(23), torch.tensor([3], dtype=torch.int32), torch.full((4,), 1, dtype=torch.int32)):
            args = drawn(slots, columns, inputs, dtype)
            want, size = exact(args)
            got = run(args)
            assert got.dtype == dtype
            limit = size * 2**-24 * (inputs + RANK) ** 0.5 * 4 + want.abs() * torch.finfo(dtype).eps / 2 * 1.01 + 1e-7
            wrong = ~((got.double() - want).abs() <= limit)  # NaN is wrong, too
            assert not wrong.any(), f"{isa} {columns}: {int(wrong.sum())} numbers"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_cases_of_the_kit_are_the_specifications(isa: str, dtype: torch.dtype) -> None:
    for what, args in CASES["add_lora"](dtype):
        want = Op.registry["add_lora"].reference(*(a.float() if i < 4 else a for i, a in enumerate(args)))
        atol = (20 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps * float(want.abs().max())
        torch.testing.assert_close(
            run(args).float(), want, rtol=0, atol=atol, msg=lambda text, what=what: f"{what}: {text}"
        )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gains_and_rows_are_the_specifications(isa: str, dtype: torch.dtype) -> None:
    for what, (y, *rest) in CASES["scale_adapted"](dtype):
        got, want = native("scale_adapted")(y.clone(), *rest), Op.registry["scale_adapted"].reference(y.float(), *rest)
        torch.testing.assert_close(got.float(), want, rtol=torch.finfo(dtype).eps, atol=1e-6, msg=f"{what}, {isa}")
        without = rest[-1] == 0
        assert torch.equal(got[without], y[without])
    for what, args in CASES["adapter_rows"](dtype):
        assert torch.equal(native("adapter_rows")(*args), Op.registry["adapter_rows"].reference(*args)), what


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_token_has_the_same_bits_in_every_batch(isa: str, dtype: torch.dtype) -> None:
    """Alone; among some; with others' adapters changed; in another order; on one thread."""
    for columns, inputs in SHAPES:
        args = drawn(mixed(41), columns, inputs, dtype)
        whole = run(args)
        for first, count in [*((token, 1) for token in range(41)), (0, 2), (0, 3), (0, 5), (1, 7), (20, 21)]:
            part = slice(first, first + count)
            assert torch.equal(run(rows(args, part)), whole[part]), f"{columns}, tokens {first} + {count}"
        order = torch.randperm(41, generator=torch.Generator().manual_seed(1))
        assert torch.equal(run(rows(args, order)), whole[order])
        slots = args[5].clone()
        slots[1::2] = 1 + slots[1::2] % 4
        assert torch.equal(run((*args[:5], slots, *args[6:]))[::2], whole[::2])
        _cpu.set_threads(1)
        assert torch.equal(run(args), whole)
        _cpu.set_threads(2)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tokens_without_an_adapter_keep_their_bits(isa: str, dtype: torch.dtype) -> None:
    """NaNs with a payload and -0.0 too, beside tokens that have one; a number that is no slot is none."""
    args = drawn(torch.tensor([0, 1, 0, 2, 0, 5, -1], dtype=torch.int32), *SHAPES[0], dtype)
    bits = args[0].view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[[0, 2, 4, 5, 6], ::3] = torch.iinfo(bits.dtype).min  # -0.0
    bits[[0, 2, 4, 5, 6], 1::3] = torch.iinfo(bits.dtype).max - 5
    got = run(args).view(bits.dtype)
    assert torch.equal(got[[0, 2, 4, 5, 6]], bits[[0, 2, 4, 5, 6]])
    assert not torch.equal(got[1], bits[1])
    assert torch.equal(run((*args[:5], torch.zeros(7, dtype=torch.int32), *args[6:])).view(bits.dtype), bits)


def test_y_is_overwritten_and_returned_and_strides_change_nothing() -> None:
    args = drawn(mixed(12), *SHAPES[0], torch.bfloat16)
    y, x, *rest = args
    want = run(args)
    wide = torch.cat([y, y], 1)
    inside = wide[:, 3 : 3 + y.shape[1]]
    inside.copy_(y)
    got = native("add_lora")(inside, torch.cat([x, x], 1)[:, x.shape[1] :], *rest)
    assert got is inside and torch.equal(got, want)
    assert torch.equal(wide[:, :3], y[:, :3]) and torch.equal(wide[:, 3 + y.shape[1] :], y[:, 3:])
    assert torch.equal(native("add_lora")(y.T.contiguous().T, x.T.contiguous().T, *rest), want)


def test_no_tokens_give_no_tokens() -> None:
    args = drawn(mixed(12), *SHAPES[0], torch.float32)
    assert run(rows(args, slice(0, 0))).shape == (0, 736)


def test_what_is_not_finite_stays_in_its_token(isa: str) -> None:
    for dtype in TYPES:
        args = drawn(torch.tensor([1, 3, 1, 1, 3], dtype=torch.int32), *SHAPES[1], dtype)
        clean = run(args)
        args[1][2, 5] = torch.nan
        got = run(args)
        assert got[2, 33:163].isfinite().all() and got[2, :33].isnan().all()  # the first part has rank 0
        assert torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_a_recorded_call_reads_slots_ranks_and_adapters_anew() -> None:
    args = drawn(mixed(9), *SHAPES[0], torch.bfloat16)
    kept, y = [each.clone() if isinstance(each, Tensor) else each for each in args], args[0].clone()
    graph = _cpu.Graph()
    with use_arena(Arena()):
        graph.begin()
        native("add_lora")(*kept)
        graph.end()
    assert len(graph) == 1
    for step in range(3):
        kept[0].copy_(y)
        kept[5].copy_(mixed(9).roll(step + 1))
        kept[4][2] = torch.tensor([5, step, 4 * step, 7])
        kept[2][1, 0, 0] = step
        want = native("add_lora")(y.clone(), *kept[1:])
        graph.run()
        assert torch.equal(kept[0], want), step


def test_few_tokens_take_one_job() -> None:
    args = drawn(mixed(16), *SHAPES[0], torch.bfloat16)
    before = _cpu.shared_jobs()
    run(args)
    assert _cpu.shared_jobs() - before <= 1


def test_arguments_that_do_not_fit_are_refused() -> None:
    y, x, lora_a, lora_b, ranks, slots, first, columns = drawn(mixed(12), *SHAPES[0], torch.bfloat16)
    for wrong, message in (
        ((y, x[:, 1:], lora_a, lora_b, ranks, slots, first, columns), "do not fit x"),
        ((y, x, lora_a.float(), lora_b, ranks, slots, first, columns), "do not fit x"),
        ((y, x, lora_a, lora_b[:, :, 1:], ranks, slots, first, columns), "do not fit x"),
        ((y, x, lora_a, lora_b.mT.contiguous().mT, ranks, slots, first, columns), "contiguous"),
        ((y[1:], x, lora_a, lora_b, ranks, slots, first, columns), "does not fit x"),
        ((y.float(), x, lora_a, lora_b, ranks, slots, first, columns), "does not fit x"),
        ((y, x, lora_a, lora_b, ranks, slots, first, columns[:2]), "does not fit x"),
        ((y, x, lora_a, lora_b, ranks, slots, first, ((3, 736),)), "parts 0 to 2"),
        ((y, x, lora_a, lora_b, ranks, slots[1:], first, columns), "12 tokens"),
        ((y, x, lora_a, lora_b, ranks[1:], slots, first, columns), "4 adapters"),
        ((y, x, lora_a, lora_b, ranks.long(), slots, first, columns), "int32"),
        ((y, x, lora_a, lora_b, ranks, slots.long(), first, columns), "int32"),
        ((y, x, lora_a, lora_b, ranks, slots, 2, columns), "no columns 2 to 4"),
    ):
        with pytest.raises(ValueError, match=message):
            native("add_lora")(*wrong)
    doubles = (each.double() for each in (y, x, lora_a, lora_b))
    with pytest.raises(ValueError, match="float64"):
        native("add_lora")(*doubles, ranks, slots, first, columns)
