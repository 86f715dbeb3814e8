"""Measures what steps cost here: the real engine's, over a grid of prompts and of requests that decode."""

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from quintet import __version__
from quintet.config import EngineConfig
from quintet.engine.dtypes import name_of
from quintet.engine.engine import Engine
from quintet.engine.ranks.processes import plain_fields
from quintet.engine.request import Admitted
from quintet.engine.start import Prepared, launch, prepare
from quintet.interpreter import running
from quintet.platforms.host import threads
from quintet.sampling_params import SamplingParams
from quintet.server.commands.engine import say
from quintet.server.simulation.costs import Costs, Sample, Shape, Work, fitted

LONGEST = 4.0  # seconds of a step: larger ones are not measured, but for one, and cost as its slope says
DECODES = 8  # steps that are timed of each number of requests
CONTEXTS = (16, 256, 1024)  # tokens behind requests that decode
PREFILL = 6_000  # tokens of prompts that stand behind those of one such measurement, at most
ROUNDS = 5
OFTEN = 16  # tokens of steps whose size comes again and again
RECORDED = 4  # steps of such a size, besides, in which it may be compiled, or recorded
COMPANY = "quintet.server.simulation.company"


class Probe:
    """One engine, asked for steps of known work."""

    def __init__(self, engine: Engine, vocab_size: int, max_model_len: int) -> None:
        self._engine, self._vocab, self._longest = engine, vocab_size, max_model_len
        self._draw, self._count = random.Random(0), 0

    def prompt(self, count: int) -> list[int]:
        return [self._draw.randrange(self._vocab) for _ in range(count)]

    def prefill(self, ids: Sequence[int]) -> Sample:
        """A step that computes what is not cached of a prompt, and draws a token. It must fit into one step."""
        began = time.perf_counter()
        self._add(ids, 1)
        cached = 0
        while self._engine.busy:
            for delta in self._engine.step():
                cached = delta.num_cached
        count = len(ids) - cached
        return Sample(Work(count, 1, 0, count * cached + count * (count + 1) // 2), time.perf_counter() - began)

    def decode(self, requests: int, context: int) -> Sample:
        """The middle one of steps in which so many requests decode."""
        names = [self._add(self.prompt(context), self._longest - context) for _ in range(requests)]
        waiting = set(names)
        while waiting:
            waiting -= {delta.request_id for delta in self._engine.step()}
        took = []
        for _ in range(DECODES):
            began = time.perf_counter()
            self._engine.step()
            took.append(time.perf_counter() - began)
        self._engine.abort(names)
        while self._engine.busy:
            self._engine.step()
        looked = requests * (context + 1 + DECODES // 2)
        return Sample(Work(requests, requests, looked, 0), statistics.median(took))

    def _add(self, ids: Sequence[int], output: int) -> str:
        self._count += 1
        name = f"probe {self._count}"
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output)
        self._engine.add(Admitted(name, list(ids), params, (0, 0), output))
        return name


def sizes_of(shape: Shape) -> list[int]:
    """Numbers of tokens at which a step is measured: powers of two, and the largest step."""
    most = min(shape.max_num_batched_tokens, shape.max_model_len - 1)
    return sorted({1, most, *(2**power for power in range(1, 20) if 2**power < most)})


def measure(config: EngineConfig) -> Costs:
    """Of one engine with its share of this machine: alone, and beside the others of data_parallel_size."""
    config = config.replace(data_parallel_rank=0) if config.data_parallel_size > 1 else config
    prepared = prepare(config)
    if prepared.pooling is not None:
        raise ValueError("bench simulate measures models that generate text; this one makes numbers of it")
    if config.speculative_config is not None:
        raise ValueError("speculative_config: how many guesses are right depends on the text; leave it out")
    try:
        shape = _shape(prepared)
        engine = launch(prepared, progress=False)
        probe = Probe(engine, prepared.vocab_size, shape.max_model_len)
        samples, sizes = _grid(probe, shape)
        points, (per_row, per_context, per_pair) = fitted(samples, sizes)
        sharing = _sharing(probe, config, shape)
        costs = Costs(shape, points, per_row, per_context, per_pair, sharing, _what(prepared))
        off = [abs(costs.seconds(work) / seconds - 1) for work, seconds in samples]
        measured = {**costs.measured, "samples": len(samples), "median_error": round(statistics.median(off), 4)}
        return replace(costs, measured=measured)
    finally:
        prepared.ranks.close()


def _shape(prepared: Prepared) -> Shape:
    config, plan = prepared.config, prepared.plan
    arrangement = prepared.ranks.workers[0].arrangement
    return Shape(
        plan.max_model_len,
        plan.num_pages,
        config.page_size,
        config.max_num_seqs if plan.num_requests is None else min(config.max_num_seqs, plan.num_requests),
        config.max_num_batched_tokens,
        tuple(kept.window for kept in arrangement.groups),
        plan.num_slots,
        prepared.capabilities.overlap,
    )


def _what(prepared: Prepared) -> dict[str, Any]:
    config = prepared.config
    engines = config.data_parallel_size * config.tensor_parallel_size
    return {
        "model": config.model,
        "device": prepared.platform.name,
        "detail": prepared.capabilities.detail,
        "threads": max(1, threads() // engines),
        "dtype": name_of(prepared.sizes.dtype),
        "quantization": config.quantization,
        "tensor_parallel_size": config.tensor_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "version": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _grid(probe: Probe, shape: Shape) -> tuple[list[Sample], list[int]]:
    """Steps of all kinds -> what they took, and the sizes that were measured."""
    samples: list[Sample] = []
    sizes = sizes_of(shape)
    for size in sizes:
        found = _middle([probe.prefill(probe.prompt(each)) for each in _near(size)][-ROUNDS:])
        samples.append(found)
        say(f"prompt of {size} tokens: {found.seconds * 1e3:.1f} ms")
        if found.seconds > LONGEST:
            sizes = [each for each in sizes if each <= size]
            break
    samples += _behind(probe, shape, sizes)
    for requests, context in _decoding(shape, sizes[-1]):
        found = _middle([probe.decode(requests, context) for _ in range(ROUNDS if context == CONTEXTS[0] else 1)])
        samples.append(found)
        say(f"{requests} requests behind {context} tokens: {found.seconds * 1e3:.1f} ms")
    return samples, sizes


def _near(size: int) -> list[int]:
    """Sizes that stand for this one. A small one comes again and again, and is recorded where that is done; of many
    tokens there are rarely twice as many, and what is said of one is said of a step that was not there before."""
    return [size] * (RECORDED + ROUNDS) if size <= OFTEN else [size - each for each in range(ROUNDS)]


def _behind(probe: Probe, shape: Shape, sizes: Sequence[int]) -> Iterator[Sample]:
    """Prompts whose beginning is cached: tokens that look back on many."""
    most = max(size for size in sizes if size <= min(1024, sizes[-1]))
    for count in (most // 8, most // 2):
        beginning = probe.prompt(most)
        if count >= shape.page_size and most + count < shape.max_model_len:
            probe.prefill(beginning)
            found = probe.prefill([*beginning, *probe.prompt(count)])
            if found.work.tokens <= sizes[-1]:
                yield found


def _decoding(shape: Shape, largest: int) -> Iterator[tuple[int, int]]:
    """(requests, tokens behind each), as far as pages and patience go."""
    room = (shape.num_pages - 1) * shape.page_size
    for context in CONTEXTS:
        for requests in (2**power for power in range(20)):
            tokens = requests * (context + DECODES + 2 + shape.page_size)
            fits = requests <= min(shape.max_num_seqs, largest) and context + DECODES + 2 <= shape.max_model_len
            if fits and tokens <= room and requests * context <= PREFILL:
                yield requests, context


def _middle(samples: Sequence[Sample]) -> Sample:
    return sorted(samples, key=lambda each: each.seconds)[len(samples) // 2]


def _sharing(probe: Probe, config: EngineConfig, shape: Shape) -> tuple[float, ...]:
    """How much longer steps take beside so many other engines that compute."""
    others: list[subprocess.Popen[bytes]] = []
    try:
        alone, factors = _both(probe, shape), [1.0]
        for number in range(1, config.data_parallel_size):
            others.append(_company(config.replace(data_parallel_rank=number)))
            now = _both(probe, shape)
            ratios = [later / earlier for earlier, later in zip(alone, now, strict=True)]
            factors.append(max(factors[-1], statistics.geometric_mean(ratios)))
            say(f"beside {number} other engines: {factors[-1]:.2f} times as long")
        return tuple(round(each, 4) for each in factors)
    finally:
        for each in others:
            each.kill()
            each.wait()


def _both(probe: Probe, shape: Shape) -> tuple[float, float]:
    """Seconds of a prompt, and of a step that decodes."""
    size = min(64, shape.max_num_batched_tokens, shape.max_model_len - 1)
    few = min(4, shape.max_num_seqs)
    prompts = [probe.prefill(probe.prompt(size)).seconds for _ in range(3 * ROUNDS)]
    return statistics.median(prompts), statistics.median(probe.decode(few, 16).seconds for _ in range(ROUNDS))


def _company(config: EngineConfig) -> "subprocess.Popen[bytes]":
    """Another engine that computes all the time; returns when it does."""
    fields = msgspec.json.encode(plain_fields(config, f"data_parallel_size={config.data_parallel_size}"))
    other = subprocess.Popen(running(COMPANY), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None and other.stdout is not None
    other.stdin.write(fields + b"\n")
    other.stdin.flush()
    if not other.stdout.readline():
        raise ValueError(
            f"engine {config.data_parallel_rank} of {config.data_parallel_size} did not start beside this one"
        )
    return other


def keep_busy(config: EngineConfig) -> Iterable[None]:
    """Another engine's work, without end: the same as what is measured beside it."""
    prepared = prepare(config)
    shape = _shape(prepared)
    probe = Probe(launch(prepared, progress=False), prepared.vocab_size, shape.max_model_len)
    while True:
        _both(probe, shape)
        yield


def main_of_company() -> int:
    """Reads its configuration on standard input, works, and ends with who started it."""
    import threading

    config = EngineConfig(**msgspec.json.decode(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for number, _ in enumerate(keep_busy(config)):
        if number == 0:
            sys.stdout.write("works\n")
            sys.stdout.flush()
    return 0


def _end_with_parent() -> None:
    import os

    sys.stdin.buffer.read()
    os._exit(3)
