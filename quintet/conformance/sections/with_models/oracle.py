"""The equality oracle: a request's results are its own, whatever runs beside it and however it is served."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from quintet.conformance.check import ContractViolation, NotSupported, Trial, check, require
from quintet.conformance.harness.attention import AttentionSession
from quintet.conformance.harness.batches import spec
from quintet.conformance.harness.subject import Subject
from quintet.conformance.harness.traffic import (
    FREE,
    TrafficEngine,
    TrafficOutput,
    TrafficRequest,
    check_tokens,
    dtype_name,
    page_filling_requests,
    page_size,
    plain_dtype,
    random_requests,
)
from quintet.conformance.harness.worker_runner import WorkerRunner, most_pages, random_prompts
from quintet.interface.types import INT4
from quintet.interface.weights import Matrix
from quintet_tools.checkpoints.tiny import EVERY, FAMILIES, SERVED, VOCAB, added_names, variant, variants

ROOM = {"num_pages": 150}
# what an engine is given, beside the traffic, so that it serves in this way
SERVING_SETTINGS: dict[str, dict[str, Any]] = {
    "alone": ROOM,  # first: the others are compared with it
    "batched": ROOM,
    "cached": ROOM,
    "chunked": {**ROOM, "max_num_batched_tokens": 16},
    "preempted": {"max_num_batched_tokens": 16},
}
STRETCHES = ((0, 1), (49, 50), (3, 5), (1, 4), (10, 14), (20, 25), (8, 16), (0, 17), (13, 46), (0, 66))
SIZES = ((48, 77), (77, 48), (7, 5), (1024, 130), (130, 1024))  # inputs and outputs of products
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 37},
    "soft-cap": {"softcap": 5.0, "window": 200},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True, "softcap": 9.0},
    "an int8 cache": {"kv_dtype": torch.int8},
    "an int4 cache": {"kv_dtype": INT4},
    "an fp8 cache": {"kv_dtype": torch.float8_e4m3fn, "window": 50},
}
LENGTHS = (1, 3, 40, 129, 290)  # of requests; the last is the one that is looked at
SHORT_LENGTHS = (1, 3, 17, 40)  # where a step holds no more
FEATURE = ("batch-invariance",)
FEW_MODELS = ("llama", "gemma3_text")  # a plain one; and one with windows and tied embeddings
NOT_DECLARED = "Capabilities.batch_invariant is False: nothing is promised of single bits"
OutputsByRequest = dict[str, TrafficOutput]


class Oracle:
    """One model on one platform, served in each of the ways when it is first asked for.

    FEW_MODELS are asked for tokens in every way of drawing; of the others it is enough to fill the cache.
    """

    def __init__(self, subject: Subject, family: str, dtype: torch.dtype) -> None:
        self._subject, self._dtype = subject, dtype
        self._page_size = page_size(subject)
        self.tiny = variant(family, next(iter(variants(family))))
        mixes = [random_requests(0), random_requests(1)] if family in FEW_MODELS else [random_requests(6, count=3)]
        self.traffic = [*mixes, page_filling_requests(self._page_size)]
        self._answers: dict[str, OutputsByRequest] = {}
        # it serves three of the ways: where engines are compiled, that is dear
        self._roomy: TrafficEngine | None = None

    @property
    def requests(self) -> list[TrafficRequest]:
        return [ask for asks in self.traffic for ask in asks]

    def outputs(self, way: str) -> OutputsByRequest:
        if way not in self._answers:
            self._answers[way] = getattr(self, f"_{way}")()
        return self._answers[way]

    def _serve(self, way: str) -> TrafficEngine:
        settings = {"dtype": dtype_name(self._dtype), **SERVING_SETTINGS[way]}
        if "num_pages" not in settings:  # so few that the longest request just fits, alone
            settings["num_pages"] = 1 + max(self._most_pages(settings["max_num_batched_tokens"]), 1)
        return TrafficEngine(self._subject, self.tiny, **settings)

    def _most_pages(self, step: int) -> int:
        return most_pages(self.tiny, SERVED, self._page_size, step)

    def _roomy_engine(self) -> TrafficEngine:
        self._roomy = self._roomy or self._serve("alone")
        self._roomy.engine.reset_prefix_cache()
        return self._roomy

    def _run(self, engine: TrafficEngine) -> OutputsByRequest:
        return {name: output for asks in self.traffic for name, output in engine.run(asks).items()}

    def _alone(self) -> OutputsByRequest:
        engine = self._roomy_engine()
        answers: OutputsByRequest = {}
        for ask in self.requests:
            engine.engine.reset_prefix_cache()
            answers |= engine.run([replace(ask, arrival=0)])
        return answers

    def _batched(self) -> OutputsByRequest:
        return self._run(self._roomy_engine())

    def _cached(self) -> OutputsByRequest:
        """Each mix a second time, right behind the first: what is kept of layers' states makes room for others soon."""
        engine = self._roomy_engine()
        answers: OutputsByRequest = {}
        for asks in self.traffic:
            engine.run(asks)
            answers |= engine.run(asks)
        self._roomy = None  # the last way that wants it
        require(any(output.cached for output in answers.values()), "no prompt was found in the prefix cache")
        return answers

    def _chunked(self) -> OutputsByRequest:
        return self._run(self._serve("chunked"))

    def _preempted(self) -> OutputsByRequest:
        engine = self._serve("preempted")
        answers = self._run(engine)
        # else a page holds any request, or layers keep states alone, and no request has to make room
        possible = self._page_size < SERVED and self._most_pages(FREE) > 0
        preempted = engine.stats.scheduler.num_preemptions > 0
        require(preempted or not possible, "no request was preempted, so this showed nothing")
        return answers


