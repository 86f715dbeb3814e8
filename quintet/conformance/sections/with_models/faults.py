"""Cancellation and failures: a request that is hit ends, with the reason; the engine and all others go on."""

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file

from quintet.conformance.check import ContractViolation, NotSupported, Trial, check, require
from quintet.conformance.harness.fault_injection import Interruption, Trap, Where
from quintet.conformance.harness.subject import Subject
from quintet.conformance.harness.traffic import (
    TrafficEngine,
    TrafficOutput,
    TrafficRequest,
    check_tokens,
    greedy,
    page_size,
    plain_dtype,
    random_requests,
)
from quintet.interface.platform import CacheLost
from quintet_tools.checkpoints.tiny import LENGTH, SERVED, Tiny, variant

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_pages": 40,
}  # some wait while others are in a step
FAILURE = "the conformance kit broke this step"
PASSES = (0, 5)  # steps that go well before one fails
POISON = 77  # the token with NaN as its row of the embedding


class TrappedEngine:
    """One engine with a trap in it, for all trials: where engines are compiled, each is dear."""

    def __init__(self, subject: Subject) -> None:
        self.trap, self.dtype = Trap(), plain_dtype(subject.facts)
        self.tiny = variant("llama", "plain")
        self.served = TrafficEngine(subject, self.tiny, self.trap, **SETTINGS)
        self.asks = random_requests(2, 7)

    def fail(self, error: BaseException, where: Where, passes: int) -> dict[str, TrafficOutput]:
        """The mix, while one step fails."""
        self.served.engine.reset_prefix_cache()
        sprung = self.trap.sprung
        self.trap.set(error, where, passes)
        answers = self.served.run(self.asks)
        require(self.trap.sprung == sprung + 1, "the step that was to fail never ran")
        return answers

    def check_recovery(self) -> None:
        """The same engine, with what is left in its cache, still gives every request the right tokens."""
        for ask, output in _pairs(self.asks, self.served.run(self.asks)):
            _is_complete(ask, output)
            check_tokens(self.tiny, ask, output, self.dtype)


@lru_cache(maxsize=4)
def _trapped_engine(subject: Subject) -> TrappedEngine:
    return TrappedEngine(subject)


@check("faults.cancel")
def cancel(subject: Subject) -> Iterator[Trial]:
    for seed in range(3):
        yield Trial(f"at random points, {seed}", partial(_cancel, subject, seed))
    yield Trial("all requests at once", partial(_cancel_all, subject))


@check("faults.step")
def step(subject: Subject) -> Iterator[Trial]:
    for where in get_args(Where):
        for passes in PASSES:
            yield Trial(f"{where}, after {passes} that go well", partial(_failing, subject, where, passes))
    for where in get_args(Where):
        yield Trial(f"Ctrl-C {where}", partial(_interrupted, subject, where))


@check("faults.cache")
def cache(subject: Subject) -> Iterator[Trial]:
    for where in ("before", "after"):
        for passes in PASSES:
            yield Trial(f"{where}, after {passes} that go well", partial(_lost, subject, where, passes))


@check("faults.request")
def request(subject: Subject) -> Iterator[Trial]:
    yield Trial("logits that are not numbers", partial(_poisoned, subject))
    yield Trial("a prompt that is too long", partial(_too_long, subject))
    yield Trial("a cache that is too small for one request", partial(_too_small, subject))


def _cancel(subject: Subject, seed: int) -> None:
    """A request that is taken back hears nothing more; a prefix of the right tokens is all that it got."""
    wary, rng = _trapped_engine(subject), random.Random(seed)
    served, left = wary.served, [ask.name for ask in wary.asks if ask.arrival == 0]
    gone: set[str] = set()

    def between(number: int) -> None:
        if left and rng.random() < 0.3:
            name = left.pop(rng.randrange(len(left)))
            before = served.stats.scheduler
            served.abort(name)
            gone.add(name)
            after = served.stats.scheduler
            running = after.num_running + after.num_waiting
            require(running <= before.num_running + before.num_waiting, f"{name} was taken back, and is still there")
            require(after.kv_usage <= before.kv_usage, f"{name} was taken back, and more pages are held than before")

    for ask, output in _pairs(wary.asks, served.run(wary.asks, between)):
        if output.reason is not None or ask.name not in gone:
            _is_complete(ask, output)
        check_tokens(wary.tiny, ask, output, wary.dtype)
    require(bool(gone), "no request was taken back, so this showed nothing")
    wary.check_recovery()


