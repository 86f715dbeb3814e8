"""The loopback communicator keeps the Communicator contract, at sizes 1, 2 and 3."""

import threading

import pytest
import torch
from torch import Tensor

from quintet.platforms.interface import Communicator
from tests.helpers.loopback import LoopbackPlatform, each_rank

SIZES = (1, 2, 3)


def given(rank: int) -> Tensor:
    """A [6, 12] tensor of this rank's own; its sums depend on their order."""
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (4 * rank)


def collect(size: int, call: str, *args: int) -> list[Tensor]:
    platform = LoopbackPlatform()

    def work(rank: int, endpoint: str) -> Tensor:
        comm: Communicator = platform.connect(rank, size, endpoint)
        assert (comm.rank, comm.size) == (rank, size)
        result: Tensor = getattr(comm, call)(given(rank), *args)
        return result

    return each_rank(platform, size, work)


def total(size: int) -> Tensor:
    out = given(0)
    for rank in range(1, size):
        out = out + given(rank)
    return out


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_sums_in_rank_order_everywhere(size: int) -> None:
    for result in collect(size, "all_reduce"):
        assert torch.equal(result, total(size))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_joins_in_rank_order(size: int, dim: int) -> None:
    for result in collect(size, "all_gather", dim):
        assert torch.equal(result, torch.cat([given(rank) for rank in range(size)], dim))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_gives_each_rank_its_share_of_the_sum(size: int, dim: int) -> None:
    for rank, result in enumerate(collect(size, "reduce_scatter", dim)):
        assert torch.equal(result, total(size).chunk(size, dim)[rank])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_sends_piece_i_to_rank_i(size: int, dim: int) -> None:
    for rank, result in enumerate(collect(size, "all_to_all", dim)):
        assert torch.equal(result, torch.cat([given(other).chunk(size, dim)[rank] for other in range(size)], dim))


def test_callers_may_overwrite_what_they_gave() -> None:
    platform = LoopbackPlatform()

    def work(rank: int, endpoint: str) -> list[Tensor]:
        comm, x, seen = platform.connect(rank, 2, endpoint), torch.full((4,), float(rank)), []
        for _ in range(50):
            seen.append(comm.all_gather(x, 0))
            x += 10
        return seen

    first, second = each_rank(platform, 2, work)
    for step, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a, b)
        assert a.tolist() == [10.0 * step] * 4 + [10.0 * step + 1] * 4


def test_a_rank_that_raises_does_not_hang_the_others() -> None:
    platform = LoopbackPlatform()

    def work(rank: int, endpoint: str) -> Tensor:
        comm = platform.connect(rank, 3, endpoint)
        if rank == 1:
            raise RuntimeError("rank 1 fell over")
        return comm.all_reduce(given(rank))

    with pytest.raises(RuntimeError, match="rank 1 fell over"):
        each_rank(platform, 3, work)
    assert threading.active_count() < 10


def test_ranks_that_disagree_on_the_size_are_refused() -> None:
    platform = LoopbackPlatform()
    platform.connect(0, 2, "here")
    with pytest.raises(ValueError, match="2 ranks meet"):
        platform.connect(1, 3, "here")