@check("oracle.equal")
def equal(subject: Subject) -> Iterator[Trial]:
    features = ("overlap",) if subject.facts.overlap else ()
    for family in _families(subject):
        for way in SERVING_SETTINGS:
            call = partial(_equal, subject, family, plain_dtype(subject.facts), way)
            yield Trial(f"{family} {way}", call, (*(features if family in FEW_MODELS else ()), f"tokens/{family}"))


@check("oracle.invariant")
def invariant_tokens(subject: Subject) -> Iterator[Trial]:
    if not subject.facts.batch_invariant:
        yield Trial("declared", _undeclared, FEATURE)
        return
    plain = plain_dtype(subject.facts)
    for dtype, family, way in itertools.product(subject.facts.dtypes, _families(subject), list(SERVING_SETTINGS)[1:]):
        if dtype == plain or family in FEW_MODELS:
            call = partial(_same_bits, subject, family, dtype, way)
            yield Trial(f"tokens and log-probabilities, {family} {way} in {dtype_name(dtype)}", call, _features(family))


@check("oracle.invariant")
def invariant_parts(subject: Subject) -> Iterator[Trial]:
    """A model's logits, and what most of them is made of."""
    for dtype in subject.facts.dtypes if subject.facts.batch_invariant else ():
        for inputs, outputs in SIZES:
            call = partial(_products, subject, inputs, outputs, dtype)
            yield Trial(f"products of {inputs} by {outputs} in {dtype_name(dtype)}", call, FEATURE)
        for kind, settings in ATTENTION.items():
            call = partial(_attention, subject, settings, dtype)
            yield Trial(f"attention, {kind} in {dtype_name(dtype)}", call, () if settings else FEATURE)
        for family in FAMILIES:
            call = partial(_logits, subject, family, dtype)
            yield Trial(f"logits of {family} in {dtype_name(dtype)}", call, _features(family))


def _features(family: str) -> tuple[str, ...]:
    """A family that is refused says nothing of what is served."""
    return (*FEATURE, f"bits/{family}") if family == "llama" else (f"bits/{family}",)


def _undeclared() -> None:
    raise NotSupported(NOT_DECLARED)


def _families(subject: Subject) -> tuple[str, ...]:
    """Every one where nothing is compiled; else a plain one."""
    return FEW_MODELS[:1] if subject.facts.static_shapes else (*EVERY, *added_names())


@cache  # answers are small, and the engines behind them are let go of
def _oracle(subject: Subject, family: str, dtype: torch.dtype) -> Oracle:
    return Oracle(subject, family, dtype)


def _equal(subject: Subject, family: str, dtype: torch.dtype, way: str) -> None:
    oracle = _oracle(subject, family, dtype)
    answers = oracle.outputs(way)
    for ask in oracle.requests:
        output = answers[ask.name]
        wanted = ask.params.max_tokens
        require(
            output.reason == "length" and len(output.tokens) == wanted,
            f"request {ask.name}: {len(output.tokens)} of {wanted} tokens, ended by {output.reason}: {output.error}",
        )
        check_tokens(oracle.tiny, ask, output, dtype)


