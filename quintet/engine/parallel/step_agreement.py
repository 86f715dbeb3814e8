"""Checks that a step ended identically on all ranks; otherwise fails it on all."""

import zlib
from collections.abc import Sequence

import msgspec
import numpy as np

from quintet.engine.executor.model_runner import StepResult
from quintet.engine.executor.worker_group import STEP_LEFT
from quintet.engine.row_store.media import EncodingFailed
from quintet.engine.step_plan import StepPlan
from quintet.interface.platform import Channel, DeviceLost
from quintet.interface.stage_channel import PreviousStageFailed

MAX_ERROR_BYTES = 800  # bytes of an error that other ranks receive
MAX_FAILED = 4  # items of media that a rank could not encode, of which other ranks learn
_LEFT_ERRORS = (
    STEP_LEFT,
    PreviousStageFailed.__name__,
)  # errors of a rank that waited for one that had left: not the cause
StepEnd = tuple[int, str, list[bytes]]  # a digest, an error or nothing, and the keys of media that were not encoded


class RankFailed(RuntimeError):
    """A step failed on some rank, and so on all."""


class StepAgreement:
    """Agreement on a finished step: one exchange, called by each rank. An error on one rank is an error on all; ranks
    with different plans or tokens are no longer one model."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._steps = channel, 0

    def __call__(self, plan: StepPlan, result: StepResult | Exception) -> StepResult | Exception:
        """Returns the result, or the error that all ranks have in its place."""
        if isinstance(result, DeviceLost):
            return result
        self._steps += 1
        why = error_text(result) if isinstance(result, Exception) else ""
        try:
            note = digest(plan, result), why, failed_keys(result)
            notes = self._channel.exchange(msgspec.msgpack.encode(note))
        except DeviceLost as error:
            return error
        lost = reconcile([msgspec.msgpack.decode(note, type=StepEnd) for note in notes], result, self._steps)
        if isinstance(lost, DeviceLost):
            self._channel.abort(str(lost))
        return lost


def reconcile(ends: Sequence[StepEnd], result: StepResult | Exception, step: int) -> StepResult | Exception:
    """Returns how the step ended, by the reports of all ranks: the result, if none has failed and all planned alike."""
    errors = [(rank, why, keys) for rank, (_, why, keys) in enumerate(ends) if why]
    if not errors and len({each for each, *_ in ends}) == 1:
        return result
    if not errors:
        plans = ", ".join(f"{each:08x}" for each, *_ in ends)
        return DeviceLost(f"the ranks' step {step} differs ({plans}): they are no longer one model")
    if isinstance(result, Exception) and len(errors) == len(ends) and len({each for _, each, _ in errors}) == 1:
        return result  # as on one rank
    rank, why, keys = next((each for each in errors if not each[1].startswith(_LEFT_ERRORS)), errors[0])
    why = f"rank {rank} of {len(ends)}: {why}"
    return EncodingFailed(dict.fromkeys(keys, why)) if keys else RankFailed(why)


def failed_keys(result: StepResult | Exception) -> list[bytes]:
    """Returns the keys of media that a step could not encode."""
    return list(result.failed)[:MAX_FAILED] if isinstance(result, EncodingFailed) else []


def digest(plan: StepPlan, result: StepResult | Exception | None = None) -> int:
    """Returns a checksum of a step's plan and of its sampled tokens: the same number on every rank."""
    planned = [number for request, count in plan.tokens.items() for number in (request.order, count)]
    drawn = result.token_ids if isinstance(result, StepResult) else []
    return crc32([plan.num_tokens, *planned, -1, *drawn])


def crc32(numbers: Sequence[int]) -> int:
    return zlib.crc32(np.array(numbers, np.int64).tobytes())


def error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".encode()[:MAX_ERROR_BYTES].decode(errors="ignore")