def _cancel_all(subject: Subject) -> None:
    wary = _trapped_engine(subject)

    def between(number: int) -> None:
        if number == 4:
            for ask in wary.asks:
                wary.served.abort(ask.name)
            used = wary.served.stats.scheduler.kv_usage
            require(used == 0, f"no request is left, and {used:.0%} of the pages are held")

    wary.served.run(wary.asks, between)
    wary.check_recovery()


def _failing(subject: Subject, where: Where, passes: int) -> None:
    wary = _trapped_engine(subject)
    answers = wary.fail(RuntimeError(FAILURE), where, passes)
    failed = [name for name, output in answers.items() if output.reason == "error"]
    require(bool(failed), "a step failed, and no request ended with an error")
    require(len(failed) < len(answers), "one step failed, and every request ended, those that were not in it too")
    for ask, output in _pairs(wary.asks, answers):
        if output.reason == "error":
            require(FAILURE in str(output.error), f"request {ask.name} ended by {output.error!r}, not by {FAILURE!r}")
        else:
            _is_complete(ask, output)
        check_tokens(wary.tiny, ask, output, wary.dtype)
    wary.check_recovery()


def _interrupted(subject: Subject, where: Where) -> None:
    """It comes out of the step; going on with steps loses no request and no token."""
    wary = _trapped_engine(subject)
    before = wary.served.interruptions
    answers = wary.fail(Interruption(), where, 3)
    require(wary.served.interruptions == before + 1, "Ctrl-C in a step did not come out of it")
    for ask, output in _pairs(wary.asks, answers):
        _is_complete(ask, output)
        check_tokens(wary.tiny, ask, output, wary.dtype)


def _lost(subject: Subject, where: Where, passes: int) -> None:
    wary = _trapped_engine(subject)
    for ask, output in _pairs(wary.asks, wary.fail(CacheLost(FAILURE), where, passes)):
        _is_complete(ask, output)
        check_tokens(wary.tiny, ask, output, wary.dtype)
    wary.check_recovery()


def _poisoned(subject: Subject) -> None:
    """Its request ends alone, those beside it in the batch do not, and its pages do the next one no harm."""
    whole, dtype = variant("llama", "plain"), plain_dtype(subject.facts)
    with tempfile.TemporaryDirectory(prefix="quintet-poisoned-") as folder:
        served = TrafficEngine(subject, _poison(whole, Path(folder)), **SETTINGS)
    sound = [greedy(f"sound {number}", _prompt(number), 6) for number in range(3)]
    bad = greedy("bad", [*_prompt(9)[:7], POISON, *_prompt(9)[8:]], 6)
    for _ in range(2):
        served.engine.reset_prefix_cache()  # the pages are taken again, with what is left in them
        answers = served.run([sound[0], bad, *sound[1:]])
        output = answers["bad"]
        require(output.reason == "error", f"logits are not numbers, and the request ended by {output.reason}")
        require(
            "finite" in str(output.error), f"the reason says nothing of logits that are not finite: {output.error!r}"
        )
        for ask, other in _pairs(sound, answers):
            _is_complete(ask, other)
            check_tokens(whole, ask, other, dtype)


def _poison(tiny: Tiny, folder: Path) -> Tiny:
    shutil.copytree(tiny.folder, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, file)
    return Tiny(folder, tiny.config, tiny.reference)


def _prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, POISON) for _ in range(20)]


def _too_long(subject: Subject) -> None:
    wary = _trapped_engine(subject)
    prompt = [3] * SERVED
    try:
        wary.served.add(greedy("long", prompt, 1))
    except ValueError as error:
        require(str(SERVED) in str(error), f"the refusal does not say what the limit is: {error}")
    else:
        wary.served.abort("long")
        raise ContractViolation(
            f"a prompt of {SERVED} tokens was taken, where prompt and output have {SERVED} together"
        )
    wary.check_recovery()


def _too_small(subject: Subject) -> None:
    """A cache that is too small is refused when the engine starts, not when the request is half way through."""
    with suppress(NotSupported):
        TrafficEngine(subject, variant("llama", "plain"), **{**SETTINGS, "num_pages": 2, "max_model_len": LENGTH})
        raise ContractViolation(f"an engine of one page of {page_size(subject)} tokens serves {LENGTH}")


def _pairs(
    asks: list[TrafficRequest], answers: dict[str, TrafficOutput]
) -> Iterator[tuple[TrafficRequest, TrafficOutput]]:
    for ask in asks:
        yield ask, answers[ask.name]


def _is_complete(ask: TrafficRequest, output: TrafficOutput) -> None:
    wanted = ask.params.max_tokens
    require(
        output.reason == "length" and len(output.tokens) == wanted,
        f"request {ask.name} has {len(output.tokens)} of {wanted} tokens, and ended by {output.reason}: {output.error}",
    )
