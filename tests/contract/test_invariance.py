"""The CPU platform's providers in torch, which serve where nothing was compiled: a row's bits are its own there too.

What is bound here, and whole models, are the conformance kit's to prove.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.interface.platform import Capabilities
from quintet.interface.types import INT4
from quintet.interface.weights import Matrix
from quintet.ops import Op
from quintet.ops.activation import KINDS
from quintet.ops.attention import to_cache_rows
from quintet.platforms.cpu import PLATFORM

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def test_the_platform_declares_it() -> None:
    """Else the kit proves nothing of it."""
    facts = PLATFORM.probe()
    assert isinstance(facts, Capabilities)
    assert facts.batch_invariant


def provider(name: str) -> Callable[..., Tensor]:
    return Op.registry[name].providers["torch"]


STRETCHES = [(0, 1), (49, 50), (3, 5), (1, 4), (10, 14), (20, 25), (8, 16), (0, 17), (13, 46), (0, 66)]


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 77), (77, 48), (1, 1), (7, 5), (1024, 130), (130, 1024)])
def test_linear(inputs: int, outputs: int, dtype: torch.dtype, threads: None) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((67, inputs), (outputs, inputs), (outputs,))
    )
    for b in (None, bias):
        whole = provider("linear")(x, Matrix(weight), b, (outputs,))
        for first, last in STRETCHES:
            assert torch.equal(provider("linear")(x[first:last], Matrix(weight), b, (outputs,)), whole[first:last]), (
                first,
                last,
            )


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind: str, dtype: torch.dtype, threads: None) -> None:
    """torch's own silu and gelu are not: the last elements of a tensor go through other arithmetic."""
    x = torch.randn(301, 2 * 77, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    for name in ("activate", "gated"):
        whole = provider(name)(x, kind)
        for first, last in STRETCHES:
            assert torch.equal(provider(name)(x[first:last].clone(), kind), whole[first:last]), (name, first, last)


@pytest.mark.grid(cases=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(dtype: torch.dtype, threads: None) -> None:
    """Beside whoever else an expert serves, and equal to the specification."""
    shapes = ((67, 48), (6, 2 * 40, 48), (6, 48, 40), (67, 6))
    generator = torch.Generator().manual_seed(0)
    x, gate_up, down, logits = (torch.randn(*shape, generator=generator).mul(0.3).to(dtype) for shape in shapes)
    chosen = Op.registry["route"].reference(logits, 3, True)
    whole = provider("experts")(x, gate_up, down, *chosen, "silu")
    want = Op.registry["experts"].reference(x.float(), gate_up.float(), down.float(), *chosen, "silu")
    torch.testing.assert_close(whole.float(), want, rtol=0, atol=20 * torch.finfo(dtype).eps * float(want.abs().max()))
    for first, last in STRETCHES:
        some = (each[first:last] for each in chosen)
        assert torch.equal(provider("experts")(x[first:last], gate_up, down, *some, "silu"), whole[first:last])


def test_a_router_of_one_expert_weighs_a_token_alike_wherever_it_stands() -> None:
    logits, route = torch.randn(67, 1), Op.registry["route_grouped"].reference
    weights, _ = route(logits, torch.zeros(1), 1, 1, 1, False)
    for first, last in STRETCHES:
        assert torch.equal(route(logits[first:last], torch.zeros(1), 1, 1, 1, False)[0], weights[first:last])


SPECS = {
    "plain": spec(6, 3, 16),
    "one head": spec(1, 1, 8, page_size=8),
    "one KV head": spec(5, 1, 20, page_size=32),
    "many heads": spec(12, 12, 8),
    "window": spec(6, 2, 16, window=37),
    "chunk": spec(6, 2, 16, chunk=37),
    "soft-cap": spec(4, 2, 16, softcap=5.0, window=200),
    "sinks": spec(4, 2, 16, sinks=True),
    "alibi": spec(6, 2, 16, alibi=True, softcap=9.0),
    "int8 cache": spec(6, 2, 16, kv_dtype=torch.int8),
    "int4 cache": spec(6, 2, 48, kv_dtype=INT4),
    "fp8 cache": spec(5, 1, 20, kv_dtype=torch.float8_e4m3fn, window=50),
}
LENGTHS = (1, 3, 40, 127, 128, 129, 290)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_paged_attention(name: str, dtype: torch.dtype) -> None:
    """Each request whole and alone, against: in one batch, in chunks, token by token, among decoding neighbours."""
    torch.set_num_threads(1)
    of = replace(SPECS[name], dtype=dtype)
    cache = RandomKVCache(of, LENGTHS)
    sinks = torch.randn(of.heads) if of.sinks else None

    def attend(requests: dict[int, AttentionRequest]) -> list[Tensor]:
        q, context = cache.batch(requests)
        out: Tensor = provider("paged_attention")(q, cache.kv, context, of, sinks)
        return list(out.split([r.new for r in requests.values()]))

    alone = [attend({row: AttentionRequest(0, length)})[0] for row, length in enumerate(LENGTHS)]
    everyone = dict(enumerate(LENGTHS))
    for row, out in enumerate(attend({row: AttentionRequest(0, length) for row, length in everyone.items()})):
        assert torch.equal(out, alone[row]), f"request {row} in one batch"
    for row, out in enumerate(attend({row: AttentionRequest(length - 1, 1) for row, length in everyone.items()})):
        assert torch.equal(out[0], alone[row][-1]), f"request {row}'s last token among the others' last"
    mixed = {row: AttentionRequest(n // 3, n - n // 3 - row % 2) for row, n in everyone.items() if n > 3}
    for (row, request), out in zip(mixed.items(), attend(mixed), strict=True):
        whole = alone[row][request.cached : request.cached + request.new]
        assert torch.equal(out, whole), f"request {row} from {request.cached} on"
    for position in (0, 5, 100, 127, 128, 200, 289):
        assert torch.equal(attend({6: AttentionRequest(position, 1)})[0][0], alone[6][position]), (
            f"token {position} alone"
        )


@pytest.mark.parametrize("name", SPECS)
def test_what_another_request_left_in_a_page_does_not_matter(name: str) -> None:
    """Not even if it is not a number: one bad request must not spoil those that get its pages."""
    of = SPECS[name]
    cache, sinks = RandomKVCache(of, LENGTHS), torch.randn(of.heads) if of.sinks else None
    q, context = cache.batch(
        {row: AttentionRequest(length // 2, length - length // 2) for row, length in enumerate(LENGTHS)}
    )
    clean = provider("paged_attention")(q, cache.kv, context, of, sinks)
    dirty = to_cache_rows(torch.full((*cache.kv.shape[:4], of.head_dim), float("nan")), of.cache_dtype)
    for pages, length in zip(context.group.block_table.tolist(), context.group.seq_lens.tolist(), strict=True):
        for position in range(length):
            place = pages[position // of.page_size], slice(None), slice(None), position % of.page_size
            dirty[place] = cache.kv[place]
    assert torch.equal(provider("paged_attention")(q, dirty, context, of, sinks), clean)
