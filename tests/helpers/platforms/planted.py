"""Platforms that are wrong on purpose, and what the conformance kit says of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch

from quintet.conformance import kit
from quintet.conformance.harness.subject import Subject
from quintet.ops import Ops
from quintet.platforms import SelectedPlatform
from quintet.platforms.cpu.platform import CPU

Provider = Callable[..., Any]


class Planted(Subject):
    """The CPU with another platform class, or with other providers, in one type so that it is quick."""

    def __init__(self, platform: type[CPU] = CPU, providers: Mapping[str, Provider] | None = None) -> None:
        super().__init__("cpu")
        self.facts = replace(self.facts, dtypes=(torch.float32,))
        self.chosen = SelectedPlatform(platform, self.facts, "a test's")
        self._providers = providers or {}

    @cached_property
    def ops(self) -> Ops:
        made = super().ops
        made.__dict__.update(self._providers)
        return made


def first_failure(clause: str, subject: Subject, among: str = "") -> str:
    """What the first trial of the clause that fails says; fails if none does."""
    found = kit.first_failure(subject, clause, among)
    return pytest.fail(f"every trial of {clause} passed") if found is None else found
