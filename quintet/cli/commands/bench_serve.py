"""Put a load on an OpenAI-compatible server, ours or another's, and time its streamed answers."""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quintet.cli.commands import _engine as engine
from quintet.cli.commands._serve_load import NUM_PROMPTS, ServeLoad, rate
from quintet.cli.tables import table
from quintet.clients import server_address as target
from quintet.common.value_parsers import one_of
from quintet.config.schema import flags

if TYPE_CHECKING:
    from quintet.clients.http_client import HttpClient
    from quintet.clients.latency import LoadResult, RequestOutcome
    from quintet.clients.load_generator import LoadRequest, RandomPrompts, Sender
    from quintet.clients.remote_engine import RemoteEngine
    from quintet.clients.request_traces import TraceEntry

_GOODPUT = ("ttft", "tpot", "e2el")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    flags.add_arguments(parser, ServeLoad)
    parser.add_argument_group("report").add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", type=limit_of,
        help="count requests that stay within these, such as ttft:500 tpot:50 (milliseconds); also e2el",
    )  # fmt: skip


def limit_of(word: str) -> tuple[str, float]:
    name, _, milliseconds = word.partition(":")
    try:
        return one_of(*_GOODPUT, e2e="e2el")(name), rate(milliseconds) / 1e3
    except ValueError:
        names = ", ".join(_GOODPUT)
        raise argparse.ArgumentTypeError(
            f"must be METRIC:MILLISECONDS such as ttft:500, METRIC one of {names}, not {word!r}"
        ) from None


def run(arguments: argparse.Namespace) -> int:
    """Prints a table of figures. 1 if any request failed: the figures are then of the others alone."""
    load = flags.from_arguments(arguments, ServeLoad)
    server = target.target(arguments, load.host, load.port)

    from quintet.clients.http_client import run as run_loop
    from quintet.clients.remote_engine import RemoteEngine

    remote = RemoteEngine(server, load.model)
    model = remote.model
    _check(load, arguments)
    warmup, calls, endpoint = _calls(load, remote)
    _open_files(len(calls))
    seen = run_loop(_measure(server, load, endpoint, (warmup, calls)))
    if load.save_trace:
        _save_trace(load.save_trace, seen)
    figures = {**_describe_run(server, load, model, endpoint), **seen.figures(dict(arguments.goodput))}
    for file in load.result_files(model, time.strftime("%Y%m%d-%H%M%S")):
        file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    _print(figures)
    for kind, message in {each.failure.kind: str(each.failure) for each in seen.outcomes if each.failure}.items():
        engine.print_stderr(f"{figures['failures'][kind]} failed ({kind}), one of them: {message}")
    return 1 if figures["failed"] else 0


def _check(load: ServeLoad, arguments: argparse.Namespace) -> None:
    """ValueError where flags say what a trace says, or belong to one."""
    settled = (
        "dataset",
        "dataset_name",
        "request_rate",
        "input_len",
        "output_len",
        "ignore_eos",
        "prompts",
        "max_concurrency",
    )
    beside = [name for name in settled if f"{ServeLoad.__name__}.{name}" in vars(arguments)]
    if load.trace is not None and beside:
        raise ValueError(f"{beside[0]} is settled by trace, which says what is sent when; leave one of them out")
    if load.trace is not None and load.endpoint == "chat":
        raise ValueError("endpoint=chat takes words, and trace has numbers of tokens; leave the endpoint out")
    if load.trace is None and load.trace_speed != 1:
        raise ValueError("trace_speed is of a trace; for random requests give request_rate")


def _save_trace(file: str, seen: "LoadResult") -> None:
    from quintet.clients.request_traces import TraceEntry, write_trace

    whole = [each for each in seen.outcomes if each.failure is None and each.prompt_tokens]
    first = min((each.started for each in whole), default=0.0)
    write_trace(file, [TraceEntry(each.started - first, each.prompt_tokens, each.output_tokens) for each in whole])


def _traced_calls(load: ServeLoad, model: str) -> "tuple[list[LoadRequest], list[LoadRequest], str]":
    from quintet.clients.load_generator import RequestSource

    source = RequestSource(model, "completions", True, load.extra_body)
    calls = [
        source.make_request(
            {"prompt": each.prompt(number, load.vocab_size), **({"priority": each.priority} if each.priority else {})},
            each.output_length,
            each.input_length,
        )
        for number, each in enumerate(_entries(load))
    ]
    return _random_prompts(load, False).make_requests(source, load.warmup), calls, "completions"


def _random_prompts(load: ServeLoad, text: bool) -> "RandomPrompts":
    from quintet.clients.load_generator import RandomPrompts

    lengths = (load.random_range_ratio, load.random_prefix_len)
    return RandomPrompts(load.input_len, load.max_tokens, load.vocab_size, text, load.seed, *lengths)


def _entries(load: ServeLoad) -> "list[TraceEntry]":
    from quintet.clients.request_traces import read_trace, speed_up

    assert load.trace is not None
    return speed_up(read_trace(load.trace)[: load.num_prompts], load.trace_speed)


