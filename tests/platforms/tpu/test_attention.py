"""The TPU platform's attention: its plan, both providers of its ops, their kernels' lowering, and heads over a mesh."""

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.engine.executor.batch_builder import pad
from quintet.interface.types import AttentionSpec, Group, HostBatch, HostGroup, ShapeBucket, StepContext
from quintet.ops import Op, bind
from tests.helpers.platforms import tpu

pytestmark = tpu.needs_jax

if not tpu.needs_jax.args[0]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding

    from quintet.platforms.tpu import attention
    from quintet.platforms.tpu.attention import HeadLanes, RaggedAttention
    from quintet.platforms.tpu.kernels import blocks
    from quintet.platforms.tpu.kernels.blocks import BLOCK, FROM, KEPT, LEAD, OWNER, PAGE, SHIFT, TO
    from quintet.platforms.tpu.kernels.plain_attention import attend_plain
    from quintet.platforms.tpu.kernels.ragged_attention import attend_paged
    from quintet.platforms.tpu.kernels.write_kv import write_paged, write_plain
    from quintet.platforms.tpu.torchax_bridge import dtype_of, jax_view, torch_view, tracing

PROVIDERS = ("jax", "pallas")
MIXES = {
    "prompt": [AttentionRequest(0, 70)],
    "chunks": [AttentionRequest(60, 31), AttentionRequest(7, 2), AttentionRequest(90, 17)],
    "decode": [AttentionRequest(0, 1), AttentionRequest(63, 1), AttentionRequest(128, 1), AttentionRequest(300, 1)],
    "mix": [
        AttentionRequest(40, 1),
        AttentionRequest(0, 21),
        AttentionRequest(130, 5),
        AttentionRequest(270, 1),
        AttentionRequest(3, 1),
    ],
    "prompt beside decode": [AttentionRequest(20, 1), AttentionRequest(0, 100), AttentionRequest(33, 1)],
}


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    mix: str
    settings: dict[str, Any] = {}
    dtype: torch.dtype = torch.float32


GRID = [
    Case(6, 3, 24, 8, "mix"),
    Case(4, 1, 64, 16, "chunks", {"window": 40}, torch.bfloat16),
    Case(2, 2, 128, 32, "mix", {"softcap": 3.0}),
    Case(7, 1, 128, 16, "decode", {"sinks": True}, torch.bfloat16),
    Case(2, 1, 256, 16, "prompt", {"sinks": True, "window": 5}),
    Case(4, 2, 16, 16, "prompt beside decode", {"softcap": 20.0, "window": 33, "sinks": True}),
    Case(4, 2, 16, 8, "decode", {"window": 1}, torch.float16),
    Case(3, 1, 80, 16, "chunks", {}, torch.bfloat16),
    Case(4, 2, 16, 16, "chunks", {"causal": False}),
    Case(3, 1, 24, 8, "mix", {"causal": False, "window": 21, "sinks": True}, torch.bfloat16),
    Case(6, 3, 24, 8, "mix", {"chunk": 20}),
    Case(4, 2, 16, 16, "chunks", {"chunk": 16, "sinks": True}, torch.bfloat16),
    Case(16, 1, 576, 16, "mix", {"shared": 512}, torch.bfloat16),
    Case(4, 1, 96, 16, "chunks", {"shared": 64, "softcap": 5.0, "window": 40}),
    Case(5, 1, 24, 8, "decode", {"shared": 24}),
]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def made(case: Case) -> tuple[AttentionSpec, RandomKVCache, Tensor, StepContext, Tensor | None]:
    of = spec(case.heads, case.kv_heads, case.dim, dtype=case.dtype, page_size=case.page_size, **case.settings)
    requests = MIXES[case.mix]
    cache = RandomKVCache(of, [r.cached + r.new for r in requests])
    q, batch = cache.batch(dict(enumerate(requests)))
    return of, cache, q, batch, randn(case.heads, dtype=case.dtype) if of.sinks else None


