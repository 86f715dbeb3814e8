"""The specifications of the model's ops against their definitions, and providers that no platform here binds.

Those that are bound, the conformance kit holds against the specifications: quintet/conformance/sections/ops.py.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.conformance.cases.attention import SPECS, paged_attention_arguments, write_kv
from quintet.conformance.cases.model_ops import CASES, DTYPES, TYPES
from quintet.conformance.cases.random_arguments import randn
from quintet.conformance.close import require_close
from quintet.conformance.harness.batches import AttentionRequest, spec
from quintet.interface.weights import Matrix
from quintet.ops import Op
from quintet.ops.activation import split_limit
from quintet.ops.linear import linear
from quintet.platforms import cpu

REGISTERED = cpu  # importing it registers providers
# bound where nothing is compiled. In float32 the reference is the specification itself
OTHERS = [
    (name, provider, dtype)
    for name in CASES
    for provider in ("reference", "torch")
    for dtype in (DTYPES if provider != "reference" else DTYPES[1:])
    if provider in Op.registry[name].providers
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Threads wait by spinning: on busy cores small products take 40 times as long with two."""
    torch.set_num_threads(1)


@pytest.mark.parametrize(("name", "provider", "dtype"), OTHERS, ids=str)
def test_provider_equals_the_specification(name: str, provider: str, dtype: torch.dtype) -> None:
    op = Op.registry[name]
    step = 5 if name == "paged_attention" else 1  # each size with each mix; the reference is slow
    for what, args in itertools.islice(CASES[name](dtype), 0, None, step):
        wants = _tensors(op.reference(*(_raised(a) for a in args)))
        gots = _tensors(op.providers[provider](*(a.clone() if isinstance(a, Tensor) else a for a in args)))
        types = TYPES.get(name, (dtype,) * len(wants))
        for got, want, expected in zip(gots, wants, types, strict=True):
            assert got.dtype == expected, what
            require_close(what, got, want)


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _raised(x: Any) -> Any:
    """Activations and weights in float32; fp8 is a format, and stays."""
    if isinstance(x, Matrix):
        return x._replace(values=_raised(x.values))
    if type(x) is tuple:
        return tuple(map(_raised, x))
    if not isinstance(x, Tensor):
        return x
    return x.float() if x.dtype in DTYPES else x.clone()  # some ops write into what they are given


