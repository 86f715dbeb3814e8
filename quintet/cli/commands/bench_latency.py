"""Time one batch of requests from start to end, over and over."""

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.cli.commands import _bench as bench
from quintet.cli.commands import _engine as engine
from quintet.clients.latency import percentiles
from quintet.common.value_parsers import boolean
from quintet.config import option
from quintet.config.schema import flags
from quintet.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quintet import LLM


@dataclass(frozen=True)
class LatencyLoad:
    """Load that is timed."""

    input_len: int = bench.setting(32, "tokens of each prompt")
    output_len: int = bench.setting(128, "tokens of each output")
    batch_size: int = bench.setting(8, "requests at once")
    num_iters: int = bench.setting(10, "timed runs")
    num_iters_warmup: int = bench.setting(2, "runs before them that are not timed", minimum=0)
    profile: bool = option(
        False, boolean, "trace one run, once warm, and time none; --profiler-config says where to", group="load"
    )
    output_json: str | None = bench.output_file()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_model_argument(parser)
    flags.add_arguments(parser, LatencyLoad)
    engine.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints seconds per batch, and what they mean in tokens per second."""
    load = flags.from_arguments(arguments, LatencyLoad)
    with engine.open_engine(arguments) as llm:
        prompts, params = bench.Prompts(llm, llm.config.seed), bench.exact_length_params(load.output_len)
        latencies, first = [], []
        for turn in range(load.num_iters_warmup + load.num_iters):
            batch = prompts.draw(load.batch_size, load.input_len)
            if load.profile and turn >= load.num_iters_warmup:
                return _trace(llm, batch, params)
            started = time.perf_counter()
            outputs = llm.generate(batch, params, use_tqdm=False)
            if turn >= load.num_iters_warmup:
                latencies.append(time.perf_counter() - started)
                first += bench.times_to_first_token(outputs)
    mean = sum(latencies) / len(latencies)
    figures = {
        "model": llm.config.model,
        "batch_size": load.batch_size,
        "input_len": load.input_len,
        "output_len": load.output_len,
        "latency_s": percentiles(latencies),
        "time_to_first_token_s": percentiles(first),
        "output_tokens_per_s": load.batch_size * load.output_len / mean,
    }
    bench.report(figures, load.output_json)
    return 0


def _trace(llm: "LLM", batch: list[dict[str, list[int]]], params: SamplingParams) -> int:
    """One run under a trace: its times are not those of a run without."""
    llm.start_profile()
    llm.generate(batch, params, use_tqdm=False)
    print(llm.stop_profile())
    return 0
