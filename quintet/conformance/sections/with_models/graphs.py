"""Steps that are compiled, captured or recorded: every size runs, padding shows nowhere, and nothing is made twice."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quintet.conformance.check import ContractViolation, NotSupported, Trial, check, require
from quintet.conformance.harness.fault_injection import Trap
from quintet.conformance.harness.subject import Subject
from quintet.conformance.harness.traffic import TrafficEngine, logits_tolerance, plain_dtype, random_requests
from quintet.conformance.harness.worker_runner import WorkerRunner, random_prompts
from quintet.engine.executor.batch_builder import pad
from quintet.interface.platform import Platform, Step
from quintet.interface.types import HostBatch, ShapeBucket
from quintet_tools.checkpoints.tiny import SERVED, VOCAB, variant

SMALL, LARGE = 16, 64  # tokens of the declared sizes
UNDECLARED = 24  # a size between them, which is not declared
ROUNDS = 5  # steps of one size
PAGE = 16  # tokens

Chunks = Mapping[Any, Sequence[int]]
Logits = Mapping[Any, Tensor]


class SizedRunner(WorkerRunner):
    """A Runner that pads to a set size, and writes to the null page (0), which takes padding's writes."""

    size: int | None = None  # None: to the smallest that holds a step
    fills_padding = False  # padded tokens are other than zeros

    def fixed_of(self, size: int) -> ShapeBucket:
        """Returns the variant of `size` tokens, declared or not."""
        return ShapeBucket(size, 8, size, (SERVED // PAGE,) * len(self._kept))

    def write_null_page(self) -> None:
        """Leaves K and V on page 0, as padding does."""
        self._pages["padding"] = [[0] for _ in self._kept]
        self.step({"padding": random_prompts(99, (PAGE,), VOCAB)[0]})
        del self._pages["padding"], self._lengths["padding"]

    def _batch(self, chunks: Chunks, firsts: dict[Any, int]) -> HostBatch:
        host = super()._batch(chunks, firsts)
        count = len(host.token_ids)
        if self._fixed and (self.size or self.fills_padding):
            host = pad(host, [each for each in self._fixed if each.tokens >= (self.size or count)])
        return _fill_padding(host, count) if self.fills_padding else host


def _fill_padding(host: HostBatch, count: int) -> HostBatch:
    """Fills the fields of padded tokens with values that must not count; they write to page 0."""
    token_ids, rows, groups = host.token_ids.copy(), host.logits_indices.copy(), []
    token_ids[count:] = np.arange(len(token_ids) - count) % VOCAB
    rows[count:] = np.arange(len(rows) - count) % max(count, 1)
    for group in host.groups:
        slots = group.slot_mapping.copy()
        slots[count:] = np.arange(len(slots) - count) % PAGE
        groups.append(group._replace(slot_mapping=slots))
    return host._replace(token_ids=token_ids, logits_indices=rows, groups=tuple(groups))


class CompiledModel:
    """One small model on the platform under test, compiled once, and the same run eagerly where that exists."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.dtype = subject, plain_dtype(subject.facts)

    @cached_property
    def runner(self) -> SizedRunner:
        return self._load(self.subject.make())

    @cached_property
    def eager(self) -> SizedRunner:
        return self._load(self.subject.make(enforce_eager=True))

    def _load(self, platform: Platform) -> SizedRunner:
        return SizedRunner(variant("gemma2", "plain"), platform, self.dtype, sizes=(SMALL, LARGE))

    def fixed(self) -> SizedRunner:
        """For what holds of fixed shapes alone."""
        if not self.subject.facts.static_shapes:
            raise NotSupported("shapes are free: Capabilities.static_shapes is False")
        return self.runner

    def require_same_logits(self, what: str, got: Logits, want: Logits) -> None:
        """Compares the logits of each request; two sizes of step may add in another order."""
        for key, wanted in want.items():
            limit = 2 * logits_tolerance(self.dtype) * float(wanted.std())
            off = (got[key] - wanted).abs().amax(-1).nan_to_num(torch.inf)
            worst = int(off.argmax())
            came = f"{what}: logits of request {key}, token {worst}, are off by {float(off[worst]):.3g}"
            require(float(off[worst]) <= limit, f"{came}; {limit:.3g} is allowed")


@lru_cache(maxsize=1)
def _loaded(subject: Subject) -> CompiledModel:
    return CompiledModel(subject)


def _random_prompts(seed: int, lengths: Sequence[int]) -> Chunks:
    return dict(enumerate(random_prompts(seed, lengths, VOCAB)))


def _run_prompts(runner: SizedRunner, chunks: Chunks, size: int | None = None, scribbles: bool = False) -> Logits:
    """Whole prompts in one step of that size, forgotten afterwards."""
    runner.size, runner.fills_padding = size, scribbles
    try:
        out = runner.step(chunks)
    finally:
        runner.size, runner.fills_padding = None, False
    for key in out:
        runner.finish(key)
    return out


@check("graphs.buckets")
def sizes(subject: Subject) -> Iterator[Trial]:
    loaded = _loaded(subject)
    for size in (SMALL, LARGE):
        yield Trial(f"a step of {size} tokens, full and nearly empty", partial(_declared, loaded, size))
    yield Trial("a size that was not declared", partial(_undeclared, loaded))


def _declared(loaded: CompiledModel, size: int) -> None:
    runner, tiny = loaded.fixed(), variant("gemma2", "plain")
    for lengths in ((size,), (size - 5, 2, 3), (1,)):
        chunks = _random_prompts(size, lengths)
        got = _run_prompts(runner, chunks, size)
        loaded.require_same_logits(
            f"{lengths} tokens in a step of {size}", got, {key: tiny.logits(ids) for key, ids in chunks.items()}
        )


def _undeclared(loaded: CompiledModel) -> None:
    runner, chunks = loaded.fixed(), _random_prompts(7, (5, 6))
    before = _run_prompts(runner, chunks)
    for size in (UNDECLARED, 2 * LARGE):
        try:
            runner.worker.run(runner.fixed_of(size).batch)
        except Exception as error:  # whatever it is, it must not be silence
            message = f"{type(error).__name__}: {error}"
            require(
                str(size) in message,
                f"a step of {size} tokens was refused by {message!r}, which does not name the size",
            )
        else:
            raise ContractViolation(
                f"a step of {size} tokens ran, and only {SMALL} and {LARGE} were declared: compile() made it late"
            )
    loaded.require_same_logits("after a step was refused", _run_prompts(runner, chunks), before)


@check("graphs.settled")
def nothing_more(subject: Subject) -> Iterator[Trial]:
    yield Trial("traffic of every kind, after the warm-up", partial(_no_late_compilation, subject))


class StepRecorder(Trap):
    """Keeps the steps that a platform compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def wrap_platform(self, platform: type[Platform]) -> type[Platform]:
        def compile(self: Platform, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
            watch.steps.append(platform.compile(self, model, buckets))
            return watch.steps[-1]

        watch = self
        return type(f"Watched{platform.__name__}", (platform,), {"compile": compile})


def _compilations(step: Step) -> int:
    count: Callable[[], int] | None = getattr(step, "compilations", None)
    if count is None:
        raise NotSupported("its step counts no compilations: it has no attribute `compilations`")
    return count()


def _no_late_compilation(subject: Subject) -> None:
    if not subject.facts.static_shapes:
        raise NotSupported("shapes are free, nothing is compiled beforehand: Capabilities.static_shapes is False")
    watch = StepRecorder()
    served = TrafficEngine(subject, variant("llama", "plain"), watch)
    before = _compilations(watch.steps[-1])
    require(before > 0, "its step counts compilations, and counted none while the engine started")
    for seed in range(2):
        served.run(random_requests(seed))
    after = _compilations(watch.steps[-1])
    require(after == before, f"{after - before} programs were compiled after the warm-up, while requests waited")


@check("graphs.padding")
def padding(subject: Subject) -> Iterator[Trial]:
    loaded = _loaded(subject)
    yield Trial("the same tokens in each size", partial(_padded, loaded, False))
    yield Trial("padded tokens that are not zeros", partial(_padded, loaded, True))
    yield Trial("beside longer requests", partial(_wider_tables, loaded))
    yield Trial("with keys and values on page 0", partial(_null_page_ignored, loaded))


def _padded(loaded: CompiledModel, scribbles: bool) -> None:
    runner, chunks = loaded.fixed(), _random_prompts(6, (5, 7))
    plain = _run_prompts(runner, chunks, SMALL)
    for size in (SMALL, LARGE):
        what = f"12 tokens in a step of {size}" + (" whose padding is not zeros" if scribbles else "")
        loaded.require_same_logits(what, _run_prompts(runner, chunks, size, scribbles), plain)


def _wider_tables(loaded: CompiledModel) -> None:
    """Their rows of the page table are longer: it is filled up with page 0."""
    alone, crowd = (
        _random_prompts(8, (3, 9)),
        {**_random_prompts(8, (3, 9)), "long": random_prompts(9, (41,), VOCAB)[0]},
    )
    want, got = _run_prompts(loaded.runner, alone), _run_prompts(loaded.runner, crowd)
    loaded.require_same_logits("beside a request of 41 tokens", {key: got[key] for key in alone}, want)


def _null_page_ignored(loaded: CompiledModel) -> None:
    runner, chunks = loaded.runner, _random_prompts(10, (20, 3, 17, 1))
    want, wanted = _run_prompts(runner, chunks), _decoded(runner, 11)
    runner.write_null_page()
    loaded.require_same_logits("prompts, after page 0 was written to", _run_prompts(runner, chunks), want)
    for turn, (got, before) in enumerate(zip(_decoded(runner, 11), wanted, strict=True)):
        loaded.require_same_logits(f"step {turn} of decoding, after page 0 was written to", got, before)


def _decoded(runner: SizedRunner, seed: int, lengths: Sequence[int] = (12, 1, 15, 7)) -> list[Logits]:
    """Prompts, then steps of one token for each: what every step gave."""
    steps: list[Logits] = [runner.step(_random_prompts(seed, lengths))]
    steps += [runner.step(_random_prompts(seed + 1 + turn, (1,) * len(lengths))) for turn in range(ROUNDS)]
    for key in range(len(lengths)):
        runner.finish(key)
    return steps


@check("graphs.replay")
def again(subject: Subject) -> Iterator[Trial]:
    loaded, features = _loaded(subject), ("graphs",)
    yield Trial("decoding, held against enforce_eager", partial(_replayed, loaded), features)
    yield Trial("the same inputs on other pages", partial(_other_state, loaded), features)
    yield Trial("sizes that take turns", partial(_turns, loaded), features)
    yield Trial("after the cache was made anew", partial(_renewed, loaded), features)


def _replayed(loaded: CompiledModel) -> None:
    """A second wave of as many requests finds recorded steps, and brings other tokens, lengths and pages."""
    for wave, lengths in enumerate(((12, 1, 15, 7), (2, 9, 3, 14), (16, 16, 1, 1))):
        got, want = (_decoded(runner, 20 + 10 * wave, lengths) for runner in (loaded.runner, loaded.eager))
        for turn, (mine, wanted) in enumerate(zip(got, want, strict=True)):
            loaded.require_same_logits(f"wave {wave + 1}, step {turn}, held against enforce_eager", mine, wanted)


def _other_state(loaded: CompiledModel) -> None:
    first = _decoded(loaded.runner, 50)
    for time in range(2, 5):
        for turn, (got, want) in enumerate(zip(_decoded(loaded.runner, 50), first, strict=True)):
            loaded.require_same_logits(f"the same inputs for the {time}. time, step {turn}", got, want)


def _turns(loaded: CompiledModel) -> None:
    asked = {lengths: _random_prompts(60, lengths) for lengths in ((3,), (20, 11), (1, 1), (30,))}
    first = {lengths: _run_prompts(loaded.runner, chunks) for lengths, chunks in asked.items()}
    for turn in range(3):
        for lengths, chunks in asked.items():
            loaded.require_same_logits(
                f"{lengths} tokens, turn {turn + 2}", _run_prompts(loaded.runner, chunks), first[lengths]
            )


def _renewed(loaded: CompiledModel) -> None:
    """Recorded steps may hold the address of the cache that they were recorded with; a step that is new does not."""
    for time, lengths in enumerate(((10, 3, 15, 2), (13, 5, 9, 9), (2, 4, 7, 11))):
        got, want = (_decoded(runner, 70, lengths) for runner in (loaded.runner, loaded.eager))
        for turn, (mine, wanted) in enumerate(zip(got, want, strict=True)):
            loaded.require_same_logits(f"cache {time + 1}, step {turn}, held against enforce_eager", mine, wanted)
        loaded.runner.worker.recreate_cache()
