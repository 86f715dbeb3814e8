"""The GPU platform on the fake device: the contract, whole engines, placing, and FlashInfer's place in it."""

import importlib.util
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.conformance.cases.attention import MIXES, paged_attention_arguments
from quintet.conformance.cases.model_ops import DTYPES
from quintet.conformance.cases.published_formats import FORMS
from quintet.conformance.cases.random_arguments import randn
from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.conformance.harness.linear_layers import CanonicalReader, LinearCase
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.client import EngineClient
from quintet.engine.executor.batch_builder import CaptureSizes
from quintet.interface.platform import Capabilities
from quintet.interface.types import HostBatch, HostGroup, Layout, MaxShape, ShapeBucket, StepContext
from quintet.interface.weights import CheckpointSlice, ShardRange, Weight
from quintet.layers.quantization import ONLINE
from quintet.ops import Op, bind
from quintet.platforms import SelectedPlatform, UnavailableError, choose
from quintet.platforms.cuda import PLATFORM, flashinfer
from quintet.platforms.gpu import providers
from quintet.platforms.gpu.attention import GraphAttention, PlannerRegistry
from quintet.platforms.gpu.ops import torch_attention as gathered_attention
from quintet.platforms.gpu.platform import UNVERIFIED
from quintet_tools.checkpoints.tiny import FAMILIES, PLAIN, Tiny, make, variant
from tests.e2e.engine.test_oracle import ENGINES, WIDE, mix, run
from tests.e2e.engine.test_oracle import client as cpu_client
from tests.helpers.platforms.run_model import Runner
from tests.helpers.platforms.triton import needs_triton
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime, fake_platform, runtime

REGISTERED = gathered_attention  # importing it registers its provider


# ------------------------------------------------------------------------------------------------- the contract


def test_it_is_found_by_name_and_says_why_it_is_not_available() -> None:
    stand_in = importlib.util.find_spec("quintet_rehearsal") is not None  # of that name, while `make gpu` is rehearsed
    if not torch.cuda.is_available() and not stand_in:
        with pytest.raises(UnavailableError, match="device 'cuda' is not available: .*; "):
            choose("cuda")


def test_a_step_returns_before_it_is_done_and_shapes_are_free() -> None:
    facts = FakeGPU.probe()
    assert isinstance(facts, Capabilities)
    assert facts.overlap and not facts.static_shapes and not facts.ops_only and facts.devices == 3


def test_what_was_never_run_says_so() -> None:
    assert FakeGPU.configure(EngineConfig()) == (EngineConfig(), [UNVERIFIED])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_it_computes_in_agrees_with_float32(dtype: torch.dtype) -> None:
    tiny = variant("llama", "plain")
    (prompt,) = random_prompts(4, (30,), 101)
    exact = tiny.logits(prompt)
    (got,) = Runner(tiny, dtype, platform=fake_platform()).prompts([prompt])
    assert float((got - exact).abs().max()) < 40 * torch.finfo(dtype).eps * float(exact.abs().max())


def test_every_provider_is_in_the_priority_and_every_one_there_is_registered() -> None:
    providers.register()
    ours = {name for name, op in Op.registry.items() if "triton" in op.providers}
    assert ours == {name for name, order in providers.PRIORITY.items() if "triton" in order}
    assert all(set(order) <= set(Op.registry[name].providers) for name, order in providers.PRIORITY.items())
    assert PLATFORM.op_priority is providers.PRIORITY


