"""Measures what steps cost here: a real server's, as callers see them, over a grid of prompts and decoding requests."""

import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from quintet import __version__
from quintet.clients.http_client import run
from quintet.common.terminal import print_stderr
from quintet.config import EngineConfig
from quintet.engine.executor.engine_plan import EnginePlan
from quintet.engine.startup import prepare
from quintet.hub.dtypes import name_of
from quintet.platforms.host import threads
from quintet_tools.simulate.cost_model import Costs, Sample, Shape, fitted
from quintet_tools.simulate.measuring_client import RECORDED, Caller, Server

LONGEST = 4.0  # seconds of a step: larger ones are not measured, but for one, and cost as its slope says
CONTEXTS = (16, 256, 1024)  # tokens behind requests that decode
PREFILL = 6_000  # tokens of prompts that stand behind those of one such measurement, at most
ROUNDS = 3
OFTEN = 16  # tokens of steps of a size that comes again and again
ROOM = RECORDED + 8  # tokens of output of requests that decode, at least
SHORTEST = 0.05  # of a mean step: tokens that a caller reads at once came of two
SPREAD = 20  # parts of the steps, each as long as its mean says: what is kept of how they differ


def sizes_of(shape: Shape) -> list[int]:
    """Numbers of tokens at which a step is measured: powers of two, and the largest step."""
    most = min(shape.max_num_batched_tokens, shape.max_model_len - 1)
    return sorted({1, most, *(2**power for power in range(1, 20) if 2**power < most)})


def measure(config: EngineConfig) -> Costs:
    """Measures a server of data_parallel_size engines, each with its share of this machine, while all of them
    compute."""
    if config.speculative_config is not None:
        raise ValueError("speculative_config: how many guesses are right depends on the text; leave it out")
    prepared = prepare(config.replace(data_parallel_rank=0) if config.data_parallel_size > 1 else config)
    try:
        if prepared.pooling is not None:
            raise ValueError("bench simulate measures models that generate text; this one makes numbers of it")
        shape, what, vocab = _shape(prepared), _what(prepared), prepared.vocab_size
    finally:
        prepared.ranks.close()
    server = Server(config.replace(max_model_len=shape.max_model_len))
    try:
        return run(_measured(Caller(server, config.replace(max_model_len=shape.max_model_len), vocab), shape, what))
    finally:
        server.close()


async def _measured(caller: Caller, shape: Shape, what: dict[str, Any]) -> Costs:
    engines = caller.config.data_parallel_size
    async with caller:
        caller.latency = await _latency(caller)
        print_stderr(f"from a caller to a step and back: {caller.latency * 1e3:.1f} ms")
        caller.ratios.clear()
        samples, sizes = await _grid(caller, shape, engines)
        spread = spread_of(caller.ratios)
        sharing = await _sharing(caller, shape, engines)
    # all engines computed while steps were measured; costs are those of one alone, times what sharing says
    alone = [sample._replace(seconds=sample.seconds / sharing[-1]) for sample in samples]
    points, (per_row, per_context, per_pair) = fitted(alone, sizes)
    costs = Costs(shape, points, per_row, per_context, per_pair, sharing, caller.latency, spread, what)
    off = [abs(costs.seconds(work, engines) / seconds - 1) for work, seconds in samples]
    measured = {**what, "samples": len(samples), "median_error": round(statistics.median(off), 4)}
    return replace(costs, measured=measured)


