"""The loopback communicator keeps the Communicator contract, by the kit's section, and sums in rank order."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quintet.conformance import kit
from quintet.conformance.harness.subject import Subject
from quintet.conformance.report import TrialOutcome
from quintet.interface.platform import Capabilities
from quintet.interface.types import RankInfo
from tests.helpers.platforms.loopback import LoopbackPlatform, each_rank


def given(rank: int) -> Tensor:
    """A [6, 12] tensor of this rank's own; its sums depend on their order."""
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (4 * rank)


@pytest.mark.slow
def test_it_conforms() -> None:
    """Every collective, races, and a model shared out, on 2 and on 3 ranks."""
    subject, facts = Subject("cpu"), LoopbackPlatform.probe()
    assert isinstance(facts, Capabilities)
    subject.chosen, subject.facts = replace(subject.chosen, platform=LoopbackPlatform, capabilities=facts), facts
    results = kit.run(subject, ["communicator"]).results
    stages = [each for each in results if " stages" in each.what]
    assert [
        f"{each.what}: {each.detail}"
        for each in results
        if each.outcome is not TrialOutcome.PASSED and each not in stages
    ] == []
    assert stages and all(
        "pipeline_parallel_size is refused" in each.detail for each in stages
    )  # its ranks are threads
    proven = {feature for each in results if each.outcome is TrialOutcome.PASSED for feature in each.features}
    assert proven == {"parallel/2", "parallel/3"}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_sums_in_rank_order_everywhere(size: int) -> None:
    """More than the contract asks: what is shared out can then be held against one rank bit for bit."""
    platform, total = LoopbackPlatform(), given(0)
    for rank in range(1, size):
        total = total + given(rank)

    def work(rank: int, endpoint: str) -> Tensor:
        return platform.connect(RankInfo(rank, size, endpoint)).all_reduce(given(rank))

    for result in each_rank(platform, size, work):
        assert torch.equal(result, total)


def test_a_rank_that_raises_does_not_hang_the_others() -> None:
    platform = LoopbackPlatform()

    def work(rank: int, endpoint: str) -> Tensor:
        comm = platform.connect(RankInfo(rank, 3, endpoint))
        if rank == 1:
            raise RuntimeError("rank 1 fell over")
        return comm.all_reduce(given(rank))

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="rank 1 fell over"):
        each_rank(platform, 3, work)
    assert threading.active_count() <= before


def test_ranks_that_disagree_on_the_size_are_refused() -> None:
    platform = LoopbackPlatform()
    platform.connect(RankInfo(0, 2, "here"))
    with pytest.raises(ValueError, match="2 ranks meet"):
        platform.connect(RankInfo(1, 3, "here"))
