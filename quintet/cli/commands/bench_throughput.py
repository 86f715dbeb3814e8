"""Time many requests that are there from the start: how much the engine does in all."""

import argparse
import sys
import time
from dataclasses import dataclass

from quintet.cli.commands import _bench as bench
from quintet.cli.commands import _engine as engine
from quintet.clients.latency import percentiles
from quintet.config.schema import flags


@dataclass(frozen=True)
class ThroughputLoad:
    """Load that is timed."""

    num_prompts: int = bench.setting(100, "requests")
    input_len: int = bench.setting(128, "tokens of each prompt")
    output_len: int = bench.setting(128, "tokens of each output")
    output_json: str | None = bench.output_file()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_model_argument(parser)
    flags.add_arguments(parser, ThroughputLoad)
    engine.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints requests and tokens per second."""
    load = flags.from_arguments(arguments, ThroughputLoad)
    with engine.open_engine(arguments) as llm:
        prompts = bench.Prompts(llm, llm.config.seed)
        llm.generate(
            prompts.draw(1, load.input_len), bench.exact_length_params(2), use_tqdm=False
        )  # the first run compiles
        batch = prompts.draw(load.num_prompts, load.input_len)
        started = time.perf_counter()
        outputs = llm.generate(batch, bench.exact_length_params(load.output_len), use_tqdm=sys.stderr.isatty())
        seconds = time.perf_counter() - started
    num_output = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    figures = {
        "model": llm.config.model,
        "num_prompts": load.num_prompts,
        "input_len": load.input_len,
        "output_len": load.output_len,
        "seconds": seconds,
        "requests_per_s": load.num_prompts / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_prompt + num_output) / seconds,
        "time_to_first_token_s": percentiles(bench.times_to_first_token(outputs)),
    }
    bench.report(figures, load.output_json)
    return 0
