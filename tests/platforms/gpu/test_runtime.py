"""What is asked of torch itself: a stand-in for torch.cuda notes it, and fails as torch 2.11 does."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quintet.platforms.gpu import runtime
from quintet.platforms.gpu.runtime import TorchRuntime


class Cuda:
    """torch.cuda's names. `invalid`: the capture is invalidated by what runs in it."""

    def __init__(self, invalid: bool) -> None:
        self.invalid, self.said = invalid, list[Any]()
        outer = self

        class CUDAGraph:
            def capture_begin(self, **how: Any) -> None:
                outer.said.append("begin")

            def capture_end(self) -> None:
                outer.said.append("end")
                if outer.invalid:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

        self.CUDAGraph = CUDAGraph

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    def current_stream(self) -> Any:
        return self.Stream()

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.said.append("on")
        yield
        self.said.append("off")

    def empty_cache(self) -> None:
        self.said.append("empty")

    def current_device(self) -> int:
        return 3


def test_pinned_memory_that_is_refused_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(said: str) -> None:
        def empty(*shape: Any, **how: Any) -> None:
            raise RuntimeError(said)

        monkeypatch.setattr(torch, "empty", empty)

    refusing("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
    with pytest.raises(MemoryError, match="no 64 bytes of pinned memory on the host .CUDA error: out of memory.; free"):
        TorchRuntime(Cuda(False), "cuda").pinned(64)
    refusing("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        TorchRuntime(Cuda(False), "cuda").pinned(64)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch's allocator was told."""
    told: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *of: told.append(("end", *of)), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *of: told.append(("release", *of)), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: told.append("clear"), raising=False)
    return told


def failing() -> None:
    raise ValueError("the first thing that went wrong")


@pytest.mark.parametrize("keeps", [False, True])
def test_an_invalidated_capture_ends_its_pool_and_the_first_error_stays(
    keeps: bool, allocator: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "KEEPS_POOLS", keeps)
    cuda = Cuda(invalid=True)
    with pytest.raises(ValueError, match="the first thing that went wrong"):
        TorchRuntime(cuda, "cuda").capture(failing, (0, 7), Cuda.Stream())
    assert cuda.said[:3] == ["on", "begin", "end"]
    assert allocator == [("end", 3, (0, 7)), *[("release", 3, (0, 7))] * keeps]


def test_a_capture_that_cannot_be_ended_is_abandoned_too(allocator: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="previous error during capture"):
        TorchRuntime(Cuda(invalid=True), "cuda").capture(lambda: None, (0, 7), Cuda.Stream())
    assert allocator[0] == ("end", 3, (0, 7))


def test_what_fails_and_invalidates_nothing_is_ended_as_it_is(allocator: list[Any]) -> None:
    """As where memory is gone: torch ends the pool itself, and ending it twice would be an error."""
    cuda = Cuda(invalid=False)
    with pytest.raises(ValueError, match="the first thing"):
        TorchRuntime(cuda, "cuda").capture(failing, (0, 7), Cuda.Stream())
    assert cuda.said[:3] == ["on", "begin", "end"] and not allocator


def test_a_pool_that_torch_has_ended_itself_is_no_error(allocator: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*of: Any) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended, raising=False)
    with pytest.raises(ValueError, match="the first thing"):
        TorchRuntime(Cuda(invalid=True), "cuda").capture(failing, (0, 7), Cuda.Stream())


def test_workspaces_of_products_are_let_go_of_where_there_are_some(allocator: list[Any]) -> None:
    cuda = Cuda(False)
    TorchRuntime(cuda, "cuda").release()
    assert not allocator and cuda.said == ["empty"]
    TorchRuntime(cuda, "cuda").release(workspaces=True)
    TorchRuntime(cuda, "xpu").release(workspaces=True)
    assert allocator == ["clear"] and cuda.said == ["empty"] * 3