def host(x: Any) -> Tensor:
    """A result as a host tensor, in float32."""
    return torch.from_numpy(np.array(jnp.asarray(jax_view(x)).astype(jnp.float32)))


def assert_close(got: Any, want: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """To a few roundings of the type at the size of the result."""
    limit = (20 if dtype == torch.float32 else 6) * torch.finfo(dtype).eps * max(1.0, float(want.abs().max()))
    assert float((host(got) - want.float()).abs().max()) <= limit


def raised(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


@pytest.mark.grid(cases=5)
@pytest.mark.parametrize("case", GRID, ids=str)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_attention_equals_the_specification(provider: str, case: Case) -> None:
    """Pallas interpreted."""
    of, cache, q, context, sinks = made(case)
    want = Op.registry["paged_attention"].reference(q.float(), cache.kv.float(), context, of, raised(sinks))
    got = Op.registry["paged_attention"].providers[provider](q, cache.kv, context, of, sinks)
    assert got.dtype == case.dtype and got.shape == (len(q), of.heads, of.value_dim)
    assert_close(got, want, case.dtype)


@pytest.mark.grid(cases=2)
@pytest.mark.parametrize(
    ("page_size", "dtype"), [(8, torch.float16), (16, torch.bfloat16), (32, torch.float32)], ids=str
)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_written_cache_is_the_specifications_bit_for_bit(provider: str, page_size: int, dtype: torch.dtype) -> None:
    for settings in ({}, {"shared": 16}):
        of, cache, q, context, _ = made(Case(6, 3, 24, page_size, "mix", settings, dtype))
        k, v = (randn(len(q), 3, 24, dtype=dtype, seed=seed) for seed in (1, 2))
        given = k, None if of.shared else v
        got = Op.registry["write_kv"].providers[provider](cache.kv, *given, context)
        want = Op.registry["write_kv"].reference(cache.kv.clone(), *given, context)
        assert got.dtype == dtype and torch.equal(host(got), want.float())


# ------------------------------------------------------------------------------------------------------------ padding


def on_host(context: StepContext) -> HostBatch:
    """With the one group."""
    group, batch = HostGroup(*(x.numpy() for x in context.group[:3])), context.batch
    fields = [
        x.numpy()
        for x in (batch.token_ids, batch.positions, batch.token_to_seq, batch.query_start_loc, batch.logits_indices)
    ]
    return HostBatch(*fields, groups=(group,))


def padded(context: StepContext, bucket: ShapeBucket) -> HostBatch:
    return pad(on_host(context), (bucket,))


def plan(batch: HostBatch, page_size: int) -> blocks.AttentionWork:
    return blocks.plan_work(batch, batch.groups[0], page_size)


def planned(batch: HostBatch, page_size: int) -> StepContext:
    group = batch.groups[0]._replace(plan=tuple(plan(batch, page_size)))
    batch = batch._replace(groups=(group,))
    there = batch.on([torch.from_numpy(x) for x in batch.leaves()])
    return StepContext(there, there.groups[0])


def spoilt(kv: Tensor, group: Group, with_: float) -> Tensor:
    """The cache with `with_` in page 0 and past every request's end."""
    kv, size = kv.clone(), kv.shape[3]
    kv[0] = with_
    for row, length in zip(group.block_table, group.seq_lens.tolist(), strict=True):
        if length % size:
            kv[row[length // size], :, :, length % size :] = with_
    return kv


@pytest.mark.grid(cases=1)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_nobody_wrote_changes_no_bit(provider: str) -> None:
    """Padding, page 0 and what lies past a request's end may hold anything, and reach nothing."""
    of, cache, q, context, _ = made(Case(4, 2, 16, 16, "mix"))
    real = len(q)
    k, v = randn(real, 2, 16, seed=1), randn(real, 2, 16, seed=2)
    wide = planned(padded(context, ShapeBucket(64, 8, 8, (24,))), of.page_size)
    write, attend = (Op.registry[name].providers[provider] for name in ("write_kv", "paged_attention"))
    outs, kvs = [], []
    for garbage in (float("nan"), float("inf"), -3e38, 0.0):
        q_, k_, v_ = (torch.cat([x, torch.full((64 - real, *x.shape[1:]), garbage)]) for x in (q, k, v))
        kv = write(spoilt(cache.kv, context.group, garbage), k_, v_, wide)
        outs.append(host(attend(q_, kv, wide, of, None)))
        kvs.append(host(kv))
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert torch.equal(outs[0][real:], torch.zeros(64 - real, 4, 16)), "padded tokens come out as zeros"
    want = Op.registry["write_kv"].reference(cache.kv.clone(), k, v, context)
    assert_close(
        jnp.asarray(outs[0][:real].numpy()), Op.registry["paged_attention"].reference(q, want, context, of, None)
    )
    for garbage, kv in zip((float("nan"), float("inf"), -3e38, 0.0), kvs, strict=True):
        expected = Op.registry["write_kv"].reference(spoilt(cache.kv, context.group, garbage), k, v, context)
        assert torch.equal(kv[1:].nan_to_num(), expected[1:].nan_to_num()), "only the tokens' slots were written"


@pytest.mark.parametrize("settings", [{}, {"shared": 16}, {"sinks": True, "softcap": 4.0}], ids=str)
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "mix", [pytest.param(mix, marks=pytest.mark.slow if mix == "mix" else pytest.mark.sweep) for mix in MIXES]
)
def test_pages_given_back_behind_a_window_are_not_looked_at(mix: str, provider: str, settings: dict[str, Any]) -> None:
    """Their places in the table are 0, and page 0 holds no number."""
    of, cache, q, context, sinks = made(Case(4, 2, 24, 8, mix, {"window": 19, **settings}))
    want = Op.registry["paged_attention"].reference(q, cache.kv, context, of, sinks)
    table = context.group.block_table.clone()
    for row, request in enumerate(MIXES[mix]):
        table[row, : max(0, request.cached - 19 + 1) // 8] = 0
    assert mix == "prompt" or not torch.equal(table, context.group.block_table), "some are given back"
    kept = cache.kv.clone()
    kept[0] = kept[sorted(set(context.group.block_table.unique().tolist()) - set(table.unique().tolist()))] = torch.nan
    left = context._replace(group=context.group._replace(block_table=table))
    attend = Op.registry["paged_attention"].providers[provider]
    assert_close(attend(q, kept, left, of, sinks), want)
    whole = planned(padded(left, ShapeBucket(128, 8, 8, (48,))), of.page_size)
    rest = torch.full((128 - len(q), *q.shape[1:]), torch.nan)
    assert_close(jax_view(attend(torch.cat([q, rest]), kept, whole, of, sinks))[: len(q)], want)


@pytest.mark.slow
def test_a_step_of_nothing_gives_zeros() -> None:
    of = spec(2, 1, 16)
    empty = planned(ShapeBucket(16, 16, 16, (24,)).batch, 16)
    for provider in PROVIDERS:
        out = Op.registry["paged_attention"].providers[provider](
            torch.full((16, 2, 16), float("nan")), torch.full((3, 2, 1, 16, 16), float("nan")), empty, of, None
        )
        assert torch.equal(host(out), torch.zeros(16, 2, 16))


# --------------------------------------------------------------------------------------------------------------- plan


def random_batch(seed: int, page_size: int) -> tuple[list[AttentionRequest], StepContext]:
    rng = np.random.default_rng(seed)
    requests = [
        AttentionRequest(int(rng.integers(0, 90)), int(rng.choice([1, 1, 1, 2, 7, 40, 130])))
        for _ in range(rng.integers(1, 12))
    ]
    of = spec(1, 1, 1, page_size=page_size)
    return requests, RandomKVCache(of, [r.cached + r.new for r in requests]).batch(dict(enumerate(requests)))[1]


@pytest.mark.parametrize("seed", range(30))
def test_every_token_is_in_one_piece_and_one_run(seed: int) -> None:
    page_size = (8, 16, 32)[seed % 3]
    _, context = random_batch(seed, page_size)
    batch, group = context
    tokens = len(batch.positions)
    pieces, runs = plan(padded(context, ShapeBucket(tokens + seed, 12 + seed % 5, 1, (40,))), page_size)
    size = blocks.block_tokens(tokens + seed, 12 + seed % 5)
    attended, written = [], []
    for piece in pieces.T:
        for row in range(piece[FROM], piece[TO]):
            token = piece[BLOCK] * size + row
            assert batch.token_to_seq[token] == piece[OWNER] and batch.positions[token] == piece[SHIFT] + row
            assert group.seq_lens[piece[OWNER]] == piece[KEPT]
            attended.append(token)
    for run in runs.T:
        for offset in range(run[FROM], run[TO]):
            token = run[LEAD] + offset
            assert group.slot_mapping[token] == run[PAGE] * page_size + offset
            written.append(token)
    assert attended == written == list(range(tokens))
    used = runs[FROM] < runs[TO]
    assert len(set(runs[PAGE, used])) == used.sum(), "a page is in one run"


def test_a_plan_has_its_variants_sizes() -> None:
    bucket = ShapeBucket(256, 16, 16, (40,))
    shapes = {
        tuple(x.shape for x in plan(padded(context, bucket), 16))
        for _, context in (random_batch(seed, 16) for seed in range(20))
        if len(context.batch.positions) <= 256
    }
    assert shapes == {((6, blocks.num_pieces(256, 16)), (4, blocks.num_runs(256, 16, 16)))}


def test_a_step_that_reads_an_encoders_rows_writes_none() -> None:
    """All its slots are 0: as many runs as tokens, which no plan has."""
    _, context = random_batch(0, 16)
    batch = on_host(context)
    (group,) = batch.groups
    reading = plan(batch._replace(groups=(group._replace(slot_mapping=np.zeros_like(group.slot_mapping)),)), 16)
    assert not reading.runs.any() and (reading.pieces == plan(batch, 16).pieces).all()


# ----------------------------------------------------------------------------------------------------- RaggedAttention


def run(of: AttentionSpec, inputs: tuple[Any, ...], devices: int | None) -> tuple[Tensor, Tensor, str]:
    """What RaggedAttention makes of (q, k, v, kv, batch, sinks), compiled: out, kv and the program."""
    mesh = None if devices is None else Mesh(np.array(jax.devices("cpu")[:devices]), ("model",))
    attend = RaggedAttention(of, bind({"write_kv": ("jax",), "paged_attention": ("jax",)}), mesh)
    q, k, v, kv, batch, sinks = inputs
    kv = jnp.asarray(jax_view(kv))
    if attend.layouts[0].dtype == torch.int16:
        kv = jax.lax.bitcast_convert_type(kv, jnp.int16)
    if mesh is not None:
        kv = jax.device_put(kv, NamedSharding(mesh, attend.sharding))
    arrays = (*jax_view((q, k, v)), (kv,), told(attend, batch), jax_view(sinks))
    compiled = traced(attend, *arrays).lower().compile()
    out, (kv,) = compiled(*arrays)
    if kv.dtype == jnp.int16:
        kv = jax.lax.bitcast_convert_type(kv, jnp.bfloat16)
    return host(out), host(kv), str(compiled.as_text())


def told(attend: RaggedAttention, batch: HostBatch) -> StepContext:
    """The books of the batch's one group, with its plan."""
    group = batch.groups[0]._replace(plan=attend.plan(batch, batch.groups[0]))
    batch = batch._replace(groups=(group,))
    return StepContext(batch, group)  # type: ignore[arg-type]  # arrays of NumPy, as JAX takes them


def traced(attend: RaggedAttention, *arrays: Any) -> Any:
    """The mixer as a function of arrays, its cache donated."""

    def step(*arrays: Any) -> Any:
        with tracing():
            return jax_view(attend(*torch_view(arrays)))

    return jax.jit(step, donate_argnums=3).trace(*arrays)


def inputs(of: AttentionSpec) -> tuple[Any, ...]:
    requests = MIXES["mix"]
    cache = RandomKVCache(of, [r.cached + r.new for r in requests])
    q, context = cache.batch(dict(enumerate(requests)))
    k, v = (randn(len(q), of.kv_heads, of.head_dim, dtype=of.dtype, seed=seed) for seed in (1, 2))
    q, k, v = (torch.cat([x, x[: 32 - len(x)]]) for x in (q, k, v))
    sinks = randn(of.heads, dtype=of.dtype) if of.sinks else None
    return q, k, None if of.shared else v, cache.kv, padded(context, ShapeBucket(32, 8, 8, (20,))), sinks


SHARDED = [
    (8, {"dtype": torch.float32}),
    (8, {"dtype": torch.bfloat16}),
    (4, {"dtype": torch.float32}),
    (1, {"dtype": torch.bfloat16, "shared": 8}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kv_heads", "settings"), SHARDED, ids=str)
def test_sharded_equals_alone(kv_heads: int, settings: dict[str, Any]) -> None:
    """8 KV heads divide among 8 devices, 4 or 1 do not and are on each; neither brings the cache together."""
    of = spec(16, kv_heads, 16, sinks=True, window=50, **settings)
    given = inputs(of)
    alone, kv, _ = run(of, given, None)
    shared, shared_kv, program = run(of, given, 8)
    assert torch.equal(shared_kv, kv)
    assert_close(jnp.asarray(shared.numpy()), alone)
    assert "all-gather" not in program and "all-to-all" not in program and "all-reduce" not in program


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ragged_attention_equals_the_ops_specifications(dtype: torch.dtype) -> None:
    of = spec(4, 2, 16, dtype=dtype)
    q, k, v, kv, batch, _ = given = inputs(of)
    out, written, _ = run(of, given, 1)
    real = int(batch.query_start_loc[-1])
    plain, group = planned(batch, 16)
    context = StepContext(
        plain._replace(positions=plain.positions[:real], token_to_seq=plain.token_to_seq[:real]),
        group._replace(slot_mapping=group.slot_mapping[:real]),
    )
    want = Op.registry["write_kv"].reference(kv.float(), k[:real].float(), v[:real].float(), context)
    assert torch.equal(written, want)
    want = Op.registry["paged_attention"].reference(q[:real].float(), want, context, of, None)
    assert_close(jnp.asarray(out[:real].numpy()), want, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 32), (3, 3, 80)])
def test_heads_side_by_side_equal_heads_alone(heads: int, kv_heads: int, dim: int) -> None:
    of = spec(heads, kv_heads, dim, sinks=True)
    q, k, v, kv, batch, sinks = inputs(of)
    lanes = HeadLanes.of(of, 128)
    wide = lanes.spec(of)
    assert wide.head_dim % 128 == 0 and wide.kv_heads * lanes.heads == kv_heads
    pieces, runs = (jnp.asarray(x) for x in plan(batch, 16))
    q, k, v, sinks = (jnp.asarray(x.numpy()) for x in (q, k, v, sinks))
    write = functools.partial(write_plain, runs=runs)
    attend = functools.partial(attend_plain, table=jnp.asarray(batch.groups[0].block_table), pieces=pieces, sinks=sinks)
    empty = jnp.zeros((kv.shape[0], 2, kv_heads, 16, dim))
    want = attend(q, write(empty, k, v), spec=of)
    wide_kv = jnp.zeros((kv.shape[0], 2, wide.kv_heads, 16, wide.head_dim))
    got = lanes.outputs(attend(lanes.queries(q), write(wide_kv, lanes.keys(k), lanes.keys(v)), spec=wide))
    assert_close(got, host(want))


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "shared"), [(72, 64), (200, 136)])
def test_v_inside_of_k_keeps_its_place_in_the_lanes(dim: int, shared: int) -> None:
    of = spec(6, 2, dim, shared=shared)
    q, k, _, kv, batch, _ = inputs(of)
    lanes = HeadLanes.of(of, 128)
    wide = lanes.spec(of)
    assert wide.head_dim % 128 == wide.shared % 128 == 0 and wide.kv_heads == 2
    pieces, runs = (jnp.asarray(x) for x in plan(batch, 16))
    q, k, table = (jnp.asarray(x) for x in (q.numpy(), k.numpy(), batch.groups[0].block_table))
    want = attend_plain(q, write_plain(jnp.zeros(kv.shape), k, None, runs), table, pieces, None, of)
    wide_kv = write_plain(jnp.zeros((len(kv), 1, 2, 16, wide.head_dim)), lanes.keys(k), None, runs)
    for attend in (attend_plain, functools.partial(attend_paged, interpret=True)):
        got = lanes.outputs(attend(lanes.queries(q), wide_kv, table, pieces, None, wide))
        assert got.shape == (32, 6, shared)
        assert_close(got, host(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_donated_cache_is_updated_where_it_is(dtype: torch.dtype) -> None:
    """Neither op copies it, or turns it into another type."""
    attend = RaggedAttention(spec(4, 2, 16, dtype=dtype), bind({"write_kv": ("jax",), "paged_attention": ("jax",)}))
    kind = dtype_of(dtype)
    kv = jax.ShapeDtypeStruct((5000, *attend.layouts[0].shape), dtype_of(attend.layouts[0].dtype))
    context = told(attend, inputs(spec(4, 2, 16))[4])
    q, k = jax.ShapeDtypeStruct((32, 4, 16), kind), jax.ShapeDtypeStruct((32, 2, 16), kind)
    memory = traced(attend, q, k, k, (kv,), context).lower().compile().memory_analysis()
    size = kv.size * kv.dtype.itemsize
    assert memory is not None and memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 10


# ---------------------------------------------------------------------------------------------------- lowering for TPU


@pytest.mark.grid(cases=3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_kernels_lower_for_a_tpu(dim: int, dtype: str) -> None:
    """Without one: as Mosaic programs, for a step of decoding and for one with prompts."""
    of = spec(8, 2, dim, window=100, softcap=30.0, sinks=True)
    shape, int32 = functools.partial(jax.ShapeDtypeStruct, dtype=dtype), functools.partial(np.zeros, dtype=np.int32)
    for tokens, requests in ((16, 16), (1024, 64)):
        pieces = int32((6, blocks.num_pieces(tokens, requests)))
        runs = int32((4, blocks.num_runs(tokens, requests, 16)))
        q, kv, new = shape((tokens, 8, dim)), shape((99, 2, 2, 16, dim)), shape((tokens, 2, dim))
        programs = [
            jax.jit(attend_paged, static_argnums=5).trace(q, kv, int32((requests, 70)), pieces, shape((8,)), of),
            jax.jit(write_paged, donate_argnums=0).trace(kv, new, new, runs),
        ]
        for program in programs:
            assert "tpu_custom_call" in program.lower(lowering_platforms=("tpu",)).as_text()


def test_what_the_kernels_lack_is_refused_with_all_reasons() -> None:
    of = spec(4, 2, 16, alibi=True, kv_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"torch\.int8.*set kv_cache_dtype to auto.*ALiBi"):
        RaggedAttention(of, bind({}))


def test_pallas_says_why_it_does_not_serve_here() -> None:
    reason = "no TPU here: Pallas would run interpreted"
    for name in ("write_kv", "paged_attention"):
        assert Op.registry[name].probes["pallas"]() == (reason if attention.interpreted() else None)
