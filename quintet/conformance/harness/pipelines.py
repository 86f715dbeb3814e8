"""Pieces of work for a platform's pipe between pipeline stages, each the same on every stage."""

from collections.abc import Callable

import torch
from torch import Tensor

from quintet.conformance.check import require
from quintet.interface.stage_channel import PreviousStageFailed, StageChannel

STEPS = 40  # many times as many as can be under way


def _sent_tensors(step: int, rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn((rows, 24), generator=torch.Generator().manual_seed(step)).to(dtype)


def _number(pipe: StageChannel, step: int, rows: int) -> None:
    """A stage's part of a step: what came has the step's number and the stages' before it."""
    tensors = [_sent_tensors(step, rows, torch.float32), _sent_tensors(step + 1, rows, torch.bfloat16)]
    if pipe.stage > 0:
        came, want = pipe.receive(), b"".join(bytes(each.view(torch.uint8).numpy()) for each in tensors)
        require(bytes(came.cpu().numpy()) == want, f"stage {pipe.stage} got other bytes in step {step}")
    if pipe.stage < pipe.stages - 1:
        pipe.send(tensors)


def _collect_report(pipe: StageChannel, step: int) -> None:
    notes, result = pipe.collect()
    want = [f"{stage} in {step}".encode() for stage in range(pipe.stages)]
    require(notes == want, f"of step {step} stage {pipe.stage} heard {notes}")
    require(result == bytes([step % 251]) * (step * 100), f"of step {step} stage {pipe.stage} heard another result")


def _send_report(pipe: StageChannel, step: int) -> None:
    pipe.report(f"{pipe.stage} in {step}".encode(), bytes([step % 251]) * (step * 100))


def _one_by_one(pipe: StageChannel) -> None:
    for step in range(STEPS):
        pipe.begin()
        _number(pipe, step, 1 + step % 5 * 100)
        _send_report(pipe, step)
        _collect_report(pipe, step)


def _overlapped(pipe: StageChannel) -> None:
    """As many under way as there are stages."""
    for step in range(STEPS):
        pipe.begin()
        _number(pipe, step, 1 + step % 5 * 100)
        _send_report(pipe, step)
        if step >= pipe.stages - 1:
            _collect_report(pipe, step - pipe.stages + 1)
    for step in range(STEPS - pipe.stages + 1, STEPS):
        _collect_report(pipe, step)


def _after_a_failure(pipe: StageChannel) -> None:
    """After a stage fails, later stages receive nothing from it, and all begin again."""
    for turn in range(3):
        pipe.begin()
        failed = pipe.stage == 0
        if not failed:
            try:
                pipe.receive()
            except PreviousStageFailed:
                failed = True
        require(failed, f"stage {pipe.stage} was handed something by one that failed")
        if pipe.stage < pipe.stages - 1:
            pipe.send(None)
        pipe.report(b"failed")
        pipe.begin()  # one more is under way, and dropped
        if pipe.stage < pipe.stages - 1:
            pipe.send(None)
        pipe.report(b"dropped")
        require(pipe.collect()[0] == [b"failed"] * pipe.stages, "notes of a failed step are another's")
        pipe.restart()
        pipe.begin()
        _number(pipe, turn, 3)
        _send_report(pipe, turn)
        _collect_report(pipe, turn)


WORK: dict[str, Callable[[StageChannel], None]] = {
    "steps one by one": _one_by_one,
    "steps one behind the other": _overlapped,
    "steps after one that failed": _after_a_failure,
}
