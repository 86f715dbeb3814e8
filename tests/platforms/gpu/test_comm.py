"""The communicator over real process groups (gloo, between threads), and the small sum where a library is there."""

import contextlib
import ctypes
import os
import queue
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quintet.conformance.harness.worker_runner import RankInfo, random_prompts
from quintet.platforms.gpu import custom_all_reduce as small_sum
from quintet.platforms.gpu.comm import GroupCommunicator, InProcessStores, process_group
from quintet_tools.checkpoints.tiny import PLAIN, make, variant
from tests.helpers.platforms.run_model import Runner
from tests.platforms.gpu.fake_torch import FakeGPU, fake_platform

ROOT = Path(__file__).parents[3]
SIZES = (2, 3)


def each_rank(size: int, work: Callable[[int], Any]) -> list[Any]:
    """work(rank) on every rank at once; the first error is raised, though others may wait for that rank without end."""
    done: queue.SimpleQueue[tuple[int, Any, Exception | None]] = queue.SimpleQueue()

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            done.put((rank, work(rank), None))
        except Exception as error:
            done.put((rank, None, error))

    for rank in range(size):
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    results: dict[int, Any] = {}
    while len(results) < size:
        rank, result, error = done.get()
        if error is not None:
            raise error
        results[rank] = result
    return [results[rank] for rank in range(size)]


def free_port() -> int:
    """Below those that go to whoever asks for any: nobody gets it between now and its use."""
    for port in range(20_000 + os.getpid() % 5000, 32_000):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def given(rank: int) -> Tensor:
    """Whole numbers: their sums have no order."""
    return torch.randint(-99, 99, (6, 12), generator=torch.Generator().manual_seed(rank)).float()


