"""One model shared out over ranks: its logits and tokens are those of one device."""

import itertools
from collections.abc import Iterator
from functools import partial

from torch import Tensor

from quintet.conformance.check import Trial, check, require
from quintet.conformance.harness.rank_threads import RankTeam, TestRank, equal, no_ranks, sizes_of
from quintet.conformance.harness.subject import Subject
from quintet.conformance.harness.worker_runner import WorkerRunner, random_prompts
from quintet.interface.types import RankInfo
from quintet_tools.checkpoints.tiny import VOCAB, Tiny, variant


@check("communicator.model")
def shared_out(subject: Subject) -> Iterator[Trial]:
    if subject.facts.devices == 1:
        yield Trial("2 devices", partial(no_ranks, subject))
        return
    call, sizes = (_on_a_mesh, [2]) if subject.facts.spmd else (_on_ranks, sizes_of(subject))
    for family, size in itertools.product(SHARED, sizes):
        yield Trial(f"{family} on {size} devices", partial(call, subject, family, size), (f"parallel/{size}",))


PROMPTS = random_prompts(3, (19, 1, 33), VOCAB)
SIZES = (64,)  # holds the prompts
SHARED = ("llama", "qwen3_moe")  # 101 tokens, 77 features, 6 heads and 3 KV heads: nothing divides evenly
RankOutputs = tuple[list[Tensor], list[list[int]]]


def _rank_outputs(runner: WorkerRunner) -> RankOutputs:
    return runner.prompts(PROMPTS), runner.greedy(PROMPTS, 3)


def _tiny(family: str) -> Tiny:
    return variant(family, "plain")


def _on_ranks(subject: Subject, family: str, size: int) -> None:
    wanted, team = _rank_outputs(subject.runner(_tiny(family), sizes=SIZES)), RankTeam(subject, size)
    meeting = f"{team.endpoint}-model"

    def work(rank: TestRank) -> RankOutputs:
        place = RankInfo(rank.rank, size, meeting)
        return _rank_outputs(WorkerRunner(_tiny(family), team.platform, rank_info=place, sizes=SIZES))

    results = team.run_on_all(work)
    team.close()
    for rank, (logits, tokens) in enumerate(results):
        _agree((logits, tokens), wanted, f"rank {rank} of {size}")
        for got, first in zip(logits, results[0][0], strict=True):
            equal(got, first, f"the logits of rank {rank}, held against rank 0's")


def _on_a_mesh(subject: Subject, family: str, size: int) -> None:
    wanted = _rank_outputs(subject.runner(_tiny(family), sizes=SIZES))
    _agree(
        _rank_outputs(subject.with_new_platform(tensor_parallel_size=size).runner(_tiny(family), sizes=SIZES)),
        wanted,
        f"a mesh of {size}",
    )


def _agree(outputs: RankOutputs, wanted: RankOutputs, where: str) -> None:
    for number, (got, want) in enumerate(zip(outputs[0], wanted[0], strict=True)):
        worst, limit = float((got - want).abs().max()), 1e-4 * float(want.std())
        require(worst <= limit, f"prompt {number}: logits of {where} are off by {worst:.3g}, {limit:.3g} allowed")
    require(outputs[1] == wanted[1], f"tokens of {where} are {outputs[1]}, on one device {wanted[1]}")