@pytest.mark.slow
def test_registering_takes_no_name_from_another_platform() -> None:
    """An op's provider of the same name, if two platforms brought one, would be whoever's was loaded last."""
    code = (
        "from quintet.platforms.cpu import PLATFORM; from quintet.ops import Op\n"
        "before = {name: dict(op.providers) for name, op in Op.registry.items()}\n"
        "from quintet.platforms.gpu import providers; providers.register()\n"
        "print([name for name in before if not before[name].items() <= Op.registry[name].providers.items()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # NumPy's, of masked lanes
@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("llama", ("gated",)),
        pytest.param("mixtral", ("route", "experts"), marks=pytest.mark.sweep),
        pytest.param("qwen2_moe", ("route", "route_grouped", "experts"), marks=pytest.mark.sweep),
        ("qwen3_moe", ("norm_rotary", "route", "experts")),
        pytest.param("lfm2", ("norm_rotary", "short_conv"), marks=pytest.mark.sweep),
        ("mamba", ("short_conv", "selective_scan")),
        ("granitemoehybrid", ("gated", "short_conv", "state_space")),
        ("qwen3_next", ("gated", "short_conv", "delta_rule")),
        ("deepseek_v2", ("pair_rotary", "route_limited", "experts")),
        ("gpt_oss", ("route", "biased_experts")),
    ],
)
def test_a_model_by_our_kernels_alone_gives_the_cpus_tokens(family: str, own: tuple[str, ...]) -> None:
    """Padded, captured and replayed, in Triton's interpreter or on the device."""
    device = needs_triton()
    if device.type != "cpu":
        pytest.skip("on a GPU, tests/platforms/cuda does this")
    used = ("paged_attention", "write_kv", "rms_norm", "add_rms_norm", "rotary", "embedding", *own)
    used = tuple(name for name in used if name != "rotary" or "norm_rotary" not in own)
    members = {"_fake": FakeRuntime(), "op_priority": {name: providers.PRIORITY[name] for name in used}}
    platform = type("WithKernels", (FakeGPU,), members)(EngineConfig(max_num_seqs=4))
    whole = next(iter(FAMILIES[family].values()))
    types = whole["layer_types"][:2] if "layer_types" in whole else ["every layer is alike"]
    settings = {**whole, "num_hidden_layers": len(types)} | ({"layer_types": types} if len(types) > 1 else {})
    settings |= {"first_k_dense_replace": 0} if "first_k_dense_replace" in whole else {}
    tiny, prompts = make(family, settings), random_prompts(3, (9, 1, 17), 101)
    ours, theirs = Runner(tiny, platform=platform), Runner(tiny)
    assert {c.op for c in ours.worker.ops.choices if c.provider == "triton"} == set(used)
    for got, want in zip(ours.prompts(prompts), theirs.prompts(prompts), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.std()))
    assert ours.greedy(prompts, 3) == theirs.greedy(prompts, 3)
    assert (runtime(platform).captures, runtime(platform).replays) == (1, 1)


# ------------------------------------------------------------------------------------------------ whole engines


Make = Callable[..., EngineClient]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes an engine of that model on a class of platforms."""

    def made(tiny: Tiny, platform: type[FakeGPU], **settings: Any) -> EngineClient:
        facts = platform.probe()
        assert isinstance(facts, Capabilities)
        monkeypatch.setattr("quintet.engine.startup.choose", lambda name: SelectedPlatform(platform, facts, "a test"))
        config = EngineConfig.from_kwargs(
            model=str(tiny.folder), device="fake", skip_tokenizer_init=True, dtype="float32", **settings
        )
        return EngineClient(config, progress=False)

    return made


def tokens(result: Any) -> Any:
    """Tokens and reasons; log-probabilities are another platform's up to roundings."""
    return {name: [(ids, why) for ids, why, *_ in completions] for name, (completions, _) in result.items()}


@pytest.mark.grid(cases=3)
@pytest.mark.parametrize("how", [name for name in ENGINES if name != "eager"])
def test_any_way_gives_the_cpus_tokens(how: str, client: Make) -> None:
    """The oracle's mixes: prefixes, chunks, preemption, seeded draws. Steps run behind the host."""
    model: Any = ("llama", "plain", "float32", {})
    made, theirs = type(fake_platform()), cpu_client(model, **ENGINES[how])
    ours = client(variant("llama", "plain"), made, **ENGINES[how])
    for seed in range(2):
        assert tokens(run(ours, mix(seed))) == tokens(run(theirs, mix(seed))), f"mix {seed}"
    assert made._fake.replays > 10
    assert made._fake.captures <= len(ours.engine_plan.memory_plan.buckets), "of each size once, whatever came"


def test_steps_with_prompts_are_replayed(client: Make) -> None:
    """Chunks of prompts, beside requests that decode: the same tokens, by graphs."""
    settings = ENGINES["preempted, cached, chunked"]
    theirs = cpu_client(("llama", "plain", "float32", {}), **settings)
    counts = []
    for more in ({}, {"capture_prompts": False}):
        made = type(fake_platform())
        ours = client(variant("llama", "plain"), made, **settings, **more)
        assert tokens(run(ours, mix(0))) == tokens(run(theirs, mix(0)))
        counts.append(made._fake.replays)
    assert counts[0] >= counts[1] + 5, "what decodes alone is replayed either way"


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_states_alone_and_beside_pages_are_captured(family: str, client: Make) -> None:
    """Through prefixes that are found, and preemption where there are pages."""
    settings = {**ENGINES["preempted, cached, chunked"], "num_pages": 23}
    made, theirs = type(fake_platform()), cpu_client((family, "plain", "float32", {}), **settings)
    ours = client(variant(family, "plain"), made, **settings)
    for seed in range(2):
        assert tokens(run(ours, mix(seed))) == tokens(run(theirs, mix(seed))), f"mix {seed}"
    assert made._fake.replays > 10


def answers(engine: EngineClient, prompts: list[list[int]], count: int = 1) -> list[list[int]]:
    """Greedy tokens of requests that come at once."""
    params = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)
    for name, prompt in enumerate(prompts):
        engine.add(str(name), Prompt(prompt), params)
    found = {}
    while engine.busy:
        found.update({each.request_id: list(each.outputs[0].token_ids) for each in engine.step() if each.finished})
    return [found[str(name)] for name in range(len(prompts))]


