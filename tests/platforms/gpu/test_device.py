"""A GPU's device on the fake one: uploads in one copy, copies home behind the next step, memory, sleep."""

import numpy as np
import pytest
import torch

from quintet.interface.types import Layout
from quintet.platforms.gpu import memory
from quintet.platforms.gpu.device import ALIGN, RESERVE, GPUDevice
from tests.platforms.gpu.fake_torch import GIB, FakeRuntime

LAYOUT = Layout(torch.float16, (2, 4, 16, 32))


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def device(runtime: FakeRuntime) -> GPUDevice:
    return GPUDevice(runtime, 0)


def test_arrays_go_up_in_one_copy_and_keep_apart(device: GPUDevice, runtime: FakeRuntime) -> None:
    arrays = [
        np.arange(7, dtype=np.int32), np.zeros((0, 3), np.float32), np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(5, dtype=np.uint8), np.arange(6, dtype=np.int64).reshape(1, 2, 3), np.int32([[9]]),
        np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2],
    ]  # fmt: skip
    there = device.to_device(arrays)
    assert runtime.copies == 1
    for array, x in zip(arrays, there, strict=True):
        assert tuple(x.shape) == array.shape and np.array_equal(x.numpy(), array)
        assert x.is_contiguous() and (x.data_ptr() - there[0].data_ptr()) % ALIGN == 0
    there[0].fill_(-1)
    assert np.array_equal(there[2].numpy(), arrays[2])


def test_nothing_is_uploaded_without_a_copy(device: GPUDevice, runtime: FakeRuntime) -> None:
    assert [tuple(x.shape) for x in device.to_device([np.zeros((0, 2), np.int32)])] == [(0, 2)]
    assert device.to_device([]) == () and runtime.copies == 0


def test_what_goes_home_is_waited_for_by_who_wants_it(device: GPUDevice, runtime: FakeRuntime) -> None:
    x, y = torch.arange(6.0).reshape(2, 3), torch.arange(4, dtype=torch.int32)
    first, second = device.to_host(x), device.to_host(y)
    assert device._to_host_stream.done == 0, "nothing has been waited for"
    assert torch.equal(first(), x)
    assert device._to_host_stream.done == 2, "the second copy is still on its way"
    assert torch.equal(second(), y) and torch.equal(second(), y)
    assert runtime.calls.count("hold") == 2, "their memory is kept from others until they are home"


def test_nothing_comes_home_at_once(device: GPUDevice) -> None:
    assert device.to_host(torch.empty(0, 5))().shape == (0, 5)


def test_slices_come_home_as_they_are(device: GPUDevice) -> None:
    x = torch.arange(12).reshape(3, 4)
    assert torch.equal(device.to_host(x.t()[1:])(), x.t()[1:])


@pytest.mark.parametrize("count", [1, 999, 5000])
def test_weights_go_up_through_two_pieces(count: int, device: GPUDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK", 1024)
    x = torch.randn(count, 3)
    there = device.upload(x, torch.bfloat16)
    assert there.dtype == torch.bfloat16 and torch.equal(there, x.bfloat16())
    assert torch.equal(device.upload(x.t(), torch.float32), x.t())


def test_the_cache_is_zeros_and_counted(device: GPUDevice) -> None:
    before = device.memory().free
    kv = device.allocate([LAYOUT, LAYOUT], 10)
    assert [tuple(x.shape) for x in kv] == [(10, 2, 4, 16, 32)] * 2 and not any(x.any() for x in kv)
    assert before - device.memory().free == device.tagged_memory.nbytes("cache") == 20 * LAYOUT.nbytes
    del kv
    assert device.memory().free == before and device.tagged_memory.nbytes("cache") == 0


def test_a_cache_of_fp8_is_zeros(device: GPUDevice) -> None:
    (kv,) = device.allocate([Layout(torch.float8_e4m3fn, (2, 1, 16, 8))], 3)
    assert kv.dtype == torch.float8_e4m3fn and not kv.float().any()


def test_a_cache_that_does_not_fit_says_by_how_much(device: GPUDevice) -> None:
    with pytest.raises(MemoryError, match=r"KV cache of 99999 pages needs 0\.\d+ GiB|needs [\d.]+ GiB, 0\.50 GiB are"):
        device.allocate([LAYOUT], 99_999)


def test_fragments_are_told_like_too_little(device: GPUDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is free, and no allocation finds room."""

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(FakeRuntime, "empty", refuse)
    with pytest.raises(MemoryError, match=r"KV cache of 2 pages needs .* \(out of memory\)"):
        device.allocate([LAYOUT], 2)


def test_two_share_a_device_and_each_sees_what_is_left(runtime: FakeRuntime) -> None:
    first, second = GPUDevice(runtime, 0), GPUDevice(runtime, 0)
    kv = first.allocate([LAYOUT], 1000)
    assert second.memory().total == GIB
    assert second.memory().free == GIB - RESERVE - 1000 * LAYOUT.nbytes
    assert second.tagged_memory.nbytes("cache") == 0 and len(kv) == 1


def test_asleep_weights_are_on_the_host_and_the_cache_is_gone(device: GPUDevice) -> None:
    weight = device.upload(torch.arange(12.0).reshape(3, 4), torch.float32)
    view = weight[1:]  # a tied head
    (kv,) = device.allocate([LAYOUT], 4)
    kv.fill_(3)
    device.tagged_memory.track("weights", [weight, view])
    freed = device.tagged_memory.sleep(1)
    assert freed == 12 * 4 + 4 * LAYOUT.nbytes
    assert (
        device.tagged_memory.nbytes("weights") == device.tagged_memory.nbytes("cache") == 0
        and device.tagged_memory.asleep
    )
    with pytest.raises(ValueError, match="is asleep; wake it first"):
        device.tagged_memory.sleep(2)
    device.tagged_memory.wake()
    assert torch.equal(weight, torch.arange(12.0).reshape(3, 4)) and torch.equal(view, weight[1:])
    assert not kv.any() and not device.tagged_memory.asleep and device.tagged_memory.generation == 1


def test_a_layers_parameter_sleeps_with_what_it_was_made_of(device: GPUDevice) -> None:
    weight = device.upload(torch.ones(5), torch.float32)
    device.tagged_memory.track("weights", [weight])
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    del weight
    assert device.tagged_memory.sleep(1) == 20 and parameter.untyped_storage().nbytes() == 0
    device.tagged_memory.wake()
    assert parameter.tolist() == [1] * 5


def test_at_level_two_weights_are_dropped(device: GPUDevice) -> None:
    weight = device.upload(torch.ones(3), torch.float32)
    device.tagged_memory.track("weights", [weight])
    device.tagged_memory.sleep(2)
    device.tagged_memory.wake()
    assert weight.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="must be 1 .* or 2"):
        device.tagged_memory.sleep(3)


def test_what_was_let_go_is_not_brought_back(device: GPUDevice) -> None:
    weight = device.upload(torch.ones(3), torch.float32)
    device.tagged_memory.track("weights", [weight])
    device.tagged_memory.sleep(1)
    del weight
    device.tagged_memory.wake()
    assert device.tagged_memory.nbytes("weights") == 0
