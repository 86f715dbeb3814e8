"""On a device that bites, requests get the right tokens or a clear error, and the engine goes on."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quintet.conformance import kit
from quintet.conformance.check import Check, Trial
from quintet.conformance.harness.subject import Subject
from quintet.conformance.harness.traffic import (
    TrafficEngine,
    TrafficOutput,
    TrafficRequest,
    check_tokens,
    random_requests,
)
from quintet.conformance.report import TrialOutcome
from quintet.engine.executor.model_runner import ModelRunner
from quintet.interface.platform import Capabilities
from quintet.platforms import SelectedPlatform
from quintet_tools.checkpoints.tiny import Tiny, variant
from tests.platforms.gpu.biting import FAILED, FULL, BitingGPU, BitingRuntime, Kind
from tests.platforms.gpu.fake_torch import GIB

SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_pages": 40}
SAID = {"memory": FULL, "kernel": FAILED}
MODELS = ("llama", "lfm2")  # pages alone; pages and states


def biting(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Subject, BitingRuntime]:
    """A platform on a fresh device, what it draws with too."""
    runtime = BitingRuntime(GIB, seed)
    platform = type("Biting", (BitingGPU,), {"_fake": runtime})
    facts = platform.probe()
    assert isinstance(facts, Capabilities)
    monkeypatch.setattr(
        "quintet.conformance.harness.subject.choose", lambda name: SelectedPlatform(platform, facts, "a test")
    )
    draw = ModelRunner.sample

    def drawn(self: ModelRunner, forward: Any) -> Any:
        with runtime.computing():
            return draw(self, forward)

    monkeypatch.setattr(ModelRunner, "sample", drawn)
    return Subject("fake"), runtime


class Bench:
    """An engine on such a device, and the same requests again and again."""

    def __init__(self, family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        subject, self.runtime = biting(seed, monkeypatch)
        self.tiny: Tiny = variant(family, "plain")
        self.served = TrafficEngine(subject, self.tiny, **SETTINGS)
        self.asks = random_requests(2, 7)

    def run(self) -> list[tuple[TrafficRequest, TrafficOutput]]:
        """Pages are given back and the books are whole after every step, or Served says so."""
        self.served.engine.reset_prefix_cache()
        answers = self.served.run(self.asks)
        return [(ask, answers[ask.name]) for ask in self.asks]

    def right(self) -> None:
        """Every request is told what the reference says, to its end."""
        for ask, said in self.run():
            assert said.reason in ("length", "stop"), said
            check_tokens(self.tiny, ask, said, torch.float32)


@pytest.fixture
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    yield Bench(*request.param, monkeypatch)


@pytest.mark.grid(cases=2)
@pytest.mark.parametrize("bench", [(family, seed) for family in MODELS for seed in range(2)], indirect=True)
def test_copies_and_streams_may_take_any_order(bench: Bench) -> None:
    for _ in range(2):
        bench.right()
    assert bench.runtime.captures > 0 and bench.runtime.replays > 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "kernel"])
@pytest.mark.parametrize("bench", [("llama", 3)], indirect=True)
def test_a_step_that_fails_on_the_device_ends_those_in_it_with_the_reason(bench: Bench, kind: Kind) -> None:
    """At an allocation, or a kernel, anywhere in models, in draws, in captured steps and around them."""
    held = []
    for passes in (0, 60, 900, 60):
        bench.runtime.set(kind, passes)
        pairs, count = bench.run(), len(bench.runtime.bitten)
        failed = [said for _, said in pairs if said.reason == "error"]
        for ask, said in pairs:
            check_tokens(bench.tiny, ask, said, torch.float32)
            assert said.reason != "error" or SAID[kind] in str(said.error)
        assert len(failed) < len(pairs) and count == len(bench.runtime.bitten)
        bench.right()
        gc.collect()  # an error's frames hold what it was raised over, in circles
        held.append(bench.runtime.used())
    assert bench.runtime.bitten == [kind] * 4
    assert len(set(held)) == 1, "what a failed step took is given back"


@pytest.mark.parametrize("bench", [("llama", 5)], indirect=True)
def test_a_capture_that_is_lost_costs_speed_alone(bench: Bench) -> None:
    bench.runtime.set("capture", 1)
    for _ in range(2):
        bench.right()
    assert bench.runtime.bitten == ["capture"] and bench.runtime.replays > 0


def promises(section: str) -> list[tuple[Check, Trial]]:
    """The kit's trials of what may fail, a few of each; and of engines against a reference, those of a few models."""
    subject = Subject("fake")
    if section == "faults":
        return [
            (each, trial)
            for each in kit.checks([section])
            for trial in kit.TrialSelection(quick=True).of(kit.list_trials(each, subject))
        ]
    (equal,) = (each for each in kit.checks([section]) if each.clause == "oracle.equal")
    wanted = ("llama batched", "lfm2 preempted", "qwen3_next chunked", "gpt_oss cached")
    return [(equal, trial) for trial in kit.list_trials(equal, subject) if trial.what in wanted]


@pytest.mark.slow
@pytest.mark.parametrize(("section", "count"), [("faults", 9), ("oracle", 4)])
def test_the_conformance_kits_promises_are_kept(section: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies and streams take any order."""
    _, runtime = biting(11, monkeypatch)
    results = [kit.run_trial(*each) for each in promises(section)]
    wrong = [
        f"{each.clause}, {each.what}: {each.detail}" for each in results if each.outcome is not TrialOutcome.PASSED
    ]
    assert not wrong and len(results) == count
    assert runtime.copies > 50 and runtime.replays > 5