STATE_OPS = ("delta_rule", "selective_scan", "short_conv", "state_space")


@pytest.mark.grid(cases=3)
@pytest.mark.parametrize("family", ["llama", "mamba2", "lfm2", "qwen3_next"])
@pytest.mark.parametrize("kernels", [False, True])
def test_prompts_of_other_lengths_are_one_size_or_none(
    family: str, kernels: bool, client: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seven steps of 24 tokens of two requests. Where a kernel advances a state, one graph serves all; where the
    specification does, which goes up to the longest request's tokens, no step with prompts is captured."""
    for name in STATE_OPS:
        monkeypatch.setitem(Op.registry[name].providers, "kernel", unplanned(Op.registry[name].reference))
    order = dict.fromkeys(STATE_OPS, ("kernel",)) if kernels else {}
    made, plain = (type(f"Fake{way}", (type(fake_platform()),), {"op_priority": order}) for way in range(2))
    settings: dict[str, Any] = {"max_model_len": 64, "num_pages": 60, "warm_up": False, "enable_prefix_caching": False}
    tiny = variant(family, next(iter(FAMILIES[family])))
    caplog.set_level("INFO")
    ours, theirs = client(tiny, made, **settings), client(tiny, plain, enforce_eager=True, **settings)
    for count in range(5, 12):
        prompts = [[*range(7, 7 + count)], [*range(9, 9 + 24 - count)]]
        assert answers(ours, prompts) == answers(theirs, prompts)
    captured = family == "llama" or kernels
    assert (made._fake.captures, made._fake.replays) == ((1, 6) if captured else (0, 0))
    assert ("steps with prompts are not captured: " in caplog.text) == (not captured)


def unplanned(reference: Callable[..., Any]) -> Callable[..., Any]:
    """An op that wants no plan, as a kernel's."""

    def run(*args: Any) -> Any:
        context = next(each for each in args if isinstance(each, StepContext))
        assert not context.group.plan, "its shape would be a graph's"
        return reference(*args)

    return run


def test_states_by_the_specification_decode_in_graphs(client: Make) -> None:
    made, plain = type(fake_platform()), type(fake_platform())
    settings: dict[str, Any] = {"max_model_len": 64, "num_pages": 60, "warm_up": False}
    ours, theirs = (client(variant("mamba2", "plain"), each, **settings) for each in (made, plain))
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    assert answers(ours, prompts, 6) == answers(theirs, prompts, 6) and made._fake.captures == 1
    assert made._fake.replays == 4


@pytest.mark.slow
def test_large_prompts_are_replayed(client: Make) -> None:
    """More tokens than a captured decode step may have, in sizes that some prompts share."""
    made, plain = type(fake_platform()), type(fake_platform())
    settings: dict[str, Any] = {"max_model_len": 64, "num_pages": 99, "warm_up": False, "enable_prefix_caching": False}
    ours = client(variant("llama", "plain"), made, **settings)
    theirs = client(variant("llama", "plain"), plain, enforce_eager=True, **settings)
    for count in (45, 47):
        prompts = random_prompts(count, [count] * 12, 90)
        assert answers(ours, prompts) == answers(theirs, prompts)
    assert (made._fake.captures, made._fake.replays) == (1, 1), "540 and 564 tokens"
    assert plain._fake.captures == 0


def test_the_plan_counts_what_the_largest_captured_step_takes() -> None:
    """Activations and logits of 2,048 tokens, that their pool has; those beyond 512 are not captured ahead."""
    took = {}
    for most in (512, 2048):
        platform = fake_platform(max_num_seqs=8, max_capture_size=most)
        max_shape = MaxShape(ShapeBucket(2048, 8, 8, (4,)), 64, 1000)
        estimate = platform.estimate(torch.nn.Linear(3, 3), [], max_shape)
        took[most] = estimate.captured - len(estimate.buckets) * 1.5 * 2**14
        assert platform._pool_bytes == max_shape._replace(largest=ShapeBucket(most, 8, 8, ())).workspace
        assert estimate.compiled_on_demand == frozenset(each.tokens for each in estimate.buckets if each.tokens > 512)
    assert took[2048] - took[512] == 1536 * 12 * 4 * 64
    named = fake_platform(capture_sizes=(8, 2048)).estimate(torch.nn.Linear(3, 3), [], max_shape)
    assert not named.compiled_on_demand and max(each.tokens for each in named.buckets) == 2048, (
        "sizes that a user names are captured ahead"
    )


@pytest.mark.grid(cases=1)
@pytest.mark.parametrize("scheme", ONLINE)
def test_quantized_while_loaded_it_gives_the_cpus_tokens(scheme: str, client: Make) -> None:
    model: Any = ("llama", "wide", "float32", {"quantization": scheme})
    made, settings = type(fake_platform()), ENGINES["batched"]
    wide = make("llama", {**FAMILIES["llama"]["plain"], **WIDE})
    ours, theirs = client(wide, made, quantization=scheme, **settings), cpu_client(model, **settings)
    assert tokens(run(ours, mix(0))) == tokens(run(theirs, mix(0)))


@pytest.mark.slow
def test_several_ranks_in_one_engine(client: Make) -> None:
    """The scheduler's threads may change from step to step: each call says which device it means."""
    made, tiny = type(fake_platform()), make("llama", {**PLAIN, "num_attention_heads": 4, "num_key_value_heads": 2})
    settings: dict[str, Any] = {"max_model_len": 160, "num_pages": 200}
    shared, alone = (client(tiny, made, tensor_parallel_size=size, **settings) for size in (2, 1))
    assert tokens(run(shared, mix(0))) == tokens(run(alone, mix(0)))
    assert {"use 0", "use 1"} <= set(made._fake.calls)


def test_an_engine_outlives_a_step_that_fails(client: Make) -> None:
    made = type(fake_platform())
    engine = client(variant("llama", "plain"), made, max_model_len=64, num_pages=40)
    worker = engine.engine_plan.ranks.workers[0]
    step = worker.main.step

    def complete() -> Any:
        params = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
        engine.add("only", Prompt([5, 6, 7]), params)
        done = []
        while engine.busy:
            done += [each for each in engine.step() if each.finished]
        return done[-1].outputs[0]

    wanted = complete()

    def fall_over(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    worker.main.step = fall_over
    assert complete().finish_reason == "error"
    worker.main.step = step
    assert list(complete().token_ids) == list(wanted.token_ids), "with another cache, and graphs of it"


def test_two_engines_share_a_device_by_their_shares(client: Make) -> None:
    """Each takes its share of the whole at most, and no more than the other leaves."""
    made = type(fake_platform(limit=2**30))
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2000, "gpu_memory_utilization": 0.2}
    tiny = variant("llama", "plain")
    first, second = (client(tiny, made, **settings) for _ in range(2))
    budgets = [engine.engine_plan.memory_plan.budget for engine in (first, second)]
    assert budgets == [int(0.2 * 2**30)] * 2
    held = made._fake.used()
    assert sum(engine.engine_plan.memory_plan.kv_bytes for engine in (first, second)) < held < 0.41 * 2**30


# ------------------------------------------------------------------------------------------------------ placing


def weight(use: str = "linear", shared: bool = False, rank: int = 0, **more: Any) -> Weight:
    return Weight(
        "weight", (CheckpointSlice("w", (64, 128), ((0, 64),)),), 0, rank, torch.bfloat16, use, shared=shared, **more
    )


def opened() -> tuple[FakeGPU, FakeRuntime]:
    platform = fake_platform()
    platform.open(0)
    return platform, runtime(platform)


def test_a_weight_goes_up_in_its_type_and_is_counted() -> None:
    platform, _ = opened()
    x = torch.randn(64, 128)
    (placed,) = platform.place(weight(), {"w": x}).values()
    assert torch.equal(placed, x.bfloat16()) and platform._placed_bytes(weight()) == placed.nbytes
    assert platform._devices[0].tagged_memory.nbytes("weights") == placed.nbytes


def test_a_tied_head_is_held_once() -> None:
    platform, _ = opened()
    x = {"w": torch.randn(64, 128)}
    first, second = (platform.place(weight(use, shared=True), x)["weight"] for use in ("embedding", "linear"))
    assert first.data_ptr() == second.data_ptr()
    other = platform.place(weight(), x)["weight"]
    assert other.data_ptr() != first.data_ptr()
    assert platform._devices[0].tagged_memory.nbytes("weights") == 2 * first.nbytes


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("packed", [True, False])
def test_what_is_quantized_takes_what_was_planned(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "can_pack", lambda kind, priority: packed)
    platform, _ = opened()
    of = weight(format=ONLINE[name])
    placed = platform.place(of, {"w": torch.randn(64, 128)})
    assert set(placed) == {"weight", "scales"}
    assert sum(each.nbytes for each in placed.values()) == platform._placed_bytes(of)


@pytest.mark.parametrize("what", FORMS)
@pytest.mark.parametrize("packed", [True, False])
def test_what_a_checkpoint_holds_takes_what_was_planned(
    what: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "can_pack", lambda kind, priority: packed)
    platform, _ = opened()
    reader, product = CanonicalReader(FORMS[what]), LinearCase(1, 160, (64,))
    fmt = reader.format(ShardRange((0, 64), (0, 160)))
    of = Weight(
        "weight", (CheckpointSlice("part0.weight", (64, 160), ((0, 64),)),), 0, 0, torch.bfloat16, "linear", fmt, reader
    )
    placed = platform.place(of, product.canonical_checkpoint(reader.random_matrix(64, 160), None))
    beside = {"zeros": fmt.zeros, "mins": fmt.mins, "order": fmt.act_order}
    assert set(placed) == {"weight", "scales"} | {name for name, there in beside.items() if there}
    assert fmt.required_kinds <= FakeGPU.probe().weight_formats
    assert sum(each.nbytes for each in placed.values()) == platform._placed_bytes(of)


def test_a_weight_that_cannot_be_quantized_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "can_pack", lambda kind, priority: True)
    platform, _ = opened()
    with pytest.raises(ValueError, match="w cannot be quantized: the weight holds numbers that are not finite"):
        platform.place(weight(format=ONLINE["int8"]), {"w": torch.full((64, 128), float("nan"))})


