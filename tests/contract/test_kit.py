"""The conformance kit, on every platform that can run here, section by section."""

import pytest

from quintet.conformance import kit
from quintet.conformance.clauses import CLAUSES
from quintet.platforms import discover
from tests.helpers.platforms.kit import assert_conforms, sections, subject

ELSEWHERE = {"null", "tpu"}  # computes nothing; takes minutes, and has tests/platforms/tpu/test_kit.py for itself
COMPUTING = [found.name for found in discover() if found.available and found.name not in ELSEWHERE]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("section", "every"), sections([pytest.mark.slow], {"oracle": 16, "models": 3}))
@pytest.mark.parametrize("device", COMPUTING)
def test_it_conforms(device: str, section: str, every: int) -> None:
    assert_conforms(device, section, every)


def test_there_is_a_platform_to_try() -> None:
    assert "cpu" in COMPUTING


def test_every_clause_is_proven_and_every_check_stands_in_its_section() -> None:
    checks = kit.checks()
    assert {check.clause for check in checks} == set(CLAUSES)
    assert [check for check in checks if check.clause.partition(".")[0] != check.section] == []
    assert {check.section for check in checks} == set(kit.section_names())


@pytest.mark.parametrize("device", COMPUTING)
def test_a_trial_is_named_once(device: str) -> None:
    """And listing them costs next to nothing, whatever they try."""
    for check in kit.checks():
        names = [trial.what for trial in check.trials(subject(device))]
        assert len(names) == len(set(names)), check.clause
