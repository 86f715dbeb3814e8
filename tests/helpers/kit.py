"""The conformance kit as a test: one section on one device, and what failed in it."""

import functools

from quintet.config import EngineConfig
from quintet.conformance import kit
from quintet.conformance.report import Outcome
from quintet.conformance.subject import Subject
from tests.helpers.tpu import programs


@functools.cache
def subject(device: str) -> Subject:
    return Subject(device, config=EngineConfig(compilation_cache_dir=programs().name))


def assert_conforms(device: str, section: str) -> None:
    results = kit.run(subject(device), [section]).results
    failed = [f"{each.clause}, {each.what}: {each.detail}" for each in results if each.outcome is Outcome.FAILED]
    assert results and not failed, "\n".join(failed)