def test_without_their_provider_weights_lie_as_the_specification_has_them() -> None:
    assert not providers.can_pack("int4", {}), "nobody but them reads that"
    op = Op.registry["linear:int4"]
    before = op.providers.pop("triton", None)
    try:
        assert not providers.can_pack("int4", providers.PRIORITY)
    finally:
        if before is not None:
            op.providers["triton"] = before


def test_what_a_model_takes_is_told_with_the_steps_that_are_captured() -> None:
    model, max_shape = torch.nn.Linear(3, 3), MaxShape(ShapeBucket(2048, 4, 64, (10, 10)), 16, 1000)
    took = fake_platform(max_num_seqs=4).estimate(model, [weight()], max_shape)
    assert [each.tokens for each in took.buckets if each.decode] == [4, 2, 1]
    assert {each.requests for each in took.buckets if not each.decode} == {4}
    assert took.weights == 64 * 128 * 2 and took.workspace == max_shape.workspace
    assert took.captured > 4 * 4 * (1000 + 16), "what steps give is counted"
    eager = fake_platform(max_num_seqs=4, enforce_eager=True).estimate(model, [weight()], max_shape)
    assert (eager.captured, eager.buckets) == (0, ())
    model.recordable = False  # as a model says that computes with more than ops
    looking = fake_platform(max_num_seqs=4).estimate(model, [weight()], max_shape)
    assert (looking.captured, looking.buckets) == (0, ())
    nothing_kept = max_shape._replace(largest=max_shape.largest._replace(pages=()))
    assert fake_platform().estimate(model, [weight()], nothing_kept).buckets == (), "it does not decode"