def _calls(load: ServeLoad, remote: "RemoteEngine") -> "tuple[list[LoadRequest], list[LoadRequest], str]":
    """Warm-up requests, timed requests and the endpoint."""
    from quintet.clients.load_datasets import dataset_requests, read_dataset, read_sharegpt
    from quintet.clients.load_generator import RequestSource

    if load.trace is not None:
        return _traced_calls(load, remote.model)
    if load.dataset is None:
        source = RequestSource(remote.model, load.endpoint or "completions", load.ignore_eos, load.extra_body)
        drawn = _random_prompts(load, load.prompts == "text")
        calls = drawn.make_requests(source, load.warmup + (load.num_prompts or NUM_PROMPTS))
        return calls[: load.warmup], calls[load.warmup :], source.endpoint
    if load.dataset_name == "sharegpt":
        wanted = load.num_prompts or NUM_PROMPTS
        entries = read_sharegpt(load.dataset, remote.count_tokens, wanted, load.output_len, load.seed)
    else:
        entries = read_dataset(load.dataset)
    if (load.num_prompts or 0) > len(entries):
        raise ValueError(
            f"--num-prompts {load.num_prompts}, but {load.dataset} holds {len(entries)}: a prompt that is sent again "
            "would be answered from the server's prefix cache; ask for fewer"
        )
    endpoint = load.endpoint or ("chat" if any("messages" in entry for entry in entries) else "completions")
    source = RequestSource(remote.model, endpoint, load.ignore_eos, load.extra_body)
    calls = dataset_requests(entries[: load.num_prompts], source, load.max_tokens)
    return _random_prompts(load, True).make_requests(source, load.warmup), calls, endpoint


def _open_files(num_connections: int) -> None:
    """Each connection is an open file, and the usual limit is 1024."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


async def _measure(
    server: target.ServerTarget,
    load: ServeLoad,
    endpoint: str,
    calls: "tuple[Sequence[LoadRequest], Sequence[LoadRequest]]",
) -> "LoadResult":
    from tqdm import tqdm

    from quintet.clients.http_client import HttpClient
    from quintet.clients.http_connection import HttpTimeouts
    from quintet.clients.latency import LoadResult
    from quintet.clients.load_generator import Sender, arrival_times

    warmup, timed = calls
    connections = HttpClient(server.address, server.headers(), HttpTimeouts(first_byte=load.timeout, idle=load.timeout))
    sender = Sender(connections, server.display_name, endpoint)
    try:
        await _warm_up(sender, warmup, load.max_concurrency)
        if load.profile:
            await _trace(connections, server, "/start_profile")
        times = arrival_times(len(timed), load.request_rate, load.seed, load.burstiness)
        if load.trace is not None:
            times = iter([each.arrival for each in _entries(load)])
        with tqdm(
            total=len(timed), disable=load.disable_tqdm or not sys.stderr.isatty(), unit=" requests", mininterval=1.0
        ) as bar:
            started, busy = time.perf_counter(), time.process_time()
            outcomes = await sender.send_all(timed, times, load.max_concurrency, bar.update)
            seen = LoadResult(outcomes, _last_token_time(outcomes) - started, time.process_time() - busy)
        if load.profile:
            engine.print_stderr(f"traced: {(await _trace(connections, server, '/stop_profile')).decode()}")
        return seen
    finally:
        connections.close()


async def _trace(connections: "HttpClient", server: target.ServerTarget, path: str) -> bytes:
    """Starts or stops the server's trace; returns the body of its answer."""
    from quintet.clients import errors

    answer = await connections.request("POST", path, b"{}")
    if answer.status != 200:
        message = errors.error_message(answer.body)
        raise ValueError(
            f"{server.display_name} answered {answer.status} to {path}: {message}; run it with --profiler-config"
        )
    return answer.body


async def _warm_up(sender: "Sender", calls: "Sequence[LoadRequest]", most: int | None) -> None:
    """The first alone: if it fails, so would the others."""
    if calls:
        first = await sender.send(calls[0])
        if first.failure is not None:
            raise first.failure
    if calls[1:]:
        await sender.send_all(calls[1:], iter([0.0] * len(calls[1:])), most or 1, lambda: None)


def _last_token_time(outcomes: "Sequence[RequestOutcome]") -> float:
    """Returns the time of the last token; now if there was none."""
    return max((each.times[-1] for each in outcomes if each.times), default=time.perf_counter())


def _describe_run(server: target.ServerTarget, load: ServeLoad, model: str, endpoint: str) -> dict[str, Any]:
    return {
        "server": server.display_name,
        "model": model,
        "endpoint": endpoint,
        "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf",
        "max_concurrency": load.max_concurrency,
        "dataset": load.dataset,
        **({} if load.trace is None else {"trace": load.trace, "trace_speed": load.trace_speed}),
        "seed": load.seed,
    }


LINES = {
    "completed": "requests answered",
    "failed": "requests failed",
    "duration": "seconds",
    "total_input_tokens": "tokens of prompts",
    "total_output_tokens": "tokens of output",
    "request_throughput": "requests/s",
    "request_goodput": "requests/s within the limits",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "all tokens/s",
    "client_cpu_us_per_chunk": "client's CPU, µs per chunk",
}


def _print(figures: Mapping[str, Any]) -> None:
    rows = [(name, number(figures[key])) for key, name in LINES.items() if figures.get(key) is not None]
    counts = " and ".join(f"{by} in {num} answers" for by, num in figures["token_counts"].items())
    print(f"{figures['model']} at {figures['server']}, /v1 {figures['endpoint']}")
    print(table(("figure", ""), [*rows, ("tokens counted by", counts or "neither side")]))
    print("\n" + table_of_times(figures))


def table_of_times(figures: Mapping[str, Any]) -> str:
    """Milliseconds of each metric."""
    from quintet.clients.latency import METRICS

    columns = ("mean", "median", "p90", "p95", "p99")
    rows_of_times = [
        (title, *(number(figures[f"{column}_{metric}_ms"]) for column in columns))
        for metric, title in METRICS.items()
        if f"mean_{metric}_ms" in figures
    ]
    return table(("milliseconds", *columns), rows_of_times)


def number(value: float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
