"""What is settled before a request comes: what keeps steps from being captured, whether kernels serve a layer, and what
an error of the device means."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.conformance.harness.batches import spec
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.interface.platform import DeviceLost
from quintet.interface.types import MaxShape, ShapeBucket, StepContext
from quintet.ops import Op, bind
from quintet.platforms.gpu import providers
from quintet.platforms.gpu.comm import GroupCommunicator
from quintet.platforms.gpu.device import GPUDevice, device_errors, device_lost_error
from quintet_tools.checkpoints.tiny import variant
from tests.helpers.platforms.run_model import Runner
from tests.helpers.platforms.triton import needs_triton
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime

EXTENT = MaxShape(ShapeBucket(64, 4, 64, (4,)), 16, 97)
MODEL = torch.nn.Linear(1, 1)


def platform(**members: Any) -> FakeGPU:
    config = EngineConfig(max_num_seqs=4, **members.pop("settings", {}))
    made = type("Fake", (FakeGPU,), {"_fake": FakeRuntime(), **members})
    return made(config)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------ never captured


def test_what_asks_the_host_says_so_and_nobody_tries_to_capture_it(caplog: pytest.LogCaptureFixture) -> None:
    order = {"paged_attention": ("gathered",)}
    gpu = platform(op_priority=order, _asks=providers.HOST_SYNCS)
    run = Runner(variant("llama", "plain"), platform=gpu)
    assert not gpu.estimate(run.worker.model, [], EXTENT).buckets
    run.greedy(random_prompts(1, (5, 9), 90), 4)
    assert gpu._fake.captures == 0
    said = "no step is captured, so decoding is slower than it could be: paged_attention by gathered asks the host how"
    assert [said in record.message for record in caplog.records].count(True) == 1
    captured = platform(op_priority={}, _asks=providers.HOST_SYNCS)
    run = Runner(variant("llama", "plain"), platform=captured)
    assert captured.estimate(run.worker.model, [], EXTENT).buckets


def test_every_provider_that_asks_is_one() -> None:
    providers.register()
    for op, provider in providers.HOST_SYNCS:
        assert provider in Op.registry[op].providers, op


# ------------------------------------------------------------------------------------------------ layers are tried


KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "half": {"dtype": torch.float16}, "window": {"window": 1}, "sinks": {"sinks": True},
    "int8": {"kv_dtype": torch.int8}, "fp8": {"kv_dtype": torch.float8_e4m3fn}, "alibi": {"alibi": True},
}  # fmt: skip


@pytest.fixture
def kernels() -> Any:
    needs_triton()
    from quintet.platforms.gpu.ops import attention as triton_attention

    return triton_attention


def with_kernels(**settings: Any) -> FakeGPU:
    order = {"paged_attention": ("triton", "gathered"), "write_kv": ("triton",)}
    gpu = platform(op_priority=order, _asks=providers.HOST_SYNCS, settings=settings)
    gpu.open(0)
    return gpu


@pytest.mark.grid(cases=3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_pass_their_trial_as_the_layer_wants_them(kind: str, kernels: Any) -> None:
    assert kernels.trial(spec(6, 2, 16, **KINDS[kind]), torch.device("cpu")) is None


def test_a_trial_names_what_fails(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of = spec(4, 2, 16)

    def no_memory(*_: Any) -> None:
        raise RuntimeError("out of resource: shared memory\nhint")

    with monkeypatch.context() as patch:
        patch.setattr("quintet.platforms.gpu.kernels.attention_split.launch", no_memory)
        found = kernels.trial(of, torch.device("cpu"))
        assert found == "a prompt fails: RuntimeError: out of resource: shared memory"
    with monkeypatch.context() as patch:
        patch.setattr("quintet.platforms.gpu.kernels.write_kv.launch", no_memory)
        assert kernels.trial(of, torch.device("cpu")).startswith("a prompt fails")
    attend = kernels._paged_attention
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_paged_attention", lambda *args: attend(*args) * (1 + (args[0].shape[0] == 1)))
        found = kernels.trial(of, torch.device("cpu"))
        assert found == "a token alone's result is off by 1 of a row's largest number"


def other_pages(step_context: StepContext) -> StepContext:
    return step_context._replace(group=step_context.group._replace(block_table=step_context.group.block_table.flip(1)))


def a_key_less(step_context: StepContext) -> StepContext:
    positions = (step_context.batch.positions - 1).clamp(min=0)
    batch = step_context.batch._replace(positions=positions)
    return step_context._replace(
        batch=batch, group=step_context.group._replace(seq_lens=step_context.group.seq_lens - 1)
    )


def one_page(step_context: StepContext) -> StepContext:
    return step_context._replace(
        group=step_context.group._replace(
            block_table=step_context.group.block_table * 0 + step_context.group.block_table[:, :1]
        )
    )


@pytest.mark.grid(cases=5)
@pytest.mark.parametrize("wrong", [other_pages, a_key_less, one_page])
@pytest.mark.parametrize("kind", ["plain", "half", "int8", "fp8"])
def test_a_trial_sees_wrong_keys(wrong: Any, kind: str, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In single tokens alone; values that are all 1 would hide it."""
    of, attend = spec(4, 2, 16, **KINDS[kind]), kernels._paged_attention

    def attended(q: Tensor, kv: Tensor, step_context: StepContext, *rest: Any) -> Tensor:
        found: Tensor = attend(q, kv, wrong(step_context) if len(q) == 1 else step_context, *rest)
        return found

    monkeypatch.setattr(kernels, "_paged_attention", attended)
    assert str(kernels.trial(of, torch.device("cpu"))).startswith("a token alone's result is off by")


