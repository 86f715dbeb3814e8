"""The XPU platform on a fake torch.xpu: whole engines, graphs, memory that is not told, ranks."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.interface.platform import Capabilities
from quintet.platforms import SelectedPlatform, UnavailableError, choose
from quintet.platforms.gpu import providers
from quintet.platforms.gpu.comm import process_group
from quintet.platforms.gpu.kernels.chips import CHIP_LIMITS
from quintet.platforms.gpu.platform import UNVERIFIED
from quintet.platforms.host import host_memory
from quintet.platforms.xpu import PLATFORM
from quintet_tools.checkpoints.tiny import PLAIN, Tiny, make, variant
from tests.e2e.engine.test_oracle import ENGINES, mix, run
from tests.e2e.engine.test_oracle import client as cpu_client
from tests.platforms.gpu.fake_torch import GIB
from tests.platforms.xpu.fake_xpu import ARC, FakeXPU, Stream, fake_class, fake_platform, host

XE2 = "Intel Arc B (Battlemage) [e20b]"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineClient]:
    """Makes an engine of that model on a class of platforms."""

    def made(tiny: Tiny, platform: type[FakeXPU], **settings: Any) -> EngineClient:
        facts = platform.probe()
        assert isinstance(facts, Capabilities)
        monkeypatch.setattr("quintet.engine.startup.choose", lambda name: SelectedPlatform(platform, facts, "a test"))
        config = EngineConfig.from_kwargs(
            model=str(tiny.folder), device="xpu", skip_tokenizer_init=True, dtype="float32", **settings
        )
        return EngineClient(config, progress=False)

    return made


def tokens(result: Any) -> Any:
    return {name: [(ids, why) for ids, why, *_ in completions] for name, (completions, _) in result.items()}


def test_it_is_found_by_name_and_says_why_it_is_not_available() -> None:
    if not torch.xpu.is_available():
        with pytest.raises(UnavailableError, match="device 'xpu' is not available: .*; "):
            choose("xpu")


def test_what_serves_an_op_is_what_cuda_has_with_onednn_before_it() -> None:
    differing = {name: order for name, order in PLATFORM.op_priority.items() if order != providers.PRIORITY.get(name)}
    ours = {"linear:w8a8": ("onednn", "triton"), "linear:int4": ("onednn", "triton")}
    assert differing == {**ours, "experts": ("triton",), "linear:fp8a8": ("triton",)}


@pytest.mark.parametrize("how", ["batched", "preempted, cached, chunked"])
def test_an_engine_gives_the_cpus_tokens_and_replays_graphs(how: str, client: Callable[..., EngineClient]) -> None:
    model: Any = ("llama", "plain", "float32", {})
    made, theirs = fake_class(), cpu_client(model, **ENGINES[how])
    made_here = host(made)
    ours = client(variant("llama", "plain"), made, **ENGINES[how])
    for seed in range(2):
        assert tokens(run(ours, mix(seed))) == tokens(run(theirs, mix(seed))), f"mix {seed}"
    assert made_here.captures > 0 and made_here.replays > 10


def test_a_graph_is_captured_on_a_stream_that_waited_for_nobody() -> None:
    """A SYCL graph would refuse an event from outside; the host waits for what was queued before."""
    runtime = fake_class()._fake
    before, stream, ran = runtime.current(), runtime.stream(0), list[str]()
    before.work.append(lambda: ran.append("before"))
    graph = runtime.capture(lambda: ran.append("captured"), runtime.pool(), stream)
    assert ran == ["before", "captured"] and stream.waits == 0
    graph.replay()
    assert ran == ["before", "captured", "captured"]
    waited = runtime.stream(0)
    waited.wait_stream(Stream())
    with pytest.raises(RuntimeError, match="events from outside"):
        runtime.capture(lambda: None, runtime.pool(), waited)


def test_where_graphs_are_unsound_steps_run_eagerly_and_one_line_says_so(
    client: Callable[..., EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+xpu")
    made = fake_class(names=(XE2,))
    config, said = made.configure(EngineConfig())
    assert config.enforce_eager and said == [
        UNVERIFIED,
        f"no step is captured: graphs of torch 2.13.0+xpu are not sound on {XE2} (pytorch #187277)",
    ]
    asked = EngineConfig(enforce_eager=True)
    assert made.configure(asked) == (asked, [UNVERIFIED]), "what was asked for needs no reason"
    ours = client(variant("llama", "plain"), made, **ENGINES["batched"])
    theirs = cpu_client(("llama", "plain", "float32", {}), **ENGINES["batched"])
    assert tokens(run(ours, mix(0))) == tokens(run(theirs, mix(0))) and host(made).captures == 0


def test_ranks_meet_over_xccl_whose_collectives_are_not_captured(client: Callable[..., EngineClient]) -> None:
    made, tiny = fake_class(), make("llama", {**PLAIN, "num_attention_heads": 4, "num_key_value_heads": 2})
    config, said = made.configure(EngineConfig(tensor_parallel_size=2))
    assert config.enforce_eager and "XCCL cannot be captured (pytorch #196490)" in said[-1]
    settings: dict[str, Any] = {"max_model_len": 160, "num_pages": 200}
    shared, alone = (client(tiny, made, tensor_parallel_size=size, **settings) for size in (2, 1))
    assert tokens(run(shared, mix(0))) == tokens(run(alone, mix(0)))
    assert {"use 0", "use 1"} <= set(host(made).calls)


def test_the_process_group_is_made_as_torch_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """ProcessGroupXCCL(store, rank, size, options), as torch 2.11 and 2.13 declare it."""
    assert PLATFORM._collectives == "XCCL"
    store = torch.distributed.HashStore()
    if not hasattr(torch.distributed, "ProcessGroupXCCL"):
        with pytest.raises(RuntimeError, match="2 ranks need XCCL.*set tensor_parallel_size to 1"):
            process_group("XCCL", store, 0, 2)

    class ProcessGroupXCCL:
        class Options:
            pass

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            assert isinstance(options, ProcessGroupXCCL.Options)
            self.made = store, rank, size

    monkeypatch.setattr(torch.distributed, "ProcessGroupXCCL", ProcessGroupXCCL, raising=False)
    assert process_group("XCCL", store, 1, 2).made == (store, 1, 2)


def test_what_is_free_is_what_the_driver_tells_and_never_what_we_hold() -> None:
    runtime = fake_class(limit=1000)._fake
    kept = runtime.empty((400,), torch.uint8, 0)
    assert runtime.memory(0) == (600, 1000)
    stuck = fake_class(limit=1000, stuck=True)._fake
    held = stuck.empty((300,), torch.uint8, 0)
    assert stuck.memory(0) == (700, 1000)
    del kept, held
    assert stuck.memory(0) == (1000, 1000)


def test_a_driver_that_does_not_tell_is_planned_by_its_whole_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    runtime = fake_class(limit=1000, silent=True)._fake
    kept = runtime.empty((400,), torch.uint8, 0)
    assert [runtime.memory(0) for _ in range(3)] == [(600, 1000)] * 3
    said = [record.message for record in caplog.records if "does not tell" in record.message]
    assert said == ["device 0 does not tell what memory is free: plans count on all but ours"] and len(kept) == 400


def test_memory_shared_with_the_host_is_bounded_by_what_the_host_has_left() -> None:
    there = host_memory().total
    runtime = fake_class(limit=4 * there, silent=True, integrated=True)._fake
    free, total = runtime.memory(0)
    assert total == 4 * there and 0 < free <= there


def test_another_error_of_the_driver_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = fake_class()._fake

    def lost(device: int) -> Any:
        raise RuntimeError("UR_RESULT_ERROR_DEVICE_LOST")

    monkeypatch.setattr(runtime.module, "mem_get_info", lost)
    with pytest.raises(RuntimeError, match="DEVICE_LOST"):
        runtime.memory(0)


@pytest.mark.slow
def test_an_engine_plans_on_a_gpu_in_a_processor(client: Callable[..., EngineClient]) -> None:
    made = fake_class(limit=GIB, silent=True, integrated=True)
    ours = client(variant("llama", "plain"), made, max_model_len=160, max_num_seqs=2000, gpu_memory_utilization=0.2)
    assert ours.engine_plan.memory_plan.budget == int(0.2 * GIB)
    theirs = cpu_client(("llama", "plain", "float32", {}), **ENGINES["batched"])
    requests = mix(0)
    assert tokens(run(ours, requests)) == tokens(run(theirs, requests))


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size 3 needs as many devices, 2 here; lower it"):
        fake_class(names=(ARC, ARC)).configure(EngineConfig(tensor_parallel_size=3))
    assert fake_platform().name == "xpu"


def test_a_program_has_two_stages_and_four_warps_at_most() -> None:
    """Nothing was compiled ahead for these chips: not the row of the largest ones."""
    cut = CHIP_LIMITS["xpu", 32]
    assert (cut.stages, cut.warps) == (2, 4)