# ---------------------------------------------------------------------------------------------------- attention


KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 7}, "soft-cap": {"softcap": 5.0}, "sinks": {"sinks": True},
    "alibi": {"alibi": True}, "int8": {"kv_dtype": torch.int8}, "fp8": {"kv_dtype": torch.float8_e4m3fn},
    "all": {"window": 20, "softcap": 4.0, "sinks": True, "alibi": True},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_resort_equals_the_specification(kind: str, dtype: torch.dtype) -> None:
    op = Op.registry["paged_attention"]
    for heads, kv_heads, dim in ((6, 3, 16), (5, 1, 24)):
        of = spec(heads, kv_heads, dim, dtype=dtype, **KINDS[kind])
        for what, requests in MIXES.items():
            sinks = randn(heads, dtype=torch.float32) if of.sinks else None
            q, kv, context, *_ = paged_attention_arguments(of, requests, sinks)
            want = op.reference(q.float(), kv if of.kv_dtype else kv.float(), context, of, sinks)
            got = op.providers["gathered"](q, kv, context, of, sinks)
            limit = (20 if dtype == torch.float32 else 6) * torch.finfo(dtype).eps * max(1.0, float(want.abs().max()))
            assert got.dtype == dtype and float((got.float() - want).abs().max()) <= limit, what


