"""Play a load on engines that are not there: the real scheduler and router, with steps that take what was measured."""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.cli.commands import _engine as engine
from quintet.cli.commands._serve_load import rate
from quintet.cli.commands.bench_serve import LINES, limit_of, number, table_of_times
from quintet.cli.tables import table
from quintet.common.value_parsers import count, integer, one_of, optional, text
from quintet.config import EngineConfig, option
from quintet.config.schema import flags

if TYPE_CHECKING:
    from quintet.clients.request_traces import TraceEntry
    from quintet_tools.simulate.capacity import Goal
    from quintet_tools.simulate.cost_model import Costs

# what of an engine's settings its steps' costs do not settle
_FREE = (
    "data_parallel_size", "enable_prefix_caching", "enable_chunked_prefill", "scheduling_policy",
    "long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills",
    "prefill_tokens_beside_decode",
)  # fmt: skip
_SHAPE = ("max_model_len", "num_pages", "page_size", "max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True)
class Load:
    """Trace to simulate, and the costs to use. Names of `quintet bench serve` where the meaning is the same."""

    measure: str | None = option(
        None, optional(text), "measure what steps of this model cost here, with the engine's flags, and play nothing",
        group="load", metavar="MODEL",
    )  # fmt: skip
    output: str | None = option(
        None, optional(text), "where --measure writes the costs", group="load", flags=("-o",), metavar="FILE"
    )
    costs: str | None = option(
        None, optional(text), "what steps cost, as --measure writes it", group="load", metavar="FILE"
    )
    trace: str | None = option(
        None, optional(text), "requests from a file with a line for each, such as {\"arrival\": 0.5, \"input_length\": "
        "600, \"output_length\": 80}; random ones if not given", group="load", metavar="FILE",
    )  # fmt: skip
    trace_speed: float = option(1.0, rate, "play the trace so many times as fast", group="load", metavar="X")
    request_rate: float = option(
        math.inf, rate, "random requests per second, at times drawn from a Poisson process; inf: all at once",
        group="load", metavar="R",
    )  # fmt: skip
    num_prompts: int | None = option(
        None, optional(count()), "random requests (100 if not given), or the first so many of the trace", group="load"
    )
    input_len: int = option(128, count(), "tokens of each random prompt", group="load", aliases=("random_input_len",))
    output_len: int = option(128, count(), "tokens of each output", group="load", aliases=("random_output_len",))
    seed: int = option(0, integer, "of random arrivals", group="load")
    find: str | None = option(
        None,
        optional(one_of("engines")),
        "the fewest engines that keep every --goal",
        group="report",
        choices=("engines",),
    )
    max_engines: int = option(4096, count(), "most engines that --find tries", group="report")
    output_json: str | None = option(
        None, optional(text), "write the figures to this file too", group="report", flags=("--json",), metavar="FILE"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_arguments(parser, Load)
    group = parser.add_argument_group("report")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", type=limit_of,
        help="count requests that stay within these, such as ttft:500 tpot:50 (milliseconds); also e2el",
    )  # fmt: skip
    group.add_argument(
        "--goal", nargs="+", default=[], metavar="NAME=LIMIT", type=_goal,
        help="what --find keeps, such as ttft_p99=0.5 tpot_mean=0.05 (seconds) or goodput=0.99 (of the requests)",
    )  # fmt: skip
    engine.add_arguments(parser, exclude=("seed",))


def _goal(word: str) -> "Goal":
    from quintet_tools.simulate.capacity import Goal

    try:
        return Goal.of(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(arguments: argparse.Namespace) -> int:
    """Prints a table of figures. 1 if no number of engines keeps the goal."""
    load, given = flags.from_arguments(arguments, Load), engine.engine_settings(arguments)
    if load.measure is not None:
        return _measure(load, given)
    if load.costs is None:
        raise ValueError("costs are missing: give --costs FILE, or make one with --measure MODEL -o FILE")
    _check(load, arguments)

    from quintet_tools.simulate.cost_model import read_costs

    costs = read_costs(load.costs)
    config, costs = settled(given, costs)
    entries = _entries(load)
    check_lengths(entries, costs.shape.max_model_len)
    if load.find is None:
        figures = play(config, costs, entries, dict(arguments.goodput))
        _print(figures, config.data_parallel_size)
        _write(load, figures)
        return 0
    return _find(load, config, (costs, entries), arguments)


def _check(load: Load, arguments: argparse.Namespace) -> None:
    """ValueError where flags do not go together."""
    if load.output is not None:
        raise ValueError("output is where costs are written that --measure finds; for figures give --json")
    if bool(load.find) != bool(arguments.goal):
        raise ValueError("--find engines and --goal NAME=LIMIT belong together; give both")
    if any(goal.name == "goodput" for goal in arguments.goal) and not arguments.goodput:
        raise ValueError("--goal goodput=SHARE is the share of requests within --goodput METRIC:MS; give both")
    random = [name for name in ("request_rate", "input_len", "output_len") if f"Load.{name}" in vars(arguments)]
    if load.trace is not None and random:
        raise ValueError(f"{random[0]} is of random requests, and trace says what comes when; leave one of them out")
    if load.trace is None and load.trace_speed != 1:
        raise ValueError("trace_speed is of a trace; give request_rate for random requests")


def _measure(load: Load, given: dict[str, Any]) -> int:
    if load.output is None:
        raise ValueError("--measure MODEL writes a file; say where with -o FILE")
    if given.get("model", load.measure) != load.measure:
        raise ValueError(f"two models: --measure {load.measure!r} and --model {given['model']!r}; give one")
    config = engine.config({**given, "model": load.measure})

    from quintet_tools.simulate.measurement import measure

    costs = measure(config)
    costs.write(load.output)
    print(table(("tokens of a step", "ms"), [(str(size), number(seconds * 1e3)) for size, seconds in costs.step]))
    return 0


def settled(given: Mapping[str, Any], costs: "Costs") -> "tuple[EngineConfig, Costs]":
    """The engines' settings: those of the costs, but for what was given. ValueError: what costs settle was given."""
    for name in given:
        if name not in (*_FREE, *_SHAPE):
            raise ValueError(
                f"{name} is settled when costs are measured; give it with --measure, and leave it out here"
            )
    wanted = {name: given.get(name, getattr(costs.shape, name)) for name in _SHAPE}
    if wanted["max_model_len"] == "auto":
        raise ValueError("max_model_len='auto' is what fits a device, and here is none; give a number, or leave it out")
    config = EngineConfig.from_kwargs(**{**given, **wanted})
    shape = replace(costs.shape, **{name: getattr(config, name) for name in _SHAPE})
    if shape.num_pages - 1 < -(-int(shape.max_model_len) // shape.page_size):
        raise ValueError(
            f"num_pages={shape.num_pages} of {shape.page_size} tokens do not hold one request of max_model_len="
            f"{shape.max_model_len}; raise one, or lower the other"
        )
    return config, replace(costs, shape=shape)


def _entries(load: Load) -> "list[TraceEntry]":
    from quintet.clients.load_generator import arrival_times
    from quintet.clients.request_traces import TraceEntry, read_trace, speed_up

    if load.trace is not None:
        return speed_up(read_trace(load.trace)[: load.num_prompts], load.trace_speed)
    times = arrival_times(load.num_prompts or 100, load.request_rate, load.seed)
    return [TraceEntry(at, load.input_len, load.output_len) for at in times]


def check_lengths(entries: "Sequence[TraceEntry]", max_model_len: int) -> None:
    """ValueError names requests that an engine would refuse."""
    from quintet_tools.simulate.fleet import too_long

    wrong = list(too_long(entries, max_model_len))
    if wrong:
        first = entries[wrong[0]]
        raise ValueError(
            f"{len(wrong)} of {len(entries)} requests are longer than max_model_len={max_model_len}, the first with "
            f"{first.input_length} tokens of prompt and {first.output_length} of output; leave them out, or "
            "measure with a larger max_model_len"
        )


def play(
    config: EngineConfig, costs: "Costs", entries: "Sequence[TraceEntry]", goodput: Mapping[str, float]
) -> dict[str, Any]:
    """The figures of one run."""
    from quintet_tools.simulate.fleet import Fleet
    from quintet_tools.simulate.report import figures_of

    return figures_of(Fleet(config, costs).play(entries), goodput)


def _find(
    load: Load, config: EngineConfig, what: "tuple[Costs, list[TraceEntry]]", arguments: argparse.Namespace
) -> int:
    from quintet_tools.simulate.capacity import fewest

    costs, entries = what
    goodput, goals = dict(arguments.goodput), arguments.goal

    def once(engines: int) -> Mapping[str, Any]:
        engine.print_stderr(f"plays {len(entries)} requests on {engines} engines")
        return play(config.replace(data_parallel_size=engines), costs, entries, goodput)

    most = min(load.max_engines, len(entries))  # then each request has one of its own
    found, tried = fewest(once, goals, most)
    rows = [
        (
            str(engines),
            *(number(goal.value(tried[engines])) for goal in goals),
            number(tried[engines]["mean_utilization"]),
        )
        for engines in sorted(tried)
    ]
    print(table(("engines", *(f"{goal.name} (<= {goal.limit:g})" for goal in goals), "utilization"), rows))
    _write(load, {"engines": found, "tried": {str(engines): tried[engines] for engines in sorted(tried)}})
    if found is None:
        engine.print_stderr(f"no number of engines up to {most} keeps the goal")
        return 1
    print(f"\n{found} engines")
    _print(tried[found], found)
    return 0


def _write(load: Load, figures: Mapping[str, Any]) -> None:
    if load.output_json:
        Path(load.output_json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


_OURS = {
    "mean_queue_ms": "ms from arrival to the first step, mean",
    "p99_queue_ms": "the same, p99",
    "preemptions": "preemptions",
    "prefix_cache_hit_rate": "of prompt tokens in the prefix cache",
    "mean_utilization": "of the time an engine computes, mean",
    "min_utilization": "the same, least",
    "max_utilization": "the same, most",
    "request_goodput": "requests/s within the limits",
    "goodput_share": "of the requests within the limits",
}


def _print(figures: Mapping[str, Any], engines: int) -> None:
    names = {**{key: name for key, name in LINES.items() if not key.startswith("client")}, **_OURS}
    rows = [(name, number(figures[key])) for key, name in names.items() if figures.get(key) is not None]
    print(table(("figure", ""), [("engines", str(engines)), *rows]))
    print("\n" + table_of_times(figures))
    sys.stdout.flush()
