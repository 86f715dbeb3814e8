"""Attention over the step alone on the TPU platform: padding, neighbours, memory, and heads over a mesh."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.interface.types import AttentionSpec, Batch, Group, StepContext
from quintet.ops import Op, bind
from quintet.ops.attention import PlainAttention
from tests.helpers.platforms import tpu

pytestmark = tpu.needs_jax

if not tpu.needs_jax.args[0]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from quintet.platforms.tpu import providers  # noqa: F401  registers them
    from quintet.platforms.tpu.attention import mixer
    from quintet.platforms.tpu.torchax_bridge import jax_view, torch_view, tracing

LENGTHS = (100, 1, 150, 33)
KINDS: list[dict[str, Any]] = [
    {"causal": False},
    {"causal": False, "window": 20, "sinks": True},
    {"window": 140, "softcap": 3.0},
    {"chunk": 40},
    {"alibi": True},
]


def made(settings: dict[str, Any]) -> tuple[AttentionSpec, tuple[Tensor, Tensor, Tensor], Batch, Tensor | None]:
    """Whole requests, and Q, K and V of their tokens."""
    of = spec(4, 2, 24, source="none", **settings)
    q, context = RandomKVCache(of, LENGTHS).batch(
        {row: AttentionRequest(0, length) for row, length in enumerate(LENGTHS)}
    )
    k, v = torch.randn(2, len(q), 2, 24)
    return of, (q, k, v), context.batch, torch.randn(4) if of.sinks else None


def served(of: AttentionSpec, given: tuple[Tensor, ...], batch: Batch, sinks: Tensor | None) -> Tensor:
    out = Op.registry["attention"].providers["jax"](*given, batch, of, sinks)
    return torch.from_numpy(np.array(jax_view(out)))


@pytest.mark.grid(cases=2)
@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_padding_is_seen_by_no_request(settings: dict[str, Any]) -> None:
    """Though the last row owns it, as a step that is padded has it; the specification says the same."""
    of, given, batch, sinks = made(settings)
    want = Op.registry["attention"].reference(*given, batch, of, sinks)
    left = 320 - sum(LENGTHS)
    wide = batch._replace(
        positions=torch.cat([batch.positions, torch.zeros(left, dtype=torch.int32)]),
        token_to_seq=torch.cat([batch.token_to_seq, torch.full((left,), len(LENGTHS) - 1, dtype=torch.int32)]),
    )
    for garbage in (torch.nan, 3.0):
        padded = tuple(torch.cat([x, torch.full((left, *x.shape[1:]), garbage)]) for x in given)
        for out in (
            served(of, padded, wide, sinks),
            Op.registry["attention"].reference(*padded, wide, of, sinks),
        ):
            torch.testing.assert_close(out[: sum(LENGTHS)], want, rtol=0, atol=1e-5)


@pytest.mark.grid(cases=2)
@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_what_is_no_number_reaches_those_alone_that_see_it(settings: dict[str, Any]) -> None:
    of, (q, k, v), batch, sinks = made(settings)
    v[110, 0, 3], k[120, 1] = torch.nan, torch.inf
    want = Op.registry["attention"].reference(q, k, v, batch, of, sinks)
    got = served(of, (q, k, v), batch, sinks)
    clean = batch.token_to_seq != 2
    torch.testing.assert_close(got[clean], want[clean], rtol=0, atol=1e-5)
    assert not want[~clean].isfinite().all()
    sane = want.isfinite().flatten(1).all(1)
    assert torch.equal(got.isfinite().flatten(1).all(1), sane)
    torch.testing.assert_close(got[sane], want[sane], rtol=0, atol=1e-5)


def test_what_it_holds_grows_with_the_tokens_and_not_with_their_square() -> None:
    def held(tokens: int) -> int:
        x = jax.ShapeDtypeStruct((tokens, 8, 32), jnp.float32)
        whole = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        starts = jax.ShapeDtypeStruct((5,), jnp.int32)
        of = spec(8, 8, 32, causal=False, source="none")
        step = jax.jit(lambda *arrays: attend(PlainAttention(of, bind({"attention": ("jax",)})), *arrays))
        compiled = step.lower(x, x, x, context(whole, whole, starts)).compile().memory_analysis()
        assert compiled is not None
        return int(compiled.temp_size_in_bytes)

    assert held(4096) < 5 * held(1024)


def attend(mixing: Any, *arrays: Any) -> Any:
    """What the mixer gives, called by a trace."""
    q, k, v, told, *sinks = torch_view(arrays)
    with tracing():
        return jax_view(mixing(q, k, v, (), told, *sinks)[0])


def context(positions: Any, owners: Any, starts: Any) -> StepContext:
    return StepContext(Batch(positions, positions, owners, starts, starts), Group(None, None, None))  # type: ignore[arg-type]


def test_heads_are_shared_out_without_a_word() -> None:
    of, given, batch, _ = made({"causal": False})
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("model",))
    heads = NamedSharding(mesh, PartitionSpec(None, "model"))
    told = jax.device_put(
        context(*(x.numpy() for x in (batch.positions, batch.token_to_seq, batch.query_start_loc))),
        NamedSharding(mesh, PartitionSpec()),
    )
    made_of = mixer(of, bind({"attention": ("jax",)}), mesh)
    assert made_of.layouts == ()
    arrays = (*(jax.device_put(x.numpy(), heads) for x in given), told)
    compiled = jax.jit(lambda *arrays: attend(made_of, *arrays), out_shardings=heads).lower(*arrays).compile()
    assert not any(word in str(compiled.as_text()) for word in ("all-gather", "all-reduce", "all-to-all"))
    want = Op.registry["attention"].reference(*given, batch, of, None)
    torch.testing.assert_close(torch.from_numpy(np.array(compiled(*arrays))), want, rtol=0, atol=1e-5)