def test_written_tokens_stand_in_their_slots_and_nothing_else_changes() -> None:
    for _, (kv, k, v, context) in write_kv(torch.float32):
        before, after = kv.clone(), Op.registry["write_kv"].reference(kv, k, v, context)
        size = kv.shape[3]
        untouched = torch.ones(kv.shape[0], size, dtype=torch.bool)
        for i, slot in enumerate(context.group.slot_mapping.tolist()):
            assert torch.equal(after[slot // size, 0, :, slot % size], k[i])
            assert torch.equal(after[slot // size, 1, :, slot % size], v[i])
            untouched[slot // size, slot % size] = False
        before, after = (x.permute(0, 3, 1, 2, 4) for x in (before, after))
        assert torch.equal(after[untouched], before[untouched])


@pytest.mark.parametrize(("name", "settings"), SPECS.items(), ids=SPECS)
def test_specification_of_attention_is_the_textbooks(name: str, settings: dict[str, Any]) -> None:
    """Softmax over what a token may see, written out with loops."""
    of = spec(4, 2, 8, **settings)
    sinks = randn(4, dtype=torch.float32) if of.sinks else None
    requests = [AttentionRequest(5, 3), AttentionRequest(0, 12)]
    q, kv, context, *_ = paged_attention_arguments(of, requests, sinks)
    out = Op.registry["paged_attention"].reference(q, kv, context, of, sinks)
    for token, (row, position) in enumerate(
        zip(context.batch.token_to_seq.tolist(), context.batch.positions.tolist(), strict=True)
    ):
        first = 0 if of.window is None else max(0, position - of.window + 1)
        pages = kv[context.group.block_table[row].long()].permute(0, 3, 1, 2, 4)
        cache = pages.flatten(0, 1)[first : position + 1]  # [S, 2, Hkv, D]
        for head in range(4):
            scores = cache[:, 0, head // 2] @ q[token, head] * of.scale
            if of.softcap is not None:
                scores = of.softcap * (scores / of.softcap).tanh()
            weights = scores.exp()
            weights = weights / (weights.sum() + (0 if sinks is None else sinks[head].exp()))
            torch.testing.assert_close(out[token, head], weights @ cache[:, 1, head // 2])


# ------------------------------------------------------------ the specifications below once more, a number at a time


Weight = Callable[[int, int], float]  # of an output and an input


def _products(x: Tensor, weight: Weight, bias: Tensor | None, outputs: int) -> Tensor:
    rows = x.double().tolist()
    shift = [0.0] * outputs if bias is None else bias.tolist()
    return torch.tensor(
        [[shift[n] + math.fsum(v * weight(n, k) for k, v in enumerate(row)) for n in range(outputs)] for row in rows]
    )


def _small(name: str, most: int = 4000) -> Iterator[tuple[Any, ...]]:
    """The cases in float32 whose first tensors have few elements: loops are slow."""
    for _, args in CASES[name](torch.float32):
        if args[0].shape[0] <= 3 and args[1].values.numel() <= most:
            yield args


def _float8(bits: int, exponent: int, mantissa: int) -> float:
    """A byte as sign, exponent and mantissa; an exponent of 0 is a subnormal's."""
    sign, fraction = (-1.0 if bits >> 7 else 1.0), bits & (2**mantissa - 1)
    power, bias = bits >> mantissa & (2**exponent - 1), 2 ** (exponent - 1) - 1
    return sign * math.ldexp(fraction + (2**mantissa if power else 0), max(power, 1) - bias - mantissa)


FLOAT8 = {
    torch.float8_e4m3fn: [_float8(bits, 4, 3) for bits in range(256)],  # 127 and 255 are NaN
    torch.float8_e5m2: [_float8(bits, 5, 2) for bits in range(256)],  # from 124 on infinite, or NaN
}


def _fp8_weight(weight: Tensor, scales: Tensor, block: int) -> Weight:
    values, bits = FLOAT8[weight.dtype], weight.view(torch.uint8).tolist()
    return lambda n, k: values[bits[n][k]] * float(scales[n, k // block if block else 0])


def _int8_weight(weight: Tensor, scales: Tensor) -> Weight:
    group = weight.shape[1] // scales.shape[1]
    return lambda n, k: int(weight[n, k]) * float(scales[n, k // group])


def _int4_weight(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Weight:
    group = 2 * weight.shape[1] // scales.shape[1]

    def value(n: int, k: int) -> float:
        byte = int(weight[n, k // 2])
        zero = 8.0 if zeros is None else float(zeros[n, k // group])
        return ((byte // 16 if k % 2 else byte % 16) - zero) * float(scales[n, k // group])

    return value


def _product(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    got: Tensor = linear.reference(x, weight, bias, outputs)
    return got


def test_specification_of_int8_is_its_definition() -> None:
    for x, weight, bias, outputs in _small("linear:int8"):
        want = _products(x, _int8_weight(weight.values, weight.scales), bias, len(weight.values))
        torch.testing.assert_close(_product(x, weight, bias, outputs), want)


def test_specification_of_int4_is_its_definition() -> None:
    for x, weight, bias, outputs in _small("linear:int4"):
        want = _products(x, _int4_weight(*weight[:3]), bias, len(weight.values))
        torch.testing.assert_close(_product(x, weight, bias, outputs), want)


def test_an_order_says_which_input_a_column_is_for() -> None:
    x, weight, bias, outputs = next(iter(_small("linear:int4")))
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(1)).to(torch.int32)
    got = _product(x, weight._replace(input_order=order), bias, outputs)
    torch.testing.assert_close(got, _product(x[:, order], weight, bias, outputs))


def test_specification_of_fp8_is_its_definition() -> None:
    for x, weight, bias, outputs in _small("linear:fp8"):
        want = _products(x, _fp8_weight(weight.values, weight.scales, weight.format.group), bias, len(weight.values))
        torch.testing.assert_close(_product(x, weight, bias, outputs), want)


def test_specification_of_w8a8_is_its_definition() -> None:
    for x, weight, bias, outputs in _small("linear:w8a8"):
        got = _product(x, weight, bias, outputs)
        for row, out in zip(x.double().tolist(), got, strict=True):
            step = max(map(abs, row)) / 127
            whole = [round(v / step) for v in row]  # half to even
            for n, each in enumerate(weight.values.tolist()):
                total = sum(a * b for a, b in zip(whole, each, strict=True)) * step * float(weight.scales[n])
                assert float(out[n]) == pytest.approx(
                    total + (0 if bias is None else float(bias[n])), rel=1e-4, abs=1e-5
                )


def test_specification_of_w4a8_is_its_definition() -> None:
    for x, weight, bias, outputs in _small("linear:w4a8"):
        known = x.double()
        for piece in known.split(weight.format.group, dim=1):
            step = piece.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            piece[:] = (piece / step).round() * step
        want = _products(known, _int4_weight(weight.values, weight.scales, None), bias, len(weight.values))
        torch.testing.assert_close(_product(x, weight, bias, outputs), want, rtol=1e-4, atol=1e-4)


def test_specification_of_fp8a8_is_its_definition() -> None:
    for x, weight, bias, outputs in _small("linear:fp8a8"):
        largest = torch.finfo(weight.values.dtype).max
        there = torch.tensor([v for v in FLOAT8[weight.values.dtype] if abs(v) <= largest], dtype=torch.float64)
        known = x.double()
        for piece in known.split(weight.format.group or x.shape[1], dim=1):
            step = piece.abs().amax(1, keepdim=True) / largest
            nearest = (piece[..., None] / step[..., None] - there).abs().argmin(-1)
            piece[:] = there[nearest] * step
        want = _products(
            known, _fp8_weight(weight.values, weight.scales, weight.format.group), bias, len(weight.values)
        )
        torch.testing.assert_close(_product(x, weight, bias, outputs), want, rtol=1e-4, atol=1e-4)


def test_int8_products_are_added_up_without_rounding() -> None:
    args = dict(CASES["linear:w8a8"](torch.float32))["sums beyond 2**24"]
    assert _product(*args).item() == 1


@pytest.mark.parametrize("name", ["route", "route_grouped"])
def test_specification_of_the_router_is_its_definition(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):  # in the latter, many are equal
        for what, args in CASES[name](dtype):
            weights, ids = Op.registry[name].reference(*args)
            for row, logits in enumerate(args[0].tolist()):
                want, by = _routed(logits, *args[1:]) if name == "route" else _routed_in_groups(logits, *args[1:])
                assert ids[row].tolist() == want, what
                assert weights[row].tolist() == pytest.approx(by, rel=1e-5), what


def _routed(logits: list[float], k: int, renormalize: bool) -> tuple[list[int], list[float]]:
    ids = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:k]
    total = math.fsum(math.exp(logits[e]) for e in (ids if renormalize else range(len(logits))))
    return ids, [math.exp(logits[e]) / total for e in ids]


def _routed_in_groups(
    logits: list[float], bias: Tensor, k: int, groups: int, kept: int, renormalize: bool
) -> tuple[list[int], list[float]]:
    weights = [1 / (1 + math.exp(-logit)) for logit in logits]
    ranks = [weight + float(shift) for weight, shift in zip(weights, bias, strict=True)]
    size = len(logits) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    best = sorted(members, key=lambda group: -sum(sorted(ranks[e] for e in group)[-2:]))[:kept]
    ids = sorted(itertools.chain(*best), key=lambda e: -ranks[e])[:k]
    total = sum(weights[e] for e in ids) if renormalize else 1.0
    return ids, [weights[e] / total for e in ids]


def test_specification_of_grouped_products_is_its_definition() -> None:
    for what, (x, weight, counts) in CASES["grouped_linear"](torch.float32):
        owners = [expert for expert, count in enumerate(counts.tolist()) for _ in range(count)]
        got = Op.registry["grouped_linear"].reference(x, weight, counts)
        for row, out in enumerate(got):
            want = weight[owners[row]] @ x[row] if row < len(owners) else torch.zeros(weight.shape[1])
            torch.testing.assert_close(out, want, msg=what)


def test_specification_of_experts_is_its_definition() -> None:
    for what, (x, gate_up, down, weights, ids, kind) in CASES["experts"](torch.float32):
        name, limit = split_limit(kind)
        act, most = (torch.nn.functional.silu if name == "silu" else torch.nn.functional.gelu), limit or torch.inf
        got = Op.registry["experts"].reference(x, gate_up, down, weights, ids, kind)
        for token, out in enumerate(got):
            want = torch.zeros_like(out)
            for weight, e in zip(weights[token], ids[token].tolist(), strict=True):
                if 0 <= e < len(down):
                    gate, up = (gate_up[e] @ x[token]).chunk(2)
                    want += weight * (down[e] @ (act(gate.clamp(max=most)) * up.clamp(-most, most)))
            torch.testing.assert_close(out, want, msg=what)
