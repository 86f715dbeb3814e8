"""What the conformance kit cannot know of this package: its queue, its memory, its own op, layer and model."""

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from quintet.conformance.harness.subject import Subject
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.contract import AttentionSpec, CheckpointSlice, Weight, bind
from quintet_tools.checkpoints.tiny import variant
from torch import Tensor

from acme import Acme, kernels, ops
from acme.chip import CHIP, FP8, read
from acme.device import AcmeDevice
from acme.launch import launch
from acme.layers import FusedMLP
from acme.llama import LastBlock

MIB = 2**20


@pytest.fixture
def acme() -> Acme:
    return Acme()


@pytest.fixture
def device(acme: Acme) -> AcmeDevice:
    return acme.open(0)  # type: ignore[return-value]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Work that waits for it holds the queue."""
    event = threading.Event()
    yield event
    event.set()


def up(device: AcmeDevice, *numbers: float) -> Tensor:
    return device.to_device([np.array(numbers, np.float32)])[0]


def test_work_is_done_later_and_in_order(device: AcmeDevice, gate: threading.Event) -> None:
    x = up(device, 1, 2)

    def held(x: Tensor) -> Tensor:
        gate.wait()
        return x + 1

    wait = device.to_host(launch(lambda x: 3 * x, torch.empty_like, launch(held, torch.empty_like, x)))
    gate.set()  # everything above returned while the queue was held
    assert wait().tolist() == [6, 9]


def test_an_error_surfaces_where_somebody_waits_and_the_queue_goes_on(device: AcmeDevice) -> None:
    x = up(device, 1, 2)

    def broken(x: Tensor) -> Tensor:
        raise ArithmeticError("unit 3 is on fire")

    y = launch(broken, torch.empty_like, x)
    z = launch(lambda x: x + 1, torch.empty_like, y)
    with pytest.raises(ArithmeticError, match="unit 3 is on fire"):
        device.to_host(z)()
    assert device.to_host(x)().tolist() == [1, 2]


@pytest.mark.parametrize("compute", [lambda x: x + 1, lambda x: x[0], lambda x: x.cpu(), lambda x: torch.stack([x])])
def test_torch_does_not_compute_on_the_device(compute: object, device: AcmeDevice) -> None:
    with pytest.raises(RuntimeError, match="outside of a step; there bound ops alone compute"):
        compute(up(device, 1, 2))  # type: ignore[operator]


def test_host_tensors_are_refused_by_ops(acme: Acme, device: AcmeDevice) -> None:
    with pytest.raises(TypeError, match="bring them with Device.to_device"):
        bind(acme.op_priority).add(up(device, 1), torch.ones(1))


def test_memory_is_free_when_tensors_die(device: AcmeDevice) -> None:
    before = device.memory()
    x = device.to_device([np.zeros(MIB, np.float32)])
    assert device.memory().free == before.free - 4 * MIB and device.pool.used["activations"] == 4 * MIB
    del x
    after = device.memory()
    assert (after.free, after.peak) == (before.free, 4 * MIB)


def test_what_does_not_fit_is_named(device: AcmeDevice) -> None:
    with pytest.raises(
        MemoryError, match=r"needs 4.00 GiB, 1.00 GiB of 1.00 GiB are free on acme:0 \(nothing is taken"
    ):
        device.to_device([np.broadcast_to(np.float32(0), (2**30,))])


def test_a_forgotten_device_ends_its_thread() -> None:
    platform = Acme()
    platform.open(3)
    (thread,) = [each for each in threading.enumerate() if each.name == "acme:3"]
    del platform
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_the_fused_op_is_what_its_specification_says(acme: Acme, device: AcmeDevice) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (5, 48), "gate_up": (154, 48), "down": (48, 77)}
    for dtype in (torch.float32, torch.bfloat16):
        host = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        placed = {
            name: acme.place(_weight(name, x, "vector" if name == "x" else "linear"), {name: x})[name]
            for name, x in host.items()
        }
        got = device.to_host(bind(acme.op_priority).acme_gated_mlp(*placed.values(), "silu"))()
        want = ops.acme_gated_mlp(*(each.float() for each in host.values()), "silu")
        off = float((got.float() - want).abs().max() / want.abs().max())
        assert got.dtype == dtype and off < 4 * torch.finfo(dtype).eps


def _weight(name: str, x: Tensor, use: str) -> Weight:
    return Weight(name, (CheckpointSlice(name, tuple(x.shape), ((0, len(x)),)),), 0, 0, x.dtype, use)


def test_a_llama_is_built_of_its_own_parts() -> None:
    model = Subject("acme").runner(variant("llama", "plain")).worker.model
    assert type(model).__module__ == "acme.llama" and type(model.model.layers[-1]) is LastBlock
    assert [type(layer.mlp) for layer in model.model.layers] == [FusedMLP] * 3
    started = {call.kernel for program in _programs(model) for call in program.calls}
    assert kernels.gated_mlp in started


def _programs(model: torch.nn.Module) -> list:
    """Captured anew for a small step."""
    from quintet.interface.types import ShapeBucket

    from acme.compile import Programs
    from acme.tensor import tensors

    programs = Programs(model, tensors(list(model.parameters()))[0].buffer.device)
    programs.add(ShapeBucket(16, 4, 16, (8,)))
    return list(programs._programs.values())


def test_an_op_that_it_lacks_runs_as_its_specification() -> None:
    runner = Subject("acme").runner(variant("qwen3", "plain"))
    assert runner.worker.ops.choice("norm_rotary").provider == "reference"
    tiny, (prompt,) = variant("qwen3", "plain"), random_prompts(1, (9,), 101)
    assert torch.allclose(runner.prompts([prompt])[0], tiny.logits(prompt), atol=1e-4)


def test_its_fp8_ends_at_240(acme: Acme) -> None:
    from acme.attention import decoded, encoded

    assert decoded(encoded(torch.tensor([240.0, 248.0, 1e9, -1e9]), FP8)).tolist() == [240, 240, 240, -240]
    spec = AttentionSpec(4, 2, 16, 0.25, torch.float32, 16, kv_dtype=torch.float8_e4m3fn, alibi=(0.5,) * 4)
    with pytest.raises(ValueError, match="float8_e4m3fn is not read by its kernels.*adds no slopes"):
        acme.mixer(spec, None, 0)


def test_the_chip_is_described_by_a_file(tmp_path: object) -> None:
    path = tmp_path / "chip.json"  # type: ignore[operator]
    path.write_text('{"devices": 2, "memory": 1048576}')
    assert (read(str(path)).devices, read(str(path)).memory) == (2, MIB)
    path.write_text('{"device": 2}')
    with pytest.raises(ValueError, match="device"):
        read(str(path))


def test_a_broken_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHIP, "broken", "error 7")
    assert "the driver says: error 7" in str(Acme.probe())
