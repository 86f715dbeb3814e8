"""The kit's sections of attention and of the cache name the clause that a platform breaks, and where."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quintet.conformance import kit
from quintet.conformance.formats import FLOATS, through_cache
from quintet.conformance.harness.cache_round_trip import require_same
from quintet.interface.platform import Device, Mixer, State
from quintet.interface.types import AttentionSpec, Layout, StepContext
from quintet.ops import Op
from quintet.ops.attention import PagedAttention
from quintet.platforms.cpu.platform import CPU, CPUDevice
from tests.helpers.platforms.planted import Planted, first_failure

# ------------------------------------------------------------------------------------------------ attention


class Attends(CPU):
    """The platform with another attention."""

    def mixer(self, spec: AttentionSpec, ops: Any, rank: int) -> Mixer:
        return self._made(spec, ops)

    def _made(self, spec: AttentionSpec, ops: Any) -> Mixer:
        raise NotImplementedError


def attends(made: Callable[[AttentionSpec, Any], Mixer]) -> type[CPU]:
    return type("Planted", (Attends,), {"_made": lambda self, spec, ops: made(spec, ops)})


def takes(**changes: Callable[[AttentionSpec], Any]) -> type[CPU]:
    """One that has taken its layer for another."""
    return attends(
        lambda spec, ops: PagedAttention(replace(spec, **{name: of(spec) for name, of in changes.items()}), ops)
    )


@dataclass
class Around(Mixer):
    """Another attention, with other arguments or results."""

    inner: Mixer
    before: Callable[[list[Any]], list[Any]] = lambda args: args
    after: Callable[[Tensor], Tensor] = lambda out: out

    def __post_init__(self) -> None:
        self.layouts = self.inner.layouts

    def plan(self, batch: Any, group: Any) -> Any:
        return self.inner.plan(batch, group)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor | None, state: State, context: StepContext, sinks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        out, state = self.inner(*self.before([q, k, v, state, context, sinks]))
        return self.after(out), state


def around(before: Callable[[list[Any]], list[Any]]) -> type[CPU]:
    return attends(lambda spec, ops: Around(PagedAttention(spec, ops), before))


def _forgets_sinks(args: list[Any]) -> list[Any]:
    return [*args[:5], None]


def _stale_table(args: list[Any]) -> list[Any]:
    """Of every request but the first, the first one's pages."""
    context = args[4]
    table = context.group.block_table[:1].expand_as(context.group.block_table).contiguous()
    return [*args[:4], context._replace(group=context.group._replace(block_table=table)), args[5]]


def _swapped(args: list[Any]) -> list[Any]:
    return [args[0], args[2], args[1], *args[3:]]


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        (takes(window=lambda spec: spec.window and spec.window + 1), "window in float32: 6/3 heads of 16"),
        (takes(chunk=lambda spec: spec.chunk and 2 * spec.chunk), "chunk in "),
        (takes(softcap=lambda spec: None), "soft-cap in float32: "),
        (takes(alibi=lambda spec: spec.alibi and spec.alibi[::-1]), "alibi in float32: "),
        (takes(window=lambda spec: spec.window or 2048), "a request of 2200 tokens: "),
        (around(_forgets_sinks), "sinks in float32: "),
        (around(_stale_table), "plain in float32: 6/3 heads of 16 in float32, pages of 16, chunks, "),
        (around(_swapped), "plain in float32: 6/3 heads of 16 in float32, pages of 16, a long prompt, request 0 "),
        (takes(scale=lambda spec: 0.25), "plain in float32: 5/1 heads of 64 in "),
    ],
    ids=["window", "chunk", "soft-cap", "slopes", "long", "sinks", "table", "K for V", "scale"],
)
def test_attention_to_something_else_is_found(platform: type[CPU], said: str) -> None:
    found = first_failure("attention.specification", Planted(platform), said.partition(":")[0])
    assert found.startswith(said)


