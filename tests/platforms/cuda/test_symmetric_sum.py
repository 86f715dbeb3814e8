"""Sums over symmetric memory against a stand-in whose functions are bound to torch's own signatures."""

import importlib
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quintet.interface.types import RankInfo
from quintet.platforms.cuda import symm_mem_all_reduce as symmetric_sum
from quintet.platforms.cuda.platform import CUDA
from quintet.platforms.cuda.symm_mem_all_reduce import SymmetricAllReduce, SymmetricMemory, join
from tests.platforms.gpu.test_comm import each_rank


class Shared:
    """What the ranks of one sum see of each other."""

    def __init__(self, size: int) -> None:
        self.spaces: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * size
        self.barrier = threading.Barrier(size)

    def library(self, rank: int, fails: str = "", off: float = 0.0) -> SymmetricMemory:
        def empty(nbytes: int) -> Tensor:
            return torch.zeros(nbytes, dtype=torch.uint8)

        def meet(space: Tensor, name: str, store: Any, own: int, size: int) -> None:
            if fails:
                raise RuntimeError(fails)
            assert own == rank and size == len(self.spaces)
            self.spaces[rank] = space

        def add(symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: str) -> Tensor:
            assert reduce_op == "sum" and group_name == "here" and symm_buffer.shape == local_input.shape
            symm_buffer.copy_(local_input)
            self.barrier.wait()
            count = local_input.numel() * local_input.element_size()
            total = torch.zeros_like(local_input)
            for each in self.spaces:
                total = total + each[:count].view(local_input.dtype).view(local_input.shape)
            self.barrier.wait()
            return total + off

        return SymmetricMemory(empty, meet, add)


def test_torchs_functions_are_called_as_they_are() -> None:
    """Of the torch that is installed; 2.11's are the same."""
    schema = torch.ops.symm_mem.one_shot_all_reduce_copy.default._schema
    assert [each.name for each in schema.arguments] == ["symm_buffer", "local_input", "reduce_op", "group_name"]
    symmetric: Any = importlib.import_module("torch._C._distributed_c10d")._SymmetricMemory
    assert "(size: Tuple[int, ...], stride: Tuple[int, ...], dtype" in symmetric.empty_strided_p2p.__doc__
    assert "rendezvous(tensor: torch.Tensor, group_name: str" in symmetric.rendezvous.__doc__
    assert isinstance(symmetric_sum.load(torch.device("cpu")), SymmetricMemory)


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_is_the_same_everywhere(size: int) -> None:
    shared, store = Shared(size), dist.HashStore()

    def work(rank: int) -> list[Tensor]:
        made = join(shared.library(rank), store, rank, size, "here")
        assert isinstance(made, SymmetricAllReduce)
        found = []
        for shape, dtype in (((4, 8), torch.bfloat16), ((2, 4), torch.float32), ((64,), torch.bfloat16)):
            x = torch.full(shape, 1.0 + rank, dtype=dtype)
            assert made.supports(x)
            found.append(made(x))
        for x in (torch.ones(3), torch.ones(8).half(), torch.ones(4, 8).t(), torch.ones(2**17)):
            assert not made.supports(x)
        return found

    first, *others = each_rank(size, work)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))
    assert {float(x.float().max()) for x in first} == {size * (size + 1) / 2}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no symmetric memory", "rank 1: no symmetric memory"),
        ({"fails": "CUDA driver error: peer access is not supported"}, "rank 1: RuntimeError: CUDA driver error: peer"),
        ({"off": 1.0}, "rank 1: a sum gave 4.0, not 3"),
    ],
)
def test_all_ranks_go_on_or_none(given: Any, said: str) -> None:
    """One that cannot takes the others along, with its reason."""
    shared, store = Shared(2), dist.HashStore()

    def work(rank: int) -> Any:
        ours: SymmetricMemory | str = shared.library(rank)
        if rank == 1:
            ours = given if isinstance(given, str) else shared.library(rank, **given)
        return join(ours, store, rank, 2, "here")

    for found in each_rank(2, work):
        assert isinstance(found, str) and found.startswith(said)


def test_ranks_of_one_process_do_not_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(symmetric_sum, "join", lambda library, store, rank, size, name: asked.append(name) or "no")
    platform = CUDA()
    assert platform._small_all_reduce(dist.HashStore(), RankInfo(0, 2, "inproc://here")) is None and not asked
    assert platform._small_all_reduce(dist.HashStore(), RankInfo(0, 2, "tcp://127.0.0.1:1")) is None and len(asked) == 1