def collect(size: int, call: str, *args: int) -> list[Tensor]:
    meeting = InProcessStores()

    def work(rank: int) -> Tensor:
        group = dist.ProcessGroupGloo(meeting.store(rank, size, "inproc://here"), rank, size)
        comm = GroupCommunicator(group, rank, size)
        result: Tensor = getattr(comm, call)(given(rank).t().contiguous().t(), *args)
        return result

    return each_rank(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_is_the_sum_everywhere(size: int) -> None:
    for result in collect(size, "all_reduce"):
        assert torch.equal(result, sum(map(given, range(size))))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_joins_in_rank_order(size: int, dim: int) -> None:
    for result in collect(size, "all_gather", dim):
        assert torch.equal(result, torch.cat([given(rank) for rank in range(size)], dim))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_gives_each_rank_its_share(size: int, dim: int) -> None:
    for rank, result in enumerate(collect(size, "reduce_scatter", dim)):
        assert torch.equal(result, sum(map(given, range(size))).chunk(size, dim)[rank])


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_sends_piece_i_to_rank_i(size: int, dim: int) -> None:
    for rank, result in enumerate(collect(size, "all_to_all", dim)):
        assert torch.equal(result, torch.cat([given(other).chunk(size, dim)[rank] for other in range(size)], dim))


def test_what_does_not_divide_is_refused() -> None:
    comm = GroupCommunicator(None, 0, 4)
    with pytest.raises(ValueError, match="6 cannot be cut into 4 equal pieces"):
        comm.all_to_all(given(0), 0)


def test_ranks_meet_over_files_and_sockets(tmp_path: Path) -> None:
    """As those of several processes do."""
    for endpoint in (f"file://{tmp_path}/store", f"tcp://127.0.0.1:{free_port()}"):

        def work(rank: int, endpoint: str = endpoint) -> Tensor:
            group = dist.ProcessGroupGloo(InProcessStores().store(rank, 2, endpoint), rank, 2)
            return GroupCommunicator(group, rank, 2).all_reduce(given(rank))

        for result in each_rank(2, work):
            assert torch.equal(result, given(0) + given(1)), endpoint


@pytest.mark.parametrize(
    ("rank", "size", "endpoint", "words"),
    [
        (2, 2, "inproc://here", "rank 2 of 2"),
        (1, 3, "inproc://here", "where 2 ranks meet"),
        (0, 2, "over there", "neither inproc"),
    ],
)
def test_a_wrong_place_is_refused(rank: int, size: int, endpoint: str, words: str) -> None:
    meeting = InProcessStores()
    meeting.store(0, 2, "inproc://here")
    with pytest.raises(ValueError, match=words):
        meeting.store(rank, size, endpoint)


@pytest.mark.skipif(hasattr(dist, "ProcessGroupNCCL"), reason="this torch has NCCL")
def test_without_nccl_several_ranks_say_so() -> None:
    with pytest.raises(RuntimeError, match="2 ranks need NCCL.*set tensor_parallel_size to 1"):
        process_group("NCCL", dist.HashStore(), 0, 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_on_several_ranks_equals_one(family: str, size: int) -> None:
    """With graphs, whose sums are those of all ranks."""
    tiny = variant(family, "plain") if size == 3 else make(family, {**PLAIN, "vocab_size": 103})
    prompts = random_prompts(3, (19, 1, 33), 101)
    alone = Runner(tiny)
    wanted = alone.prompts(prompts), alone.greedy(prompts, 4)
    platform: FakeGPU = fake_platform(tensor_parallel_size=size, max_num_seqs=8)

    def work(rank: int) -> Any:
        run = Runner(tiny, platform=platform, rank_info=RankInfo(rank, size, "inproc://model"))
        return run.prompts(prompts), run.greedy(prompts, 4)

    for logits, tokens in each_rank(size, work):
        assert tokens == wanted[1]
        for got, want in zip(logits, wanted[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.std()))


# --------------------------------------------------------------------------------------------------- small sums


class Library:
    """What csrc/cuda offers, over the memory of this process."""

    def __init__(self, reaches: bool = True, opens: tuple[int, ...] = (0, 0, 0), answers: bool = True) -> None:
        self._reaches, self._opens, self._answers = reaches, opens, answers
        self.calls: list[tuple[int, ...]] = []

    def quintet_comm_reaches(self, devices: Any, count: int, reaches: Any) -> int:
        reaches._obj.value = int(self._reaches)
        return 0 if self._answers else 1

    def quintet_comm_open(self, devices: Any, count: int, rank: int, region: Any) -> int:
        region._obj.value = 1000 + rank
        return self._opens[rank]

    def quintet_comm_all_reduce(self, regions: Any, rank: int, ranks: int, x: Any, out: Any, *rest: Any) -> int:
        count, dtype, stream = rest
        self.calls.append((rank, ranks, count.value, dtype, stream.value))
        assert list(regions) == [1000 + other for other in range(ranks)]
        ctypes.memmove(out.value, x.value, count.value * 4)
        return 0 if stream.value == 7 else 2

    def quintet_comm_error(self, code: int) -> bytes:
        return b"out of memory" if code == 2 else b"another"


def joined(library: Library, size: int = 3, queue: int = 7) -> list[Any]:
    store = dist.HashStore()
    return each_rank(size, lambda rank: small_sum.join(library, store, rank, size, lambda: queue))


def test_small_sums_take_their_own_way_and_large_ones_do_not() -> None:
    library = Library()
    for rank, small in enumerate(joined(library)):
        comm = GroupCommunicator(None, rank, 3, small)
        assert torch.equal(comm.all_reduce(given(rank)), given(rank)), "as the stand-in has it"
    assert sorted(library.calls) == [(rank, 3, 72, 0, 7) for rank in range(3)]
    large = torch.zeros(small_sum.MAX_BYTES // 4 + 4)
    others = [large, torch.zeros(3), torch.zeros(8, dtype=torch.int32), torch.zeros(4, 8).t(), torch.zeros(0)]
    others += [torch.zeros(9)[1:]]
    assert [small.supports(x) for x in others] == [False] * len(others)
    assert [small.supports(torch.zeros(8, dtype=d)) for d in (torch.float16, torch.bfloat16, torch.float32)] == [
        True
    ] * 3


def test_a_sum_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="small-message sum failed: out of memory"):
        joined(Library(), queue=1)[0](given(0))


def test_reasons_why_sums_are_left_to_nccl() -> None:
    assert set(joined(Library(reaches=False))) == {"the devices do not reach each other's memory"}
    assert set(joined(Library(answers=False))) == {"the devices cannot be asked: another"}
    assert all("could not open its region" in each for each in joined(Library(opens=(0, 2, 0)))), "on every rank alike"
    assert small_sum.join(Library(), None, 0, 9, None) == "9 ranks, and it serves up to 8"
    assert "was not built" in small_sum.load("quintet._no_such_library")
    broken = small_sum.load(__name__)
    assert isinstance(broken, str) and "cannot be loaded" in broken


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100"])
def test_its_kernel_compiles_without_warnings_and_spills_nothing(architecture: str, tmp_path: Path) -> None:
    flags = ["-c", "-std=c++17", f"-arch={architecture}", "-Werror", "all-warnings", "-Xptxas", "-v,-warn-spills"]
    flags += ["-Xcompiler", "-Wall,-Wextra,-Werror,-Wshadow,-Wconversion"]
    source = ROOT / "csrc" / "cuda" / "all_reduce.cu"
    done = subprocess.run(
        ["nvcc", *flags, str(source), "-o", str(tmp_path / "out.o")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    spilled = [line for line in done.stderr.splitlines() if "spill" in line]
    assert len(spilled) == 3 and all("0 bytes spill stores, 0 bytes spill loads" in line for line in spilled)
