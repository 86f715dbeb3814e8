"""Whole experts for ranks: which has which (expert parallelism), and where a rank finds those of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Placement = tuple[tuple[int, ...], ...]  # of each rank: the expert in each place of its stacks
COPY_COLUMNS = 16  # of the table of experts that have copies: a token's first numbers choose its column


@dataclass(frozen=True)
class ExpertPlacement:
    """Settings of expert placement when a model is built."""

    strategy: str = "linear"  # or "round_robin"
    redundant_experts: int = 0  # of experts, beside one of each
    eplb: bool = False  # loads are counted, and experts may go to other ranks

    @property
    def columns(self) -> int:
        return COPY_COLUMNS if self.redundant_experts else 1

    def placement(self, experts: int, size: int) -> Placement:
        """Returns the initial experts of each rank. ValueError where a rank would have none."""
        if experts < size:
            raise ValueError(
                f"{experts} experts cannot be dealt out to {size} ranks: some would have none; lower "
                "tensor_parallel_size, or leave enable_expert_parallel out"
            )
        if self.redundant_experts > experts * (size - 1):
            raise ValueError(
                f"num_redundant_experts={self.redundant_experts}: {experts} experts on each of {size} ranks are "
                f"{experts * (size - 1)} copies at most; lower it"
            )
        apart = int(experts % size == 0)  # round robin, the copy of the first expert would come to its own rank
        every = [*range(experts), *((copy + apart) % experts for copy in range(self.redundant_experts))]
        if self.strategy == "round_robin":
            return tuple(tuple(every[rank::size]) for rank in range(size))
        bounds = [0]
        for room in slots_per_rank(len(every), size):
            bounds.append(bounds[-1] + room)
        return tuple(tuple(every[start:stop]) for start, stop in zip(bounds[:-1], bounds[1:], strict=True))


class RankExperts:
    """Expert placement of one layer, as one rank sees it."""

    def __init__(self, expert_placement: ExpertPlacement, experts: int, rank: int, size: int) -> None:
        self.initial_placement = self.placement = expert_placement.placement(experts, size)
        self.experts, self.rank, self.eplb, self._columns = (
            experts,
            rank,
            expert_placement.eplb,
            expert_placement.columns,
        )

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The expert in each of this rank's places."""
        return self.placement[self.rank]

    @property
    def remote_experts(self) -> list[int]:
        """Experts of which it keeps nothing."""
        return sorted(set(range(self.experts)) - set(self.local_experts))

    def table(self, placement: Placement | None = None) -> Tensor:
        """[E, columns] int32, as local_experts() takes it."""
        rows = []
        for copies in ranks_of(placement or self.placement, self.experts):
            taken = [copies[column % len(copies)] for column in range(self._columns)]
            rows.append([place if owner == self.rank else -1 for owner, place in taken])
        return torch.tensor(rows, dtype=torch.int32)

    def constants(self) -> dict[str, Tensor]:
        counted = {"loads": torch.zeros(self.experts, dtype=torch.int32)} if self.eplb else {}
        return {"places": self.table(), **counted}


def slots_per_rank(places: int, size: int) -> list[int]:
    """Places of each rank: as even as integers allow, the first ones have what is left."""
    return [places // size + (rank < places % size) for rank in range(size)]


def ranks_of(placement: Placement, experts: int) -> list[list[tuple[int, int]]]:
    """(rank, place) of each expert's copies: one on each rank that has any."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for rank, own in enumerate(placement):
        for place, expert in enumerate(own):
            if not found[expert] or found[expert][-1][0] != rank:
                found[expert].append((rank, place))
    return found


def format_expert_ids(own: Sequence[int]) -> str:
    """A rank's experts for people: "0-3", "0, 2, 4"."""
    runs: list[list[int]] = []
    for expert in sorted(own):
        if runs and expert == runs[-1][-1] + 1:
            runs[-1].append(expert)
        else:
            runs.append([expert])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
