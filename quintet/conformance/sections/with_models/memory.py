"""Memory of a loaded model: what its steps are planned to take, and what its device gives back while it sleeps."""

import gc
from collections.abc import Iterator
from functools import partial

from torch import Tensor

from quintet.conformance.check import NotSupported, Trial, check, require
from quintet.conformance.harness.subject import Subject
from quintet.conformance.harness.worker_runner import WorkerRunner, random_prompts
from quintet.conformance.sections.memory import own_memory
from quintet.interface.platform import ASIDE, DROPPED
from quintet.interface.types import MaxShape, ShapeBucket
from quintet_tools.checkpoints.tiny import VOCAB, variant

LARGEST_STEP = ShapeBucket(16, 8, 16, (8,))


@check("memory.plan")
def steps_ahead(subject: Subject) -> Iterator[Trial]:
    yield Trial("what a small model takes", partial(_estimated, subject))
    yield Trial("the steps that are run ahead", partial(_steps_ahead_fit, subject))


def _estimated(subject: Subject) -> None:
    """Larger steps never take less; the weights are as large whatever the steps are."""
    runner = subject.runner(variant("llama", "plain"), sizes=(16,))
    small, large = (
        runner.worker.estimate(MaxShape(LARGEST_STEP._replace(tokens=t, rows=t), 48, VOCAB)) for t in (16, 64)
    )
    for each in (small, large):
        counts = (each.weights, each.workspace, each.captured)
        require(all(type(count) is int and count >= 0 for count in counts), f"bytes are whole numbers, not {counts}")
    require(
        small.weights == large.weights > 0, f"weights take {small.weights}, and {large.weights} beside larger steps"
    )
    require(0 < small.workspace <= large.workspace, f"a step of 16 tokens: {small}; of 64 tokens: {large}")


def _steps_ahead_fit(subject: Subject) -> None:
    runner = subject.runner(variant("llama", "plain"), sizes=(16,))
    most = LARGEST_STEP._replace(pages=tuple(8 for _ in runner.worker.kv_cache_layout.groups))
    variants = runner.worker.estimate(MaxShape(most, 48, VOCAB)).buckets
    if not variants:
        raise NotSupported("Platform.estimate() names no buckets: no step is captured, or padded")
    for each in variants:
        within = each.tokens <= most.tokens and each.requests <= most.requests and each.rows <= most.rows
        within = within and len(each.pages) == len(most.pages) and all(count <= most.pages[0] for count in each.pages)
        require(within, f"estimate() names {each}, and no step is larger than {most}")
        require(not each.decode or each.tokens == each.requests == each.rows, f"{each}: a request brings one token")
        logits = runner.worker.run(each.batch).logits
        require(logits is not None and logits.shape[0] == each.rows, f"{each}: rows of logits are {logits}")


@check("memory.sleep")
def asleep(subject: Subject) -> Iterator[Trial]:
    for what, level in (("weights put aside", ASIDE), ("weights dropped", DROPPED)):
        yield Trial(what, partial(_slept, subject, level), ("sleep",))
    yield Trial("again and again", partial(_repeated_sleep, subject), ("sleep",))


def _load_sleeper(subject: Subject) -> WorkerRunner:
    if not subject.facts.sleep:
        raise NotSupported("the platform cannot sleep: Capabilities.sleep is False")
    return subject.runner(variant("llama", "plain"), sizes=(16,))


def _slept(subject: Subject, level: int) -> None:
    """The model's outputs are the same as before; where the device counts, its bytes are free meanwhile."""
    runner, (prompt,) = _load_sleeper(subject), random_prompts(1, (12,), VOCAB)
    (before,) = runner.prompts([prompt])
    awake = runner.worker.device.memory().free
    freed = runner.worker.sleep(level)
    gc.collect()
    require(freed > 0, f"sleep({level}) of a device with weights and a cache gave back {freed} bytes")
    sleeping = runner.worker.device.memory().free
    try:
        own_memory(subject)
        require(
            sleeping - awake >= freed * 3 // 4, f"sleep({level}) says {freed} bytes; {sleeping - awake} are free now"
        )
    except NotSupported:  # others take from this memory too: what is free says nothing
        awake = sleeping
    runner.worker.wake()
    (after,) = runner.prompts([prompt])
    _same(before, after, f"awake after sleep({level})")


def _same(before: Tensor, after: Tensor, what: str) -> None:
    worst = float((before - after).abs().max())
    require(worst <= 1e-5 * float(before.std()), f"{what}, the model's logits differ by {worst:.3g}")


def _repeated_sleep(subject: Subject) -> None:
    runner, (prompt,) = _load_sleeper(subject), random_prompts(2, (9,), VOCAB)
    (before,) = runner.prompts([prompt])
    for level in (ASIDE, DROPPED, ASIDE, ASIDE):
        runner.worker.sleep(level)
        runner.worker.wake()
        runner.worker.wake()  # awake already: nothing
    (after,) = runner.prompts([prompt])
    _same(before, after, "after sleeping four times")
