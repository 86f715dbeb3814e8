"""The ranks of one model, as threads of this process, as an engine runs them: every collective by its definition."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quintet.conformance.check import ContractViolation, NotSupported, Trial, check, require
from quintet.conformance.close import dtype_name
from quintet.conformance.harness import pipelines as pipes
from quintet.conformance.harness.rank_threads import Hung, RankTeam, TestRank, equal, no_ranks, sizes_of
from quintet.conformance.harness.subject import Subject
from quintet.interface.stage_channel import StageChannel
from quintet.interface.types import RankInfo

ROUNDS = 100  # collectives in a row
SHAPES = ((12, 12), (12, 84), (24, 36_012))  # small, odd, and too large for a path that is made for small sums
DIMS = (0, 1, -1)


class TeamPool:
    """Teams of one subject: each size connects once, and anew after an error, which may have left ranks waiting."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._made: dict[int, RankTeam] = {}
        self._hung: set[int] = set()

    def trial(self, size: int, call: Callable[..., None], *arguments: Any) -> None:
        if size in self._hung:
            raise ContractViolation(f"not tried: {size} ranks waited for each other without end before")
        try:
            if size not in self._made:
                self._made[size] = RankTeam(self._subject, size)
            call(self._made[size], *arguments)
        except Exception as error:
            self._made.pop(size, None)
            if isinstance(error, Hung):
                self._hung.add(size)
            raise

    def close(self) -> None:
        for team in self._made.values():
            team.close()


