"""The kit's sections of models, of the oracle and of faults name the clause that a platform breaks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintet.conformance.check import ContractViolation
from quintet.conformance.harness.subject import Subject
from quintet.conformance.sections.with_models import models, oracle
from quintet.engine.request import Request
from quintet.engine.scheduler import Scheduler
from quintet.interface.platform import Capabilities, Device, State, Step
from quintet.interface.types import Batch, Layout, Outputs, ShapeBucket
from quintet.interface.weights import Weight
from quintet.platforms.cpu.platform import CPU, CPUDevice
from quintet_tools.checkpoints.tiny import EVERY, variant
from tests.helpers.platforms import planted


def first_failure(clause: str, platform: type[CPU] = CPU) -> str:
    """What the first trial of the clause that fails says; fails if none does."""
    subject = Subject("cpu")
    facts = platform.probe()
    assert isinstance(facts, Capabilities)
    subject.chosen = replace(subject.chosen, platform=platform, capabilities=facts)
    subject.facts = facts
    return planted.first_failure(clause, subject)


class Stepping(CPU):
    """The platform, with another step around its own."""

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        step = super().compile(model, buckets)

        @torch.inference_mode()
        def around(state: State, batch: Batch) -> tuple[Outputs, State]:
            return self._around(step, state, batch)

        return around

    def _around(self, step: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        raise NotImplementedError


class LostRow(Stepping):
    """The last of several rows of logits never arrives."""

    def _around(self, step: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        outputs, state = step(state, batch)
        assert outputs.logits is not None
        logits = outputs.logits.clone()
        if len(logits) > 1:
            logits[-1] = 0
        return Outputs(logits), state


class StaleTable(Stepping):
    """A step reads the page table of the one before, where their shapes are alike."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._before = torch.zeros(0)

    def _around(self, step: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        (group,) = batch.groups
        table = self._before if self._before.shape == group.block_table.shape else group.block_table
        self._before = group.block_table
        return step(state, batch._replace(groups=(group._replace(block_table=table),)))


class Forgetful(Stepping):
    """Each step begins with an empty cache."""

    def _around(self, step: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        for layer in state:
            layer.zero_()
        return step(state, batch)


class Swayed(Stepping):
    """A row's last bits depend on how many others there are, though the platform says that they do not."""

    def _around(self, step: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        outputs, state = step(state, batch)
        assert outputs.logits is not None
        return Outputs(outputs.logits * (1 + 3e-7 * len(batch.token_ids))), state


class Spilling(Stepping):
    """What is not a number in one row is in all."""

    def _around(self, step: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        outputs, state = step(state, batch)
        assert outputs.logits is not None
        return Outputs(outputs.logits + 0 * outputs.logits.sum()), state


class TapsBackwards(Stepping):
    """Taps come in another order."""

    def _around(self, step: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        outputs, state = step(state, batch)
        return outputs._replace(aux_hidden_states=outputs.aux_hidden_states[::-1]), state


class LogitsAlone(Stepping):
    """Nothing but logits arrives."""

    def _around(self, step: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        outputs, state = step(state, batch)
        return Outputs(outputs.logits), state


class Rounding(CPU):
    """Weights in half precision, whatever was asked for."""

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        return super().place(weight, {name: tensor.bfloat16() for name, tensor in parts.items()}, into)


def test_where_layers_magnify_roundings_the_reference_in_doubles_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is off as far as float32 is, on the other side, is right; what is further off is not."""
    tiny, ids = variant("llama", "plain"), list(range(5, 12))
    exact = tiny.exact(ids)
    plain = exact + 1e-3  # another order of adding
    monkeypatch.setattr(type(tiny), "logits", lambda self, ids: plain)
    monkeypatch.setattr(type(tiny), "exact", lambda self, ids: exact)
    want, limit = models._exact(tiny, ids, plain, 1e-4)
    models._close("right", exact - 1e-3, want, limit)
    with pytest.raises(ContractViolation, match="off is allowed"):
        models._close("wrong", exact - 3e-3, want, limit)
    monkeypatch.setattr(type(tiny), "exact", lambda self, ids: plain)  # float32 is the truth: nothing more is allowed
    assert models._exact(tiny, ids, plain, 1e-4) == (plain, 1e-4)


class Coarse(CPU):
    """Half precision is kept in 6 bits."""

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        if weight.dtype == torch.float32:
            return super().place(weight, parts, into)
        return super().place(weight, {name: (tensor * 16).round() / 16 for name, tensor in parts.items()}, into)


class WrongScale(CPU):
    """The first group of each row has a scale that is twice too large."""

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        if weight.format.plain:
            return super().place(weight, parts, into)
        spoilt = {name: tensor.clone() for name, tensor in parts.items()}
        for tensor in spoilt.values():
            tensor[:, :32] *= 2
        return super().place(weight, spoilt, into)


class Unmoved(CPU):
    """What is there stays there."""

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        return super().place(weight, parts) if into is None or weight.use != "linear" else into


class Latest(CPU):
    """Every step is of the model that was compiled last."""

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        self._latest = super().compile(model, buckets)
        return lambda state, batch: self._latest(state, batch)


class OwnLayers(Stepping):
    """A step clears those layers of the cache that it does not write: they are another model's."""

    def _around(self, step: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        before = [layer.clone() for layer in state]
        outputs, state = step(state, batch)
        for old, layer in zip(before, state, strict=True):
            if torch.equal(old, layer):
                layer.zero_()
        return outputs, state


class Hoarder(CPU):
    """A cache that was let go is still counted: there is room for one."""

    def open(self, rank: int) -> Device:
        return HoardersDevice()


class HoardersDevice(CPUDevice):
    """See Hoarder."""

    full = False

    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        if self.full:
            raise MemoryError("KV cache does not fit")
        self.full = True
        return super().allocate(layouts, units)


class Clinging(CPU):
    """A copy to the host holds its place until it is waited for, and there are four."""

    def open(self, rank: int) -> Device:
        return ClingingDevice()


class ClingingDevice(CPUDevice):
    """See Clinging."""

    held = 0

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        if self.held == 4:
            raise RuntimeError("no place is left for a copy")
        wait, self.held = super().to_host(x), self.held + 1

        def waiting() -> Tensor:
            self.held -= 1
            return wait()

        return waiting


@pytest.mark.parametrize(
    ("platform", "clause", "says"),
    [
        (LostRow, "models.families", "the logit is 0, transformers has"),
        (LostRow, "oracle.equal", "the specification draws"),
        (StaleTable, "models.families", "llama: plain: request"),
        (StaleTable, "oracle.equal", "the specification draws"),
        (Forgetful, "models.families", "llama: plain: request 0, position 23 of 30"),
        (Forgetful, "oracle.equal", "llama alone: request"),
        (Rounding, "models.families", "off is allowed"),
        (Coarse, "models.dtypes", "squared errors against float32"),
        (WrongScale, "models.schemes", "of the size of the unquantized logits"),
        (TapsBackwards, "models.outputs", "tap 0 of request 0 are off by"),
        (LogitsAlone, "models.outputs", "hidden states were wanted, and did not come"),
        (Unmoved, "models.replaced", "of the size of the new model's logits"),
        (Latest, "models.turns", "both are loaded: model 1, request 0, position 0"),
        (OwnLayers, "models.turns", "both are loaded: model"),
        (Swayed, "oracle.invariant", "alone TokenLogprobs"),
        (Spilling, "faults.request", "request sound"),
        (Clinging, "faults.step", "one step failed, and every request ended"),
        (Hoarder, "faults.cache", "MemoryError: KV cache does not fit"),
    ],
)
def test_a_fault_is_caught_and_named(platform: type[CPU], clause: str, says: str) -> None:
    assert says in first_failure(clause, platform)


@pytest.mark.slow
def test_bits_that_sway_are_no_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle of a platform that promises no bits lets them pass, of models whose logits lie around 0."""
    monkeypatch.setattr(oracle, "EVERY", {family: EVERY[family] for family in oracle.FEW_MODELS})
    with pytest.raises(pytest.fail.Exception, match=r"every trial of oracle\.equal passed"):
        first_failure("oracle.equal", Swayed)


def test_an_abort_that_leaks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    remove: Callable[[Scheduler, Request], None] = Scheduler.remove

    def leaky(self: Scheduler, request: Request) -> None:
        pages, aborted = (
            [page for each in request.pages for page in each],
            len(request.token_ids) < request.num_prompt + request.max_tokens,
        )
        remove(self, request)
        if aborted:
            self.pool.retain(pages)

    monkeypatch.setattr(Scheduler, "remove", leaky)
    assert first_failure("faults.cancel")


def test_a_failure_that_ends_everybody_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(self: Scheduler, requests: Iterable[Request]) -> None:
        for request in list(self.running):
            self.remove(request)

    monkeypatch.setattr(Scheduler, "start_over", ended)
    assert first_failure("faults.cache")