def _same_bits(subject: Subject, family: str, dtype: torch.dtype, way: str) -> None:
    oracle = _oracle(subject, family, dtype)
    alone, answers = oracle.outputs("alone"), oracle.outputs(way)
    for ask in oracle.requests:
        got, want = answers[ask.name], alone[ask.name]
        require(got.tokens == want.tokens, f"request {ask.name}: {way} {got.tokens}, alone {want.tokens}")
        for at, (ours, theirs) in enumerate(zip(got.logprobs, want.logprobs, strict=True)):
            require(ours == theirs, f"request {ask.name}, token {at + 1}: {way} {ours}, alone {theirs}")


def _products(subject: Subject, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """A stretch of the rows of a product, against the same rows among all."""
    generator = torch.Generator().manual_seed(inputs)
    shapes = (67, inputs), (outputs, inputs), (outputs,)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    placed, added = subject.place(weight, "linear")["x"], subject.up(bias)

    def product(first: int, last: int) -> Tensor:
        return subject.down(subject.ops.linear(subject.up(x[first:last]), Matrix(placed), added, (outputs,)))

    whole = product(0, len(x))
    for first, last in STRETCHES:
        _same(f"rows {first} to {last} of 67 alone", product(first, last), whole[first:last])


def _attention(subject: Subject, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """One request whole and alone; beside others; in chunks; a token at a time; its last token beside others'."""
    of = spec(6, 3, 16, dtype=dtype, page_size=page_size(subject), **settings)
    session = AttentionSession(subject, of, LENGTHS)
    if session.max_step[0] < sum(LENGTHS):
        session = AttentionSession(subject, of, SHORT_LENGTHS)
    others = list(enumerate(session.lengths))
    row, length = others.pop()

    def run(*chunks: dict[int, int]) -> Tensor:
        out = torch.cat([got[row] for got in map(session.run, chunks) if row in got]).flatten(1)
        for each in {key for chunk in chunks for key in chunk}:
            session.forget(each)
        return out

    whole = run({row: length})
    _same("beside others", run({**dict(others), row: length}), whole)
    _same("in chunks", run({row: 1}, {row: 16}, {row: 3}, {row: length - 20}), whole)
    _same("its last tokens one by one", run({row: length - 4}, *[{row: 1}] * 4), whole)
    rest = {key: count - 1 for key, count in others if count > 1}
    last = run({**rest, row: length - 1}, {row: 1, **dict.fromkeys(rest, 1)})
    _same("its last token beside others'", last, whole)


def _logits(subject: Subject, family: str, dtype: torch.dtype) -> None:
    """Checks logits of one prompt: alone and whole, in chunks, token by token, and beside requests that come and go."""
    run = subject.runner(variant(family, next(iter(FAMILIES[family]))), dtype, (16, 64))
    first, second, third = prompts = random_prompts(1, (41, 5, 17), VOCAB)
    whole = run.prompts(prompts[:1])[0]
    for sizes in ([41], [1, 16, 3, 20, 1], [1] * 41):
        _same(f"in chunks of {sizes}", _chunked(run, first, sizes), whole)
    _same("beside two others", run.prompts(prompts)[0], whole)
    parts = [run.step({"a": first[:9], "b": second})["a"]]
    parts.append(run.step({"b": [3], "a": first[9:10], "c": third})["a"])
    run.finish("c")
    parts.append(run.step({"b": [4], "a": first[10:]})["a"])
    _same("beside others that come and go", torch.cat(parts), whole)


def _chunked(run: WorkerRunner, prompt: list[int], sizes: list[int]) -> Tensor:
    out, first = [], 0
    for size in sizes:
        out.append(run.step({"only": prompt[first : first + size]})["only"])
        first += size
    run.finish("only")
    return torch.cat(out)


def _same(what: str, got: Tensor, want: Tensor) -> None:
    """To the last bit; says where the first difference is."""
    if torch.equal(got, want):
        return
    row, column = (got != want).nonzero()[0].tolist()
    raise ContractViolation(f"{what}: row {row}, column {column} is {got[row, column]!r}, not {want[row, column]!r}")
