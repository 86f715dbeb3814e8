"""Comparison of log-probabilities: which positions count, what differs by how much, and what is close."""

import math

import pytest

from quintet.verification.report import CLOSE, DIFFERENT, EQUAL, NOT_RUN, Report, checked
from quintet.verification.scores import LOWEST, Likeliest, Limits, SequenceScores, choices, compare


def scores(ids: list[int], logprobs: list[float | None], num_prompt: int = 1, drawn: bool = False) -> SequenceScores:
    return SequenceScores(ids, num_prompt, logprobs, (), drawn)


def test_equal_sequences_are_equal_to_the_bit() -> None:
    one = [scores([1, 2, 3], [None, -0.5, -1.5])]
    found = compare(one, one)
    assert found.equal and found.positions == 2 and found.max == 0 and found.worst == []
    assert checked("x", found, Limits()).outcome == EQUAL


def test_differences_are_measured_in_nats_and_the_largest_are_named() -> None:
    here = [scores([1, 2, 3], [None, -0.5, -1.5]), scores([4, 5], [None, -2.0])]
    there = [scores([1, 2, 3], [None, -0.5, -1.0]), scores([4, 5], [None, -2.25])]
    found = compare(here, there, lambda token: f"<{token}>")
    assert (found.positions, found.mean, found.max, found.bias) == (3, 0.25, 0.5, pytest.approx((-0.5 + 0.25) / 3))
    first = found.worst[0]
    assert (first.sequence, first.position, first.token, first.text) == (1, 2, 3, "<3>") and len(found.worst) == 2
    assert checked("x", found, Limits(0.25, 0.5)).outcome == CLOSE
    assert checked("x", found, Limits(0.24, 0.5)).outcome == DIFFERENT
    assert checked("x", found, Limits(0.25, 0.49)).outcome == DIFFERENT


def test_nothing_is_compared_after_the_first_token_that_differs() -> None:
    here, there = [scores([1, 2, 3, 4], [None, -1, -1, -1])], [scores([1, 2, 9, 4], [None, -1, -7, -7])]
    found = compare(here, there)
    assert found.positions == 1 and found.max == 0 and not found.equal
    (split,) = found.splits
    assert (split.sequence, split.position, split.here, split.there) == (1, 2, 3, 9)
    assert checked("x", found, Limits(9, 9)).outcome == DIFFERENT, "how likely the other token was is not known"


def test_positions_that_one_side_does_not_know_do_not_count() -> None:
    found = compare([scores([1, 2], [None, None])], [scores([1, 2], [None, -1])])
    assert found.positions == 0 and checked("x", found, Limits(9, 9)).outcome == NOT_RUN


def test_minus_infinity_is_a_number_that_json_has() -> None:
    found = compare([scores([1, 2], [None, -math.inf])], [scores([1, 2], [None, -1.0])])
    assert found.max == -LOWEST - 1


def test_the_divergence_is_of_outputs_that_were_drawn() -> None:
    here, there = [scores([1, 2, 3], [None, -1, -1], 2, True)], [scores([1, 2, 3], [None, -9, -1.5], 2, True)]
    assert compare(here, there).kl == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    assert compare([scores([1, 2], [None, -1])], [scores([1, 2], [None, -2])]).kl is None


def test_a_choice_that_was_about_as_likely_is_close() -> None:
    likeliest = (None, None, Likeliest(7, -1.0))
    other = [SequenceScores([1, 2, 3], 2, [None, -1.0, -1.01], likeliest)]
    (split,) = choices(other)
    assert (split.here, split.there, split.position) == (7, 3, 2) and split.gap == pytest.approx(0.01)
    assert choices([SequenceScores([1, 2, 7], 2, [None, -1.0, -1.0], likeliest)]) == []


def test_a_report_passes_if_something_was_run_and_nothing_differs() -> None:
    one = [scores([1, 2], [None, -0.5])]
    report = Report("m", {"dtype": "float32"}, "itself", Limits())
    assert not report.passed, "nothing was compared"
    report.checks.append(checked("same", compare(one, one), Limits()))
    assert report.passed and report.to_dict()["checks"][0]["outcome"] == EQUAL
    report.checks.append(checked("other", compare(one, [scores([1, 2], [None, -0.75])]), Limits(0.1, 0.1)))
    assert not report.passed and "position 1, token 2 '2': -0.5000 here, -0.7500 there" in str(report)