class Wrapper:
    """What FlashInfer's wrappers are called with and compute, by the specification."""

    made: list["Wrapper"]
    planned: int

    def __init__(self, workspace: Tensor, layout: str, use_cuda_graph: bool = False, **buffers: Any) -> None:
        assert layout == "HND" and not workspace.any()
        self.fixed, self.buffers = use_cuda_graph, {k: v for k, v in buffers.items() if k.endswith("buffer")}
        assert bool(self.buffers) == use_cuda_graph
        type(self).made.append(self)

    def _plan(self, starts: Tensor, indptr: Tensor, pages: Tensor, last: Tensor, how: dict[str, Any]) -> None:
        assert all(x.dtype == torch.int32 and x.device.type == "cpu" for x in (starts, indptr, pages, last))
        assert len(pages) == indptr[-1] and ((last >= 1) & (last <= how["page_size"])).all()
        kept = (indptr.diff() - 1) * how["page_size"] + last
        assert torch.equal(how["seq_lens"], kept) and how["seq_lens"].is_contiguous()
        type(self).planned += 1
        self._how, given = how, (indptr, pages, last)
        if self.fixed:  # what a graph reads lies where it lay
            assert len(last) == len(self.buffers["paged_kv_last_page_len_buffer"])
            for buffer, x in zip((self.buffers[name] for name in BUFFERS), given, strict=True):
                buffer[: len(x)].copy_(x)
            given = tuple(self.buffers[name] for name in BUFFERS)
            assert pages.data_ptr() == self.buffers[BUFFERS[1]].data_ptr(), "they went up to where they are read"
        self._starts, (self._indptr, self._pages, self._last) = starts, given

    def reset_workspace_buffer(self, space: Tensor, plans: Tensor) -> None:
        """As FlashInfer's does, whose own pinned memory it makes anew."""
        self.plans, self._pin_memory_int_workspace_buffer = plans, torch.empty(0)

    def run(self, q: Tensor, kv: Tensor) -> Tensor:
        how, out = self._how, torch.empty_like(q)
        assert (q.dtype, kv.dtype) == (how["q_data_type"], how["kv_data_type"])
        for r in range(len(self._last)):
            pages = self._pages[self._indptr[r] : self._indptr[r + 1]].long()
            length = (len(pages) - 1) * how["page_size"] + int(self._last[r])
            k, v = kv[pages].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            first, end = int(self._starts[r]), int(self._starts[r + 1])
            for token in range(first, end):
                at = length - (end - token)
                low = 0 if how["window_left"] < 0 else max(0, at - how["window_left"])
                keys, values = k[:, low : at + 1], v[:, low : at + 1]
                rows = q[token].float().reshape(how["num_kv_heads"], -1, how["head_dim"])
                scores = rows @ keys.transpose(1, 2) * how["sm_scale"]
                cap = how["logits_soft_cap"]
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                out[token] = (scores.softmax(-1) @ values).reshape(-1, how["head_dim"]).to(q.dtype)
        return out


BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
SHAPE = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")


def fake_flashinfer() -> Any:
    """A module with its two wrappers; parameters are those of flashinfer-python 0.5."""

    class Decode(Wrapper):
        made: list[Wrapper] = []
        planned = 0

        def __init__(self, *args: Any, use_tensor_cores: bool = False, **more: Any) -> None:
            super().__init__(*args, **more)

        def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *shape: int, **how: Any) -> None:
            starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
            self._plan(starts, indptr, indices, last_page_len, {**dict(zip(SHAPE, shape, strict=True)), **how})

    class Prefill(Wrapper):
        made: list[Wrapper] = []
        planned = 0

        def plan(self, starts: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **how: Any) -> None:
            assert how.pop("causal")
            self._plan(starts, indptr, indices, last, {**dict(zip(SHAPE, shape, strict=True)), **how})

    class Module:
        BatchDecodeWithPagedKVCacheWrapper = Decode
        BatchPrefillWithPagedKVCacheWrapper = Prefill

    return Module()


def with_flashinfer(module: Any, **settings: Any) -> Any:
    """The CUDA platform on a fake device, and that module installed."""
    fake = FakeRuntime()
    members = {
        "_make_runtime": classmethod(lambda cls: fake), "_facts": FakeGPU.__dict__["_facts"], "op_priority": {},
        "_flashinfer": lambda self: module, "_fake": fake,
    }  # fmt: skip
    return type("CUDAWithFlashInfer", (PLATFORM,), members)(EngineConfig(**settings))