@pytest.mark.slow
def test_a_trial_as_long_as_on_a_gpu_passes(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three splits, and many tiles."""
    from quintet.platforms.gpu import library_checks as trials

    monkeypatch.setattr(trials, "INTERPRETED", trials.TOKENS)
    assert kernels.trial(spec(2, 1, 16, dtype=torch.float16), torch.device("cpu")) is None


def test_each_kind_of_layer_is_tried_once_and_falls_back_with_the_reason(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad, tried = spec(4, 2, 16), spec(4, 2, 32, window=5), list[Any]()

    def trial(of: Any, device: torch.device) -> str | None:
        tried.append(of)
        return "a prompt fails: it" if of == bad else None

    monkeypatch.setattr(kernels, "trial", trial)
    gpu, ops = with_kernels(), bind(with_kernels().op_priority)
    mixers = [gpu.mixer(of, ops, 0) for of in (good, bad, good, bad)]
    assert tried == [good, bad]
    attends: Any = [mixer._inner._attend for mixer in mixers]  # type: ignore[attr-defined]
    of_op = Op.registry["paged_attention"].providers
    assert attends == [of_op[name] for name in ("triton", "gathered") * 2]
    lines = [record.message for record in caplog.records if "attention by torch" in record.message]
    assert len(lines) == 1 and "a prompt fails: it" in lines[0] and "window=5" in lines[0]
    assert not gpu.estimate(MODEL, [], EXTENT).buckets, "what asks the host is in the step"
    named = with_kernels(attention_backend="triton")
    with pytest.raises(ValueError, match="attention by Triton kernels: a prompt fails: it"):
        named.mixer(bad, ops, 0)


def test_what_attention_takes_beside_its_results_is_planned(kernels: Any) -> None:
    gpu = with_kernels()
    before = gpu.estimate(MODEL, [], EXTENT)
    ops = bind(gpu.op_priority)
    for of in (spec(8, 1, 32), spec(2, 1, 16)):
        gpu.mixer(of, ops, 0)
    took = gpu.estimate(MODEL, [], EXTENT)
    parts = 4 * 8 * 128 * 32 * 4 + 2 * 4 * 8 * 128 * 4  # requests, heads, splits, numbers; and two sums of each
    assert took.workspace - before.workspace == parts == took.captured - before.captured


# ------------------------------------------------------------------------------------------------ broken devices


def error(code: int | None) -> RuntimeError:
    made = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")
    if code is not None:
        made.error_code = code
    return made


@pytest.mark.parametrize(("code", "fatal"), [(700, True), (719, True), (None, True), (2, False), (901, False)])
def test_an_error_of_the_device_ends_the_engine_and_others_do_not(code: int | None, fatal: bool) -> None:
    found = device_lost_error(error(code))
    assert (found is not None) == fatal
    if found is not None:
        assert "start another: CUDA error: an illegal memory access was encountered" in str(found)
    assert (
        device_lost_error(RuntimeError("CUDA error")) is None
        and device_lost_error(torch.OutOfMemoryError("no")) is None
    )


def test_what_a_step_left_broken_is_told_where_its_results_come_home(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRuntime()
    wait = GPUDevice(fake, 0).to_host(torch.ones(3))

    def synchronize(self: Any) -> None:
        raise error(700)

    monkeypatch.setattr("tests.platforms.gpu.fake_torch.Event.synchronize", synchronize)
    with pytest.raises(DeviceLost):
        wait()


def test_an_engine_whose_device_is_lost_ends_instead_of_failing_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    from quintet.engine.client import EngineClient
    from quintet.platforms import SelectedPlatform

    gpu = type(platform())
    monkeypatch.setattr("quintet.engine.startup.choose", lambda name: SelectedPlatform(gpu, gpu.probe(), "a test"))
    config = EngineConfig.from_kwargs(
        model=str(variant("llama", "plain").folder), device="fake", skip_tokenizer_init=True, dtype="float32",
        max_model_len=64, num_pages=40,
    )  # fmt: skip
    engine = EngineClient(config, progress=False)
    worker = engine.engine_plan.ranks.workers[0]
    model, calls = type(worker.model).forward, list[int]()

    def falls_over(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise error(700)
        return model(*args)

    monkeypatch.setattr(type(worker.model), "forward", falls_over)
    engine.add("only", Prompt([5, 6, 7]), SamplingParams(temperature=0, max_tokens=6, detokenize=False))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        for _ in range(10):
            engine.step()


# ------------------------------------------------------------------------------------------------ ranks as threads


def test_ranks_bind_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = [0], [0]

    def probe() -> str | None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)  # others come meanwhile, if nothing keeps them out
        inside[0] -= 1
        return None

    op = Op.registry["rms_norm"]
    monkeypatch.setitem(op.providers, "here", op.reference)
    monkeypatch.setitem(op.probes, "here", probe)
    threads = [threading.Thread(target=lambda: bind({"rms_norm": ("here",)}).take("rms_norm")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_a_process_group_ends_with_its_communicator() -> None:
    said: list[str] = []

    class Group:
        def abort(self) -> None:
            said.append("abort")

    comm = GroupCommunicator(Group(), 0, 2)
    assert comm.size == 2 and not said
    del comm
    assert said == ["abort"]
    GroupCommunicator(object(), 0, 2)  # a library without it


def test_layers_that_differ_are_tried_apart() -> None:
    assert spec(4, 2, 16) == spec(4, 2, 16) != replace(spec(4, 2, 16), scale=0.1)


@pytest.mark.parametrize(
    ("said", "lost"), [("an illegal memory access was encountered", True), ("out of memory", False)]
)
def test_tritons_launches_say_it_too(said: str, lost: bool) -> None:
    """As plain RuntimeErrors, and they are most of a step: the next upload would fail like them."""
    with pytest.raises(DeviceLost if lost else RuntimeError, match=said) as raised, device_errors():
        raise RuntimeError(f"Triton Error [CUDA]: {said}")
    assert isinstance(raised.value, DeviceLost) == lost