def test_a_slot_that_is_lost_where_a_request_decodes_alone_is_found() -> None:
    """The first one of its window, where that begins with a page; beside others nothing is lost."""

    def losing(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        first = int(context.batch.positions[0]) - (spec.window or 0) + 1
        if len(q) == 1 and (spec.window or 0) > 1 and first > 0 and first % spec.page_size == 0:
            spec = replace(spec, window=(spec.window or 0) - 1)
        out: Tensor = Op.registry["paged_attention"].reference(q, kv, context, spec, sinks)
        return out

    said = first_failure(
        "attention.specification", Planted(providers={"paged_attention": losing}), "one token at a time"
    )
    assert "a window of 16, one request alone, from token 31 on" in said


def test_scores_that_overflow_are_found() -> None:
    """Where a kernel bounds them, for want of taking off the largest before exp()."""
    big = takes(softcap=lambda spec: 60.0)
    assert first_failure("attention.specification", Planted(big), "large scores").startswith(
        "large scores in float32: "
    )


def test_requests_beyond_what_a_kernel_takes_at_once_are_found() -> None:
    def few(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        out: Tensor = Op.registry["paged_attention"].reference(q, kv, context, spec, sinks)
        return torch.where(context.batch.token_to_seq[:, None, None] < 32, out, 0)

    found = first_failure("attention.specification", Planted(providers={"paged_attention": few}), "40 requests")
    assert "a crowd, first chunks, request 32 from token 0 on" in found


def test_what_a_page_held_before_is_found() -> None:
    """Weights of 0 times what is no number."""

    def leaking(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        out: Tensor = Op.registry["paged_attention"].reference(q, kv, context, spec, sinks)
        rows = context.group.block_table[context.batch.token_to_seq.long()].long()
        return out + 0 * kv[rows].float().sum((1, 2, 4)).repeat_interleave(spec.heads // spec.kv_heads, 1)[..., :1] * 0

    assert "in pages that held NaN" in first_failure("attention.stale", Planted(providers={"paged_attention": leaking}))


def test_what_stands_behind_a_window_is_found() -> None:
    """Weights of 0 times what is no number, on page 0."""

    def leaking(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        out: Tensor = Op.registry["paged_attention"].reference(q, kv, context, spec, sinks)
        behind = (context.group.block_table == 0).any(1)[context.batch.token_to_seq.long()]
        return out + torch.where(behind, 0 * kv[0].float().sum(), 0)[:, None, None]

    said = first_failure("attention.window", Planted(providers={"paged_attention": leaking}))
    assert "page 0 holds NaN, from token " in said


def test_a_window_that_is_kept_too_short_is_found() -> None:
    short = takes(window=lambda spec: spec.window and max(1, spec.window - 1))
    assert "page 0 holds NaN, from token " in first_failure("attention.window", Planted(short))


def test_neighbours_in_a_step_are_found() -> None:
    def together(q: Tensor, k: Tensor, v: Tensor, batch: Any, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        alone = batch._replace(token_to_seq=torch.zeros_like(batch.token_to_seq))
        out: Tensor = Op.registry["attention"].reference(q, k, v, alone, spec, sinks)
        return out

    assert "request 1 of [1, 30] tokens" in first_failure("attention.plain", Planted(providers={"attention": together}))


def test_a_direction_that_is_forgotten_is_found() -> None:
    forgets = takes(causal=lambda spec: True)
    assert "both ways, over pages: " in first_failure("attention.plain", Planted(forgets), "both ways, over")


def test_values_from_elsewhere_in_keys_are_found() -> None:
    def turned(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        both = torch.cat([kv, kv.flip(-1)], 1)
        own = replace(spec, shared=0)
        out: Tensor = Op.registry["paged_attention"].reference(q, both, context, own, sinks)
        return out[..., : spec.value_dim]

    assert "V in K, in float32: " in first_failure("attention.shared", Planted(providers={"paged_attention": turned}))


@pytest.mark.parametrize("clause", ["attention.window", "attention.plain", "attention.shared", "attention.stale"])
def test_attention_in_torch_alone_keeps_the_clauses(clause: str) -> None:
    """What serves where the compiled extension is not."""
    order = {**CPU.op_priority, "paged_attention": ("torch",), "write_kv": ()}
    assert kit.first_failure(Planted(type("Torch", (CPU,), {"op_priority": order})), clause) is None


def _refuses(spec: AttentionSpec, ops: Any, reasons: Sequence[str], joined: Callable[[Sequence[str]], str]) -> Mixer:
    if reasons:
        raise ValueError(joined(reasons))
    return PagedAttention(spec, ops)


def _lacking(spec: AttentionSpec) -> list[str]:
    return ["no slopes"] * (spec.alibi is not None) + ["no soft-cap"] * (spec.softcap is not None)


@pytest.mark.parametrize(
    ("joined", "said"),
    [
        (lambda reasons: reasons[0], "a layer with softcap and alibi is refused with 'no slopes'"),
        (lambda reasons: "", "is refused without a reason"),
    ],
    ids=["one reason", "no reason"],
)
def test_a_refusal_that_does_not_say_all_is_found(joined: Callable[[Sequence[str]], str], said: str) -> None:
    platform = attends(lambda spec, ops: _refuses(spec, ops, _lacking(spec), joined))
    assert said in first_failure("attention.refusal", Planted(platform))


def test_a_crash_is_no_refusal() -> None:
    def made(spec: AttentionSpec, ops: Any) -> Mixer:
        if spec.head_dim % 16:
            raise KeyError(spec.head_dim)
        return PagedAttention(spec, ops)

    assert "heads of 8 numbers in float32: " in first_failure("attention.refusal", Planted(attends(made)))


# ------------------------------------------------------------------------------------------------ cache


def test_layers_that_look_into_another_groups_table_are_found() -> None:
    """Every layer takes the books of the first group."""
    first = around(lambda args: [*args[:4], args[4]._replace(group=args[4].batch.groups[0]), args[5]])
    assert "request 0 from token " in first_failure("cache.groups", Planted(first))


class OnePageLess(CPUDevice):
    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        return super().allocate(layouts, units - 1)


class OpensIt(CPU):
    def open(self, rank: int) -> Device:
        super().open(rank)
        return OnePageLess()


def _small_pages(spec: AttentionSpec, ops: Any) -> Mixer:
    made = PagedAttention(spec, ops)
    made.layouts = (replace(made.layouts[0], shape=made.layouts[0].shape[:-1]),)
    return made


@pytest.mark.parametrize(
    ("platform", "said"),
    [(OpensIt, "5 pages for two layers are [(4, "), (attends(_small_pages), "its keys and values alone are")],
    ids=["allocated", "described"],
)
def test_pages_that_are_not_as_described_are_found(platform: type[CPU], said: str) -> None:
    assert said in first_failure("cache.layout", Planted(platform))


def keeps(cached: torch.dtype, change: Callable[[Tensor], Tensor]) -> type[CPU]:
    """One that changes V on its way to a cache of one type, and refuses other small ones."""

    def made(spec: AttentionSpec, ops: Any) -> Mixer:
        if spec.kv_dtype not in (None, cached):
            raise ValueError(f"no cache of {spec.kv_dtype}")
        return Around(PagedAttention(spec, ops), lambda args: [*args[:2], change(args[2]), *args[3:]])

    return attends(made)


def _towards_zero(x: Tensor) -> Tensor:
    near = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = near.view(torch.uint8)
    return torch.where(near.float().abs() > x.abs(), codes - 1, codes).view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        (keeps(torch.int8, lambda x: x * 127 / 128), "all codes of int8: int8, 127 steps of 1: "),
        (keeps(torch.int8, lambda x: (x * 4).trunc() / 4), "all codes of int8: "),
        (keeps(torch.float8_e4m3fn, lambda x: x.clamp(-240, 240)), "all codes of float8_e4m3fn: "),
        (keeps(torch.float8_e4m3fn, _towards_zero), "rounding to float8_e4m3fn: "),
        (keeps(torch.float8_e4m3fn, lambda x: x.where(x.abs() <= 448, torch.nan)), "rounding to float8_e4m3fn: "),
        (keeps(torch.float8_e4m3fn, lambda x: x.nan_to_num()), "nan was stored, 0 came back"),
    ],
    ids=["another scale", "whole steps", "other limits", "towards zero", "overflow", "lost NaN"],
)
def test_a_format_with_other_numbers_is_found(platform: type[CPU], said: str) -> None:
    assert said in first_failure("cache.format", Planted(platform))


def test_a_cache_that_is_read_as_another_format_is_found() -> None:
    """e4m3fnuz is stored as such, and read as e4m3fn: twice as large."""

    def made(spec: AttentionSpec, ops: Any) -> Mixer:
        if spec.kv_dtype == torch.float8_e4m3fnuz:
            return Around(PagedAttention(replace(spec, kv_dtype=torch.float8_e4m3fn), ops), after=lambda out: out * 2)
        if spec.kv_dtype is not None:
            raise ValueError(f"no cache of {spec.kv_dtype}")
        return PagedAttention(spec, ops)

    found = first_failure("cache.tagged", Planted(attends(made)))
    assert found.startswith("float8_e4m3fnuz in float32: ") and "as if they were read as float8_e4m3fn" in found


def test_a_format_that_fails_in_a_step_was_not_refused() -> None:
    def made(spec: AttentionSpec, ops: Any) -> Mixer:
        def raising(args: list[Any]) -> list[Any]:
            raise RuntimeError("no kernel for it")

        return Around(PagedAttention(spec, ops), raising if spec.kv_dtype == torch.int8 else lambda args: args)

    found = first_failure("cache.tagged", Planted(attends(made)))
    assert "was not refused when the attention was built, and then its step raised RuntimeError" in found


# ------------------------------------------------------------------------------------------------ the decoder


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_decoder_and_its_nearest_numbers_are_torchs(dtype: torch.dtype) -> None:
    """Written out by sign, exponent and mantissa, they agree with somebody else's table on every code."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    ours = torch.tensor([FLOATS[dtype].value(code) for code in range(256)], dtype=torch.float64)
    assert torch.equal(codes.isnan(), ours.isnan()) and torch.equal(codes.nan_to_num(7), ours.nan_to_num(7))
    there = FLOATS[dtype].numbers
    generator = torch.Generator().manual_seed(0)
    x = torch.cat(
        [
            torch.randn(4000, generator=generator) * 2.0 ** torch.linspace(-20, 18, 4000),
            (there[1:] + there[:-1]).float() / 2,
        ]
    )
    most = torch.finfo(dtype).max
    assert torch.equal(FLOATS[dtype].nearest(x), x.clamp(-most, most).to(dtype).double())


def test_numbers_of_a_cache_that_are_right_pass() -> None:
    numbers = torch.from_numpy(np.array([1.0, -0.5, 448.0]))
    stored = through_cache(numbers, torch.float8_e4m3fn)
    assert torch.equal(stored.double(), numbers)
    require_same(torch.float8_e4m3fn, numbers, stored)  # raises nothing
