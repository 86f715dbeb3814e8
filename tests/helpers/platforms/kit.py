"""The conformance kit as a test: one section on one device, and what failed in it."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from quintet.config import EngineConfig
from quintet.conformance import kit
from quintet.conformance.harness.subject import Subject
from quintet.conformance.report import TrialOutcome
from tests.helpers.platforms.tpu import programs


@functools.cache
def subject(device: str) -> Subject:
    return Subject(device, config=EngineConfig(compilation_cache_dir=programs().name))


def sections(
    marks: Sequence[pytest.MarkDecorator],
    long: Mapping[str, int],
    whole: Sequence[pytest.MarkDecorator] = (pytest.mark.sweep,),
) -> Sequence[Any]:
    """(section, every which trial) for parametrize: of long ones some, and all with the marks `whole`."""
    some = [pytest.param(each, long.get(each, 1), id=each, marks=marks) for each in kit.section_names()]
    return [*some, *(pytest.param(each, 1, id=f"all_of_{each}", marks=whole) for each in long)]


def assert_conforms(device: str, section: str, every: int = 1) -> None:
    tried = [
        (each, trial) for each in kit.checks([section]) for trial in [*kit.list_trials(each, subject(device))][::every]
    ]
    results = [kit.run_trial(each, trial) for each, trial in tried]
    failed = [f"{each.clause}, {each.what}: {each.detail}" for each in results if each.outcome is TrialOutcome.FAILED]
    assert results and not failed, "\n".join(failed)