def rank_tensor(rank: int, shape: Sequence[int], dtype: torch.dtype, turn: int = 0) -> Tensor:
    """Returns a rank's own tensor; sums of its numbers depend on their order."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return (torch.randn(tuple(shape), generator=generator) * 10.0 ** (rank % 3)).to(dtype)


@check("communicator.alone")
def one_rank(subject: Subject) -> Iterator[Trial]:
    def alone() -> None:
        _ = subject.device
        comm, x = subject.platform.connect(RankInfo()), rank_tensor(0, (6, 4), torch.float32)
        require((comm.rank, comm.size) == (0, 1), f"rank 0 of 1 got rank {comm.rank} of {comm.size}")
        for name, arguments in (
            ("all_reduce", ()),
            ("all_gather", (0,)),
            ("reduce_scatter", (1,)),
            ("all_to_all", (0,)),
        ):
            there = getattr(comm, name)(subject.up(x), *arguments)
            require(torch.equal(subject.down(there), x), f"{name}{arguments} on one rank changed what it was given")

    yield Trial("every collective", alone)


@check("communicator.collectives")
def collectives(subject: Subject) -> Iterator[Trial]:
    if subject.facts.spmd or subject.facts.devices == 1:
        yield Trial("more than one rank", partial(no_ranks, subject))
        return
    teams = TeamPool(subject)
    for size in sizes_of(subject):
        features = (f"parallel/{size}",)
        for dtype in subject.facts.dtypes:
            for what, call in COLLECTIVES.items():
                trial = partial(teams.trial, size, call, dtype)
                yield Trial(f"{what} on {size} ranks in {dtype_name(dtype)}", trial, features)
        for what, race in RACES.items():
            yield Trial(f"{ROUNDS} {what} on {size} ranks", partial(teams.trial, size, race), features)
    teams.close()


def _total(size: int, shape: Sequence[int], dtype: torch.dtype, turn: int = 0) -> Tensor:
    return torch.stack([rank_tensor(rank, shape, dtype, turn).double() for rank in range(size)]).sum(0)


def _near(got: Tensor, want: Tensor, dtype: torch.dtype, what: str) -> None:
    """A sum of `size` numbers: a few roundings, at the size of the largest of them."""
    require(got.dtype == dtype, f"{what} came in {got.dtype}, and {dtype} was given")
    require(got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    limit = 4 * torch.finfo(dtype).eps * float(want.abs().max())
    error = (got.double() - want).abs()
    if not float(error.max()) <= limit:
        at = int(error.nan_to_num(torch.inf).argmax())
        came, wanted = float(got.flatten()[at]), float(want.flatten()[at])
        raise ContractViolation(f"{what}: element {at} is {came:.6g}, wanted {wanted:.6g}, {limit:.3g} off is allowed")


def _collect(team: RankTeam, call: str, shape: Sequence[int], dtype: torch.dtype, *arguments: int) -> list[Tensor]:
    def work(rank: TestRank) -> Tensor:
        return rank.down(getattr(rank.comm, call)(rank.up(rank_tensor(rank.rank, shape, dtype)), *arguments))

    return team.run_on_all(work)


def _reduced(team: RankTeam, dtype: torch.dtype) -> None:
    for shape in (*SHAPES, (1, 1), (7,), (5, 3, 11)):
        first, *others = _collect(team, "all_reduce", shape, dtype)
        _near(first, _total(team.size, shape, dtype), dtype, f"the sum of {shape}")
        for rank, other in enumerate(others, 1):
            equal(other, first, f"the sum of {shape} on rank {rank}, held against rank 0's")


def _gathered(team: RankTeam, dtype: torch.dtype) -> None:
    for shape in (*SHAPES, (1, 5), (7, 3)):
        for dim in DIMS:
            want = torch.cat([rank_tensor(rank, shape, dtype) for rank in range(team.size)], dim)
            for rank, got in enumerate(_collect(team, "all_gather", shape, dtype, dim)):
                equal(got, want, f"all_gather of {shape} along {dim} on rank {rank}")


def _scattered(team: RankTeam, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for dim in DIMS:
            shares = _total(team.size, shape, dtype).chunk(team.size, dim)
            for rank, got in enumerate(_collect(team, "reduce_scatter", shape, dtype, dim)):
                _near(got, shares[rank], dtype, f"reduce_scatter of {shape} along {dim} on rank {rank}")


def _exchanged(team: RankTeam, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for dim in DIMS:
            pieces = [rank_tensor(rank, shape, dtype).chunk(team.size, dim) for rank in range(team.size)]
            for rank, got in enumerate(_collect(team, "all_to_all", shape, dtype, dim)):
                want = torch.cat([each[rank] for each in pieces], dim)
                equal(got, want, f"all_to_all of {shape} along {dim} on rank {rank}")


def _many_sums(team: RankTeam) -> None:
    """Nothing waits in between: a result must not be overwritten by the next, nor read before all have come."""
    shape, dtype = (3, 211), torch.float32

    def work(rank: TestRank) -> list[Tensor]:
        sums = [rank.comm.all_reduce(rank.up(rank_tensor(rank.rank, shape, dtype, turn))) for turn in range(ROUNDS)]
        return [rank.down(each) for each in sums]

    for rank, sums in enumerate(team.run_on_all(work)):
        for turn, got in enumerate(sums):
            _near(got, _total(team.size, shape, dtype, turn), dtype, f"sum {turn} of {ROUNDS} on rank {rank}")


def _many_joins(team: RankTeam) -> None:
    """Inputs may be overwritten as soon as the call returns, while other ranks still read."""

    def work(rank: TestRank) -> list[Tensor]:
        joined = []
        for turn in range(ROUNDS):
            x = rank.up(torch.full((4, 33), float(rank.rank + 10 * turn)))
            joined.append(rank.comm.all_gather(x, 0))
            rank.ops.scale_logits(x, rank.up(torch.full((4,), 0.125)))
            place = rank.up(torch.tensor([0, 1, 2, 3], dtype=torch.int32))
            rank.ops.bias_tokens(x, place, place, rank.up(torch.full((4,), -1e9)))
        return [rank.down(each) for each in joined]

    for rank, joined in enumerate(team.run_on_all(work)):
        for turn, got in enumerate(joined):
            want = torch.cat([torch.full((4, 33), float(other + 10 * turn)) for other in range(team.size)])
            equal(got, want, f"join {turn} of {ROUNDS} on rank {rank}")


def _repeated(team: RankTeam) -> None:
    """The same numbers give the same bits, every time and on every rank."""
    shape, dtype = (5, 1009), torch.float32

    def work(rank: TestRank) -> list[Tensor]:
        x = rank_tensor(rank.rank, shape, dtype)
        return [rank.down(rank.comm.all_reduce(rank.up(x))) for _ in range(ROUNDS)]

    results = team.run_on_all(work)
    for rank, sums in enumerate(results):
        for turn, got in enumerate(sums):
            equal(got, results[0][0], f"the same sum for the {turn + 1}. time on rank {rank}, held against the first")


COLLECTIVES = {
    "all_reduce": _reduced,
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
}
RACES = {
    "sums in a row": _many_sums,
    "joins in a row, each given overwritten at once": _many_joins,
    "times the same sum": _repeated,
}


@check("communicator.stages")
def stages(subject: Subject) -> Iterator[Trial]:
    for count in (2, 3):
        for what, work in pipes.WORK.items():
            yield Trial(f"{what}, over {count} stages", partial(_in_stages, subject, count, work), ("parallel/stages",))


def _in_stages(subject: Subject, count: int, work: Callable[[StageChannel], None]) -> None:
    if not subject.facts.processes or subject.facts.devices < count:
        raise NotSupported(
            f"pipeline_parallel_size is refused: Capabilities.processes is {subject.facts.processes}, and "
            f"Capabilities.devices is {subject.facts.devices}"
        )
    team = RankTeam(subject, count)

    def of(rank: TestRank) -> None:
        comm = team.platform.connect(RankInfo(rank.rank, count, f"{team.endpoint}-stages", count))
        if comm.stage_channel is None:
            raise NotSupported("pipeline_parallel_size is refused: Communicator.stage_channel is None")
        found, want = (
            (comm.rank, comm.size, comm.stage_channel.stage, comm.stage_channel.stages),
            (0, 1, rank.rank, count),
        )
        require(found == want, f"rank, size, stage and stages of rank {rank.rank} are {found}, not {want}")
        work(comm.stage_channel)

    team.run_on_all(of)
    team.close()
