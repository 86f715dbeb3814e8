"""What stages of a model hand on to one another, where the platform's communicator has a pipe."""

import uuid
from collections.abc import Callable, Iterator
from functools import partial

import torch

from quintet.conformance.check import Lacking, Trial, check, require
from quintet.conformance.sections.communicator import Rank, Team, given
from quintet.conformance.subject import Subject
from quintet.platforms.pipe import HandedNothing, Pipe
from quintet.types import Place

STEPS = 40  # many times as many as can be under way
MOST = 3  # stages that are tried


@check("communicator.stages")
def stages(subject: Subject) -> Iterator[Trial]:
    for count in range(2, max(2, min(MOST, subject.facts.devices)) + 1):
        for what, work in WORK.items():
            yield Trial(f"{what}, over {count} stages", partial(_met, subject, count, work), ("parallel/stages",))


def _met(subject: Subject, count: int, work: Callable[[Rank, Pipe], None]) -> None:
    if not subject.facts.processes:
        raise Lacking("its ranks are no processes, so that pipeline_parallel_size is refused")
    team, endpoint = Team(subject, count), f"inproc://stages-{uuid.uuid4().hex}"

    def of(rank: Rank) -> None:
        comm = team.platform.connect(Place(rank.rank, count, endpoint, count))
        if comm.pipe is None:
            raise Lacking("its communicator has no pipe, so that pipeline_parallel_size is refused")
        require((comm.rank, comm.size) == (0, 1), f"one rank of a stage got rank {comm.rank} of {comm.size}")
        pipe = comm.pipe
        require((pipe.stage, pipe.stages) == (rank.rank, count), f"rank {rank.rank} is stage {pipe.stage}")
        work(rank, pipe)

    try:
        team.each(of)
    finally:
        team.close()


def _number(pipe: Pipe, step: int, rows: int) -> None:
    """A stage's part of a step: what came has the step's number and the stages' before it."""
    tensors = [given(step, (rows, 24), torch.float32), given(step + 1, (rows, 24), torch.bfloat16)]
    if pipe.stage > 0:
        came, want = pipe.take_over(), b"".join(bytes(each.view(torch.uint8).numpy()) for each in tensors)
        require(bytes(came.cpu().numpy()) == want, f"stage {pipe.stage} got other bytes in step {step}")
    if pipe.stage < pipe.stages - 1:
        pipe.hand_on(tensors)


def _heard(pipe: Pipe, step: int) -> None:
    notes, result = pipe.said()
    want = [f"{stage} in {step}".encode() for stage in range(pipe.stages)]
    require(notes == want, f"of step {step} stage {pipe.stage} heard {notes}")
    require(result == bytes([step % 251]) * (step * 100), f"of step {step} stage {pipe.stage} heard another result")


def _say(pipe: Pipe, step: int) -> None:
    pipe.say(f"{pipe.stage} in {step}".encode(), bytes([step % 251]) * (step * 100))


def _one_by_one(rank: Rank, pipe: Pipe) -> None:
    for step in range(STEPS):
        pipe.begin()
        _number(pipe, step, 1 + step % 5 * 100)
        _say(pipe, step)
        _heard(pipe, step)


def _one_behind_the_other(rank: Rank, pipe: Pipe) -> None:
    """As many under way as there are stages."""
    for step in range(STEPS):
        pipe.begin()
        _number(pipe, step, 1 + step % 5 * 100)
        _say(pipe, step)
        if step >= pipe.stages - 1:
            _heard(pipe, step - pipe.stages + 1)
    for step in range(STEPS - pipe.stages + 1, STEPS):
        _heard(pipe, step)


def _after_a_failure(rank: Rank, pipe: Pipe) -> None:
    """What a stage could not make is nothing to those after it, and all begin again."""
    for turn in range(3):
        pipe.begin()
        failed = pipe.stage == 0
        if not failed:
            try:
                pipe.take_over()
            except HandedNothing:
                failed = True
        require(failed, f"stage {pipe.stage} was handed something by one that failed")
        if pipe.stage < pipe.stages - 1:
            pipe.hand_on(None)
        pipe.say(b"failed")
        pipe.begin()  # one more is under way, and dropped
        if pipe.stage < pipe.stages - 1:
            pipe.hand_on(None)
        pipe.say(b"dropped")
        require(pipe.said()[0] == [b"failed"] * pipe.stages, "notes of a failed step are another's")
        pipe.begin_again()
        pipe.begin()
        _number(pipe, turn, 3)
        _say(pipe, turn)
        _heard(pipe, turn)


WORK: dict[str, Callable[[Rank, Pipe], None]] = {
    "steps one by one": _one_by_one,
    "steps one behind the other": _one_behind_the_other,
    "steps after one that failed": _after_a_failure,
}
