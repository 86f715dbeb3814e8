"""Every provider of the model's ops against the specification, over a grid of shapes and types.

Half-precision results are held against the specification in float32 on the same numbers, to a few of their roundings.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import quintet.platforms.cpu  # noqa: F401  registers its providers
from quintet.ops import Op
from quintet.ops.activation import KINDS
from quintet.types import AttentionSpec
from tests.helpers.batches import Cache, Request, spec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAMPLING = {"gumbel", "greedy", "scale_logits", "filter_logits", "sample", "top_logprobs"} | {
    "penalize", "bias_tokens", "ban_tokens", "keep_tokens"
}  # fmt: skip
Case = tuple[str, tuple[Any, ...]]  # what it is, the op's arguments


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def linear(dtype: torch.dtype) -> Iterator[Case]:
    for rows in (1, 2, 3, 8, 65):
        for inputs, outputs in ((1, 1), (48, 77), (77, 48), (256, 129), (1024, 40)):
            for biased in (False, True):
                x, w = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
                bias = randn(outputs, dtype=dtype) if biased else None
                yield f"{rows}x{inputs} by {outputs}, bias {biased}", (x, w, bias)


def activations(dtype: torch.dtype) -> Iterator[Case]:
    for kind in KINDS:
        for rows, width in ((1, 2), (3, 74), (65, 130)):
            yield f"{kind} {rows}x{width}", (randn(rows, width, dtype=dtype, scale=4.0), kind)


def rms_norm(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((1, 48), (5, 77), (3, 6, 16)):
        for offset in (0.0, 1.0):
            yield f"{shape} + {offset}", (randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype), 1e-5, offset)


def add_rms_norm(dtype: torch.dtype) -> Iterator[Case]:
    for what, (x, weight, eps, offset) in rms_norm(dtype):
        yield what, (x, randn(*x.shape, dtype=dtype, scale=3.0), weight, eps, offset)


def layer_norm(dtype: torch.dtype) -> Iterator[Case]:
    for rows, width in ((1, 48), (5, 77)):
        x, weight, bias = (randn(*s, dtype=dtype) for s in ((rows, width), (width,), (width,)))
        yield f"{rows}x{width}", (x, weight, bias, 1e-5)
        yield f"{rows}x{width}, no bias", (x, weight, None, 1e-5)


def rotary(dtype: torch.dtype) -> Iterator[Case]:
    for heads, kv_heads, dim, turned in ((6, 3, 16, 16), (5, 1, 24, 12)):
        q, k = randn(9, heads, dim, dtype=dtype), randn(9, kv_heads, dim, dtype=dtype)
        angles = torch.arange(40)[:, None] * torch.linspace(0.1, 1, turned // 2)
        table = torch.cat([angles.cos(), angles.sin()], -1)
        positions = torch.tensor([0, 1, 2, 39, 5, 5, 7, 30, 11], dtype=torch.int32)
        yield f"{turned} of {dim}", (q, k, table, positions)


def embedding(dtype: torch.dtype) -> Iterator[Case]:
    ids, table = torch.tensor([0, 7, 9, 3, 7], dtype=torch.int32), randn(10, 12, dtype=dtype)
    yield "whole", (ids, table, 0, False)
    for first in (0, 4, 8, 20):
        yield f"from {first}", (ids, table[:4], first, True)


def write_kv(dtype: torch.dtype) -> Iterator[Case]:
    for page_size in (8, 16, 32):
        kv, slots = randn(6, page_size, 2, 3, 8, dtype=dtype), torch.tensor([5, 6, 40, 41, 47, 0], dtype=torch.int32)
        k, v = randn(6, 3, 8, dtype=dtype), randn(6, 3, 8, dtype=dtype, scale=2.0)
        yield f"pages of {page_size}", (kv.clone(), k, v, slots)


MIXES = {
    "a long prompt": [Request(0, 170)],
    "chunks": [Request(100, 31), Request(7, 2), Request(250, 17)],
    "decoding": [Request(0, 1), Request(63, 1), Request(127, 1), Request(128, 1), Request(300, 1)],
    "ragged mix": [Request(40, 1), Request(0, 21), Request(130, 5), Request(270, 1), Request(3, 1)],
}
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "window of one": {"window": 1},
    "window over blocks": {"window": 140},
    "soft-cap": {"softcap": 3.0},
    "soft-cap, window": {"softcap": 20.0, "window": 33, "scale": 0.7},
    "sinks": {"sinks": True},
    "sinks, window": {"sinks": True, "window": 5},
}


def paged_attention(dtype: torch.dtype) -> Iterator[Case]:
    for what, settings in SPECS.items():
        for heads, kv_heads, page_size in ((6, 3, 16), (5, 1, 8), (3, 3, 32)):
            of = spec(heads, kv_heads, 16, dtype=dtype, page_size=page_size, **settings)
            sinks = randn(heads, dtype=dtype) if of.sinks else None
            for mix, requests in MIXES.items():
                yield f"{what}, {heads}/{kv_heads}, pages of {page_size}, {mix}", _attention(of, requests, sinks)


def _attention(of: AttentionSpec, requests: list[Request], sinks: Tensor | None) -> tuple[Any, ...]:
    cache = Cache(of, [r.cached + r.new for r in requests])
    q, batch = cache.batch(dict(enumerate(requests)))
    return q, cache.kv, batch, of, sinks


CASES: dict[str, Callable[[torch.dtype], Iterator[Case]]] = {
    "activate": activations,
    "add_rms_norm": add_rms_norm,
    "embedding": embedding,
    "gated": activations,
    "layer_norm": layer_norm,
    "linear": linear,
    "paged_attention": paged_attention,
    "rms_norm": rms_norm,
    "rotary": rotary,
    "write_kv": write_kv,
}
PROVIDERS = [(op.name, provider) for op in Op.registry.values() if op.name in CASES for provider in op.providers]


def test_every_op_of_the_model_has_cases() -> None:
    assert set(Op.registry) - SAMPLING == set(CASES)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Threads wait by spinning: on busy cores small products take 40 times as long with two."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "provider"), PROVIDERS)
def test_provider_equals_the_specification(name: str, provider: str, dtype: torch.dtype) -> None:
    op = Op.registry[name]
    reason = op.probes[provider]() if provider in op.probes else None
    if reason:
        pytest.skip(f"{provider} does not serve here: {reason}")
    for what, args in CASES[name](dtype):
        wants = _tensors(op.reference(*(_raised(a) for a in args)))
        gots = _tensors(op.providers[provider](*(a.clone() if isinstance(a, Tensor) else a for a in args)))
        for got, want in zip(gots, wants, strict=True):
            assert got.dtype == dtype, what
            _assert_close(got, want, what)


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _raised(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def _assert_close(got: Tensor, want: Tensor, what: str) -> None:
    """To 6 roundings of the type at the size of the result; a product of a thousand terms in float32 needs 20."""
    roundings = 20 if got.dtype == torch.float32 else 6
    size = max(1.0, float(want.abs().max()))
    limit = roundings * torch.finfo(got.dtype).eps * size
    worst = float((got.float() - want).abs().max())
    assert worst <= limit, f"{what}: off by {worst:.3g}, {limit:.3g} allowed"


def test_written_tokens_stand_in_their_slots_and_nothing_else_changes() -> None:
    for _, (kv, k, v, slots) in write_kv(torch.float32):
        before, after = kv.clone(), Op.registry["write_kv"].reference(kv, k, v, slots)
        for i, slot in enumerate(slots.tolist()):
            assert torch.equal(after[slot // kv.shape[1], slot % kv.shape[1], 0], k[i])
            assert torch.equal(after[slot // kv.shape[1], slot % kv.shape[1], 1], v[i])
        untouched = torch.ones(kv.shape[:2], dtype=torch.bool)
        untouched.view(-1)[slots.long()] = False
        assert torch.equal(after[untouched], before[untouched])


@pytest.mark.parametrize(("name", "settings"), SPECS.items(), ids=SPECS)
def test_specification_of_attention_is_the_textbooks(name: str, settings: dict[str, Any]) -> None:
    """Softmax over what a token may see, written out with loops."""
    of = spec(4, 2, 8, **settings)
    sinks = randn(4, dtype=torch.float32) if of.sinks else None
    requests = [Request(5, 3), Request(0, 12)]
    q, kv, batch, *_ = _attention(of, requests, sinks)
    out = Op.registry["paged_attention"].reference(q, kv, batch, of, sinks)
    for token, (row, position) in enumerate(zip(batch.owners.tolist(), batch.positions.tolist(), strict=True)):
        first = 0 if of.window is None else max(0, position - of.window + 1)
        cache = kv[batch.page_table[row].long()].flatten(0, 1)[first : position + 1]  # [S, 2, Hkv, D]
        for head in range(4):
            scores = cache[:, 0, head // 2] @ q[token, head] * of.scale
            if of.softcap is not None:
                scores = of.softcap * (scores / of.softcap).tanh()
            weights = scores.exp()
            weights = weights / (weights.sum() + (0 if sinks is None else sinks[head].exp()))
            torch.testing.assert_close(out[token, head], weights @ cache[:, 1, head // 2])
