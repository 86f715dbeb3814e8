"""A step ends alike on every rank, or for none; and what rank 0's engine is asked reaches the others."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from quintet.engine.executor.model_runner import StepResult
from quintet.engine.executor.output_rows import OutputRows
from quintet.engine.parallel import commands as inbox
from quintet.engine.parallel.leader import run_on_all_ranks
from quintet.engine.parallel.step_agreement import StepAgreement, digest
from quintet.engine.request import CoreRequest, Request
from quintet.engine.row_store.media import EncodingFailed
from quintet.engine.step_plan import StepPlan
from quintet.interface.platform import Channel, DeviceLost
from quintet.interface.stage_channel import PreviousStageFailed
from quintet.sampling_params import SamplingParams, StructuredOutputsParams


class Desk:
    """Where the ranks of a test leave their notes."""

    def __init__(self, size: int) -> None:
        self.notes: list[bytes] = [b""] * size
        self.barrier = threading.Barrier(size, timeout=30)
        self.why = ""


class Threads(Channel):
    """A channel between threads."""

    def __init__(self, desk: Desk, rank: int) -> None:
        self._desk, self._rank = desk, rank

    def broadcast(self, message: bytes) -> None:
        raise NotImplementedError

    def receive(self) -> bytes:
        raise NotImplementedError

    def exchange(self, message: bytes) -> list[bytes]:
        assert len(message) <= 1000
        self._desk.notes[self._rank] = message
        self._desk.barrier.wait()
        notes = list(self._desk.notes)
        self._desk.barrier.wait()
        return notes

    def abort(self, reason: str) -> None:
        self._desk.why = self._desk.why or reason

    @property
    def aborted(self) -> str:
        return self._desk.why


def on_each(works: list[Callable[[Channel], Any]]) -> tuple[list[Any], Desk]:
    desk, found = Desk(len(works)), dict[int, Any]()

    def run(rank: int) -> None:
        try:
            found[rank] = works[rank](Threads(desk, rank))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(works))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return [found[rank] for rank in range(len(works))], desk


def plan(*counts: int) -> StepPlan:
    made = StepPlan()
    for order, count in enumerate(counts):
        made.schedule(Request(CoreRequest(str(order), [1] * 40, SamplingParams(), (0, 0), 1), order), count)
    return made


def drew(*token_ids: int) -> StepResult:
    return StepResult(OutputRows([]), list(token_ids), None, {}, {})


def ended(*steps: tuple[StepPlan, Any]) -> tuple[list[Any], Desk]:
    return on_each([lambda channel, s=step: StepAgreement(channel)(*s) for step in steps])  # type: ignore[misc]


def test_what_all_have_is_what_each_gets() -> None:
    results = drew(7, 9), drew(7, 9), drew(7, 9)
    got, desk = ended(*[(plan(3, 1), each) for each in results])
    assert all(mine is theirs for mine, theirs in zip(got, results, strict=True)) and not desk.why


def test_what_fails_on_one_fails_on_all_and_names_the_cause() -> None:
    class StepLeft(RuntimeError):
        pass

    steps: list[Any] = [StepLeft("rank 2 has left the step"), drew(7), MemoryError("no room " * 300)]
    got, desk = ended(*[(plan(3), each) for each in steps])
    assert len({str(each) for each in got}) == 1 and not desk.why
    assert str(got[0]).startswith("rank 2 of 3: MemoryError: no room no room")


def test_media_that_one_rank_could_not_encode_are_known_to_all() -> None:
    class StepLeft(RuntimeError):
        pass

    failed = EncodingFailed({b"k" * 16: "no room " * 300, b"l" * 16: "no room"})
    got, desk = ended((plan(3), StepLeft("rank 1 has left the step")), (plan(3), failed))
    assert all(type(each) is EncodingFailed and each.failed.keys() == failed.failed.keys() for each in got)
    assert str(got[0]).startswith("rank 1 of 2: EncodingFailed: no room") and not desk.why


def test_the_stage_that_failed_is_named_and_not_one_that_waited_for_it() -> None:
    errors: list[Any] = [PreviousStageFailed("stage 0 of 2 failed in this step"), MemoryError("no room")]
    got, _ = ended(*[(plan(3), each) for each in errors])
    assert [str(each) for each in got] == ["rank 1 of 2: MemoryError: no room"] * 2


def test_what_fails_on_all_alike_is_said_as_by_one() -> None:
    errors = ValueError("no such row"), ValueError("no such row")
    got, _ = ended(*[(plan(3), each) for each in errors])
    assert got[0] is errors[0] and got[1] is errors[1]


@pytest.mark.parametrize("other", [(plan(3, 2), drew(7)), (plan(3, 1), drew(8)), (plan(4), drew(7))])
def test_ranks_that_differ_end(other: tuple[StepPlan, StepResult]) -> None:
    got, desk = ended((plan(3, 1), drew(7)), other)
    assert all(isinstance(each, DeviceLost) and "step 1 differs" in str(each) for each in got)
    assert "no longer one model" in desk.why


def test_a_digest_is_of_what_is_computed_and_not_of_names() -> None:
    assert digest(plan(3, 1), drew(7)) == digest(plan(3, 1), drew(7)) != digest(plan(1, 3), drew(7))


def test_work_that_all_do_is_done_by_all_or_said_by_all() -> None:
    def fails(channel: Channel) -> int:
        return run_on_all_ranks(channel, lambda: int("x"))

    def works(channel: Channel) -> int:
        return run_on_all_ranks(channel, lambda: 3)

    assert on_each([works, works])[0] == [3, 3]
    got, desk = on_each([fails, fails])
    assert all(isinstance(each, ValueError) for each in got) and not desk.why
    got, desk = on_each([works, fails])
    assert all(isinstance(each, DeviceLost) for each in got)
    assert "rank 1 of 2 failed, and not all did: ValueError: invalid literal" in desk.why


def test_an_inbox_arrives_as_it_was() -> None:
    params = SamplingParams(max_tokens=9, stop_token_ids=[4], structured_outputs=StructuredOutputsParams(regex="a"))
    asked = CoreRequest(
        "a", [1, 2, 3], params, (4, -5), 9, frozenset([2, 7]), ((5, 6),), b"salt", 3, embeds=b"\\0\\1", grammar="{}"
    )
    letter = inbox.encode(
        7, [inbox.make_add(asked), inbox.make_abort(["b", "c"]), inbox.ResetPrefixCacheCommand()], True
    )
    box = inbox.decode(letter)
    assert (box.number, box.traced, box.collective) == (7, True, None)
    add, abort, reset = box.items
    assert isinstance(add, inbox.AddCommand) and isinstance(reset, inbox.ResetPrefixCacheCommand)
    assert isinstance(abort, inbox.AbortCommand) and abort.request_ids == ["b", "c"]
    assert add.core_request.params.structured_outputs is None and asked.params.structured_outputs is not None
    for name in CoreRequest.__dataclass_fields__:
        if name != "params":
            assert getattr(add.core_request, name) == getattr(asked, name), name
    assert add.core_request.params.stop_token_ids == [4]
    for joint in (
        inbox.SleepCommand(2),
        inbox.WakeUpCommand(),
        inbox.ReloadCommand(None),
        inbox.SaveShardedCommand("/there"),
    ):
        assert inbox.decode(inbox.encode(1, [], joint=joint)).collective == joint


def test_what_no_process_can_be_given_is_refused_before_it_is_queued() -> None:
    params = SamplingParams(extra_args={"x": object()})
    with pytest.raises(ValueError, match="cannot be given to other processes"):
        inbox.make_add(CoreRequest("a", [1], params, (0, 0), 1))