def spread_of(ratios: Sequence[float]) -> tuple[float, ...]:
    """Sorted, cut into as many parts as are kept, and of each its mean; together they are 1 on the average."""
    if len(ratios) < SPREAD:
        return (1.0,)
    ordered = sorted(max(each, SHORTEST) for each in ratios)
    bounds = [len(ordered) * part // SPREAD for part in range(SPREAD + 1)]
    means = [statistics.mean(ordered[low:high]) for low, high in zip(bounds[:-1], bounds[1:], strict=True)]
    return tuple(round(each / statistics.mean(means), 4) for each in means)


def _shape(prepared: EnginePlan) -> Shape:
    config, plan = prepared.config, prepared.memory_plan
    arrangement = prepared.ranks.workers[0].kv_cache_layout
    return Shape(
        plan.max_model_len,
        plan.num_pages,
        config.page_size,
        config.max_num_seqs if plan.max_requests is None else min(config.max_num_seqs, plan.max_requests),
        config.step_tokens,
        tuple(kept.window for kept in arrangement.groups),
        plan.num_slots,
        prepared.capabilities.overlap,
    )


def _what(prepared: EnginePlan) -> dict[str, Any]:
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


async def _latency(caller: Caller) -> float:
    """Returns the seconds that a prompt of one token takes beyond a step of one token."""
    steps = [found for _ in range(ROUNDS) if (found := await caller.decode(1, 16, 1))]
    took = [await caller.prefill([caller.prompt(1)]) for _ in range(RECORDED + 2 * ROUNDS)]
    if not steps:
        return 0.0
    return max(0.0, mean(took[RECORDED:]).seconds - mean(steps).seconds)


async def _grid(caller: Caller, shape: Shape, engines: int) -> tuple[list[Sample], list[int]]:
    """Steps of all kinds -> what they took, and the sizes that were measured."""
    samples: list[Sample] = []
    sizes = sizes_of(shape)
    for size in sizes:
        took = [await caller.prefill([caller.prompt(each) for _ in range(engines)]) for each in _near(size)]
        found = mean(took[-ROUNDS:])
        samples.append(found)
        print_stderr(f"prompt of {size} tokens: {found.seconds * 1e3:.1f} ms")
        if found.seconds > LONGEST:
            sizes = [each for each in sizes if each <= size]
            break
    samples += [found async for found in _behind(caller, shape, sizes)]
    for requests, context in _decoding(shape, sizes[-1]):
        rounds = ROUNDS if context == CONTEXTS[0] else 1
        if seen := [each for _ in range(rounds) if (each := await caller.decode(requests, context, engines))]:
            samples.append(mean(seen))
            print_stderr(f"{requests} requests behind {context} tokens: {samples[-1].seconds * 1e3:.1f} ms")
    return samples, sizes


def _near(size: int) -> list[int]:
    """Returns sizes that stand for this one. A small one comes again and again, and is measured after it was recorded;
    large ones rarely have the same size twice, and each is measured at its first step."""
    return [size] * (RECORDED + ROUNDS) if size <= OFTEN else [size - each for each in range(ROUNDS)]


async def _behind(caller: Caller, shape: Shape, sizes: Sequence[int]) -> AsyncIterator[Sample]:
    """Measures prompts with a cached beginning: tokens that look back on many. One engine computes."""
    most = max(size for size in sizes if size <= min(1024, sizes[-1]))
    for count in (most // 8, most // 2):
        beginning = caller.prompt(most)
        if count >= shape.page_size and most + count < shape.max_model_len and caller.config.data_parallel_size == 1:
            await caller.prefill([beginning])
            found = await caller.prefill([[*beginning, *caller.prompt(count)]])
            if found.work.tokens <= sizes[-1]:
                yield found


def _decoding(shape: Shape, largest: int) -> Iterator[tuple[int, int]]:
    """(requests, tokens behind each), as far as pages and patience go."""
    room = (shape.num_pages - 1) * shape.page_size
    for context in CONTEXTS:
        for requests in (2**power for power in range(20)):
            tokens = requests * (context + ROOM + shape.page_size)
            fits = requests <= min(shape.max_num_seqs, largest) and context + ROOM <= shape.max_model_len
            if fits and tokens <= room and requests * context <= PREFILL:
                yield requests, context


def mean(samples: Sequence[Sample]) -> Sample:
    """Returns the mean of the same work, or nearly: not the median, for a step that takes long now and then takes long
    on the average, too."""
    work = samples[len(samples) // 2].work
    return Sample(work, statistics.mean(each.seconds for each in samples))


async def _sharing(caller: Caller, shape: Shape, engines: int) -> tuple[float, ...]:
    """Measures how much longer steps take while 1, 2, ... engines compute than while one does."""
    if engines == 1:
        return (1.0,)
    took = [await _both(caller, shape, count) for count in range(1, engines + 1)]
    factors = [1.0]
    for count, now in enumerate(took[1:], 2):
        ratios = [each / took[0][what] for what, each in now.items() if what in took[0]]
        factors.append(round(max(factors[-1], statistics.geometric_mean(ratios)), 4))
        print_stderr(f"while {count} engines compute: {factors[-1]:.2f} times as long")
    return tuple(factors)


async def _both(caller: Caller, shape: Shape, engines: int) -> dict[str, float]:
    """Seconds of a prompt, and of a step that decodes; without the step, if engines were not seen to decode at once."""
    size = min(64, shape.max_num_batched_tokens, shape.max_model_len - 1)
    prompts = [await caller.prefill([caller.prompt(size) for _ in range(engines)]) for _ in range(ROUNDS)]
    steps = [found for _ in range(ROUNDS) if (found := await caller.decode(1, 16, engines))]
    return {what: mean(each).seconds for what, each in (("prompt", prompts), ("step", steps)) if each}