KINDS_OF_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
WINDOWED = {
    **FAMILIES["gemma2"]["plain"], "hidden_size": 48, "num_hidden_layers": 4, "head_dim": 64,
    "layer_types": KINDS_OF_LAYERS, "sliding_window": 7,
}  # fmt: skip


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_flashinfer_serves_prompts_and_captured_decoding(kv_dtype: torch.dtype | None) -> None:
    """A model with windowed and other layers: each group of layers has its plan, on pages of its own, and what page 0
    holds reaches nobody."""
    module, tiny = fake_flashinfer(), make("gemma2", WINDOWED)
    logits = []
    for platform in (with_flashinfer(module, max_num_seqs=8), fake_platform(enforce_eager=True)):
        run, rng = Runner(tiny, torch.bfloat16, platform=platform, kv_dtype=kv_dtype), random.Random(1)
        assert len(run.worker.kv_cache_layout.groups) == 4
        steps = [run.step(dict(enumerate(random_prompts(2, [5, 17, 40], 101))))]
        for turn in range(9):
            for kept in run.worker._state:
                kept[0] = torch.tensor(math.nan).to(kept.dtype)
            steps.append(run.step({name: [rng.randrange(101)] for name in range(3 - turn // 3)}))
        logits.append([rows for step in steps for rows in step.values()])
    for got, want in zip(*logits, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0.06 * float(want.std()))
    decode, prefill = module.BatchDecodeWithPagedKVCacheWrapper, module.BatchPrefillWithPagedKVCacheWrapper
    assert prefill.planned - 2 == 4 and decode.planned - 2 == 4 * 9, "four groups, after a trial of each kind of layer"
    assert len(decode.made) - 2 == 4 * 3, "one for each size of each group"


def test_kinds_of_layers_in_one_group_plan_together() -> None:
    """One is FlashInfer's, one is not: either plans for both, and finds its own."""
    module = fake_flashinfer()
    platform = with_flashinfer(module)
    platform.open(0)
    plain = spec(8, 2, 64, dtype=torch.bfloat16, window=20)
    specs = plain, replace(plain, softcap=3.0), replace(plain, sinks=True)
    layers = [platform.mixer(of, bind({}), 0) for of in specs]
    assert {type(layer) for layer in layers} == {GraphAttention}
    cache = RandomKVCache(plain, [41, 30])
    q, (batch, group) = cache.batch({0: AttentionRequest(40, 1), 1: AttentionRequest(10, 20)})
    k, v = torch.randn(2, len(q), 2, 64).to(torch.bfloat16)
    own = HostGroup(*(x.numpy() for x in group[:3]))
    host = HostBatch(*(x.numpy() for x in batch[:5]), (own,))
    for planner in layers:
        planned = group._replace(plan=tuple(map(torch.from_numpy, planner.plan(host, own))))
        for of, layer in zip(specs, layers, strict=True):
            sinks = torch.zeros(8) if of.sinks else None
            out, (kv,) = layer(q, k, v, (cache.kv,), StepContext(batch, planned), sinks)
            want = Op.registry["paged_attention"].reference(q, kv, StepContext(batch, group), of, sinks)
            torch.testing.assert_close(out, want, rtol=0, atol=0.02)
    assert module.BatchPrefillWithPagedKVCacheWrapper.planned == 2 * (1 + 3), "two kinds: a trial, and in each plan"


def test_captured_steps_with_prompts_go_without_flashinfer() -> None:
    """Its kernels choose their grid by the plan of this very step; ours serve beside, on the same pages."""
    module = fake_flashinfer()
    platform = with_flashinfer(module)
    platform.open(0)
    of = spec(8, 2, 64, dtype=torch.bfloat16)
    layer = platform.mixer(of, bind({}), 0)
    planning = platform._planning[0]
    planning.captured_sizes = frozenset([(24, 5)])
    cache = RandomKVCache(of, [41, 30])
    q, (batch, group) = cache.batch({0: AttentionRequest(40, 1), 1: AttentionRequest(10, 20)})
    own = HostGroup(*(x.numpy() for x in group[:3]))
    host = HostBatch(*(x.numpy() for x in batch[:5]), (own,))
    padded = CaptureSizes([ShapeBucket(24, 5, 5, (64,))]).pad(host)
    assert (len(padded.token_ids), len(padded.query_start_loc)) == (24, 6)
    prefill, outs = module.BatchPrefillWithPagedKVCacheWrapper, []
    for step in (host, padded):
        before = prefill.planned
        step = step._replace(groups=(step.groups[0]._replace(plan=layer.plan(step, step.groups[0])),))
        there = step.on([torch.from_numpy(array) for array in step.leaves()])
        more = torch.cat([q, q.new_zeros(len(there.token_ids) - len(q), *q.shape[1:])])
        outs.append(layer(more, more[:, :2], more[:, 2:4], (cache.kv.clone(),), StepContext(there, there.groups[0]))[0])
        assert prefill.planned - before == (step is not padded and step.token_ids is host.token_ids)
    torch.testing.assert_close(outs[1][:21], outs[0], rtol=0, atol=0.02)
    assert platform._captured_buckets(torch.nn.Linear(3, 3), ShapeBucket(64, 8, 64, (4,)))[0].decode is False
    most = ShapeBucket(2048, 8, 64, (4,))
    assert max(each.tokens for each in platform._captured_buckets(torch.nn.Linear(3, 3), most)) == 512, "its prompts"
    asked = with_flashinfer(module, max_capture_size=1024)
    asked.open(0)
    asked.mixer(of, bind({}), 0)
    assert max(each.tokens for each in asked._captured_buckets(torch.nn.Linear(3, 3), most)) == 1024
    planning.planners_optional = False  # a layer that ours do not serve
    assert all(each.decode for each in platform._captured_buckets(torch.nn.Linear(3, 3), ShapeBucket(64, 8, 64, (4,))))


def test_flashinfer_refuses_with_all_reasons() -> None:
    of = spec(4, 2, 80, alibi=True, sinks=True, kv_dtype=torch.int8)
    assert flashinfer.refusals(of) == [
        "queries in float32", "a cache in int8", "heads of 80", "slopes (ALiBi) of our choice", "sinks",
    ]  # fmt: skip
    assert flashinfer.refusals(spec(4, 2, 64, dtype=torch.bfloat16, window=9, softcap=3.0)) == []


def test_what_flashinfer_refuses_is_served_by_ops_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    platform = with_flashinfer(fake_flashinfer())
    platform.open(0)
    with caplog.at_level("INFO"):
        for _ in range(3):
            platform.mixer(spec(4, 2, 16), bind({}), 0)
    assert [record.message for record in caplog.records] == [
        "attention by reference: FlashInfer does not serve queries in float32, a cache in float32, heads of 16"
    ]


def means(mark: Any = lambda: lambda: None) -> flashinfer.DeviceFunctions:
    return flashinfer.DeviceFunctions(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype), torch.zeros(1), mark)


def test_an_attention_that_was_asked_for_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    of = spec(4, 2, 64, dtype=torch.bfloat16)
    for backend, want in [("auto", "flashinfer"), ("gathered", "attention")]:
        platform = with_flashinfer(fake_flashinfer(), attention_backend=backend)
        platform.open(0)
        made = platform.mixer(of, bind({}), 0)
        assert made._inner._attend.__module__.endswith(want)
    asked = EngineConfig(attention_backend="flashinfer")
    monkeypatch.setattr(flashinfer, "load", lambda: "FlashInfer is not installed")
    with pytest.raises(ValueError, match="attention_backend='flashinfer' does not serve: FlashInfer is not installed"):
        type(with_flashinfer("")).configure(asked)
    monkeypatch.setattr(flashinfer, "load", fake_flashinfer)
    config, reasons = type(with_flashinfer("")).configure(asked)
    assert config.attention_backend == "auto" and "where it comes first" in reasons[-1]


def trial(module: Any) -> str | None:
    return flashinfer.trial(spec(8, 2, 64, dtype=torch.bfloat16), module, means())


def test_flashinfer_is_tried_before_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trial(fake_flashinfer()) is None
    wrong, fails = fake_flashinfer(), fake_flashinfer()
    monkeypatch.setattr(wrong.BatchDecodeWithPagedKVCacheWrapper, "run", lambda self, q, kv: q)
    monkeypatch.setattr(fails.BatchPrefillWithPagedKVCacheWrapper, "run", lambda self, q, kv: 1 / 0)
    assert trial(wrong) == "a step of 1 tokens gave 0.0, not 1"
    assert trial(fails) == "FlashInfer fails on a small step: ZeroDivisionError: division by zero"


def test_every_rank_plans_for_itself() -> None:
    platform, of = with_flashinfer(fake_flashinfer(), tensor_parallel_size=2), spec(8, 2, 64, dtype=torch.bfloat16)
    for rank in (0, 0, 1):
        platform._library_mixer(of, bind({}), rank, PlannerRegistry())
    assert [rank for rank, _ in platform._planners] == [0, 1]
    assert len({id(planner) for planner in platform._planners.values()}) == 2


def test_a_plan_waits_until_the_one_before_it_has_left_pinned_memory() -> None:
    """FlashInfer's uploads share its pinned memory, and the host plans ahead of the device."""
    done: list[str] = []

    def mark() -> Any:
        done.append("uploads")
        return lambda: done.append("arrived")

    module, of = fake_flashinfer(), spec(8, 2, 64, dtype=torch.bfloat16)
    for wrapper in (module.BatchDecodeWithPagedKVCacheWrapper, module.BatchPrefillWithPagedKVCacheWrapper):
        wrapper.plan = lambda *args, **how: done.append("plans")
    planner = flashinfer.GroupPlanner(of, module, means(mark), (1,))
    for count in (1, 2, 1):
        planner.plan(*flashinfer._trial_step(count))
    assert done == ["plans", "uploads", *["arrived", "plans", "uploads"] * 2]


def test_flashinfer_that_is_not_there_or_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"flashinfer"}
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: name in there or None)  # type: ignore[attr-defined]
    monkeypatch.setattr(flashinfer.shutil, "which", lambda name: None)  # type: ignore[attr-defined]
    assert "no compiled kernels" in flashinfer.load()
    there.add("flashinfer_jit_cache")
    monkeypatch.setattr(flashinfer.importlib, "import_module", lambda name: object())  # type: ignore[attr-defined]
    assert flashinfer.load() == (
        "this version of FlashInfer lacks BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper"
    )
    there.clear()
    assert "not installed" in flashinfer.load()


def test_the_layout_is_ours_whoever_attends() -> None:
    of = spec(8, 2, 64, dtype=torch.bfloat16)
    platforms = with_flashinfer(fake_flashinfer()), fake_platform()
    for platform in platforms:
        platform.open(0)
        assert platform.mixer(of, bind({}), 0).layouts == (Layout(torch.bfloat16, (2, 2, 16, 64)),)
