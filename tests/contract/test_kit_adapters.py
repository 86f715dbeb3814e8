"""The kit's section of adapters finds a platform that writes other rows than it should, and one that mixes them up."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from torch import Tensor, nn

from quintet.conformance import kit
from quintet.conformance.report import TrialOutcome
from quintet.interface.platform import State, Step
from quintet.interface.types import Batch, Outputs, ShapeBucket
from quintet.interface.weights import Weight
from quintet.platforms.cpu.platform import CPU
from tests.helpers.platforms.kit import subject
from tests.helpers.platforms.planted import Planted, first_failure


class FirstRows(CPU):
    """Its slots are all the first."""

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        if weight.rows is not None:
            weight = replace(weight, rows=(0, weight.rows[1]))
        return super().place(weight, parts, into)


def test_rows_that_are_written_where_others_should_be_are_named() -> None:
    found = first_failure("adapters.rows", Planted(platform=FirstRows))
    assert found.endswith("rows 1 to 1 of (5, 3, 4, 7) were written; rows [0, 1] are wrong")


class OneAdapter(CPU):
    """All tokens of a step have the first token's adapter."""

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        inner = super().compile(model, buckets)

        def step(state: State, batch: Batch) -> tuple[Outputs, State]:
            slots = batch.inputs.adapters
            if slots is not None:
                batch = batch._replace(inputs=batch.inputs._replace(adapters=slots[:1].repeat(len(slots))))
            return inner(state, batch)

        return step


def test_a_platform_that_serves_one_adapter_for_all_is_found() -> None:
    found = first_failure("adapters.merged", Planted(platform=OneAdapter), "llama")
    assert "turn 1, request 1, adapter 0: logits are off by" in found


class NoExtras(CPU):
    """Steps leave out what adapters have beside A and B."""

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        inner = super().compile(model, buckets)

        def step(state: State, batch: Batch) -> tuple[Outputs, State]:
            return inner(state, batch._replace(inputs=batch.inputs._replace(adapter_extras=None)))

        return step


def test_a_platform_that_leaves_out_magnitudes_is_found() -> None:
    found = first_failure("adapters.extras", Planted(platform=NoExtras))
    assert "turn 1, request 0, adapter 1: logits are off by" in found


@pytest.mark.parametrize("clause", ["adapters.rows", "adapters.merged", "adapters.extras"])
def test_a_platform_without_adapters_is_told_what_it_lacks(clause: str) -> None:
    (check,) = (each for each in kit.checks(["adapters"]) if each.clause == clause)
    results = [kit.run_trial(check, trial) for trial in kit.list_trials(check, subject("null"))]
    assert results and all(each.outcome is TrialOutcome.UNSUPPORTED for each in results)
    assert all("Capabilities.lora is False" in each.detail for each in results)
