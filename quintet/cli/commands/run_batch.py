"""Answer a file of requests in OpenAI's batch format, on a server or, without --url, on an engine of our own."""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from quintet.cli.commands import _batch_urls
from quintet.cli.commands import _engine as engine
from quintet.clients import server_address as target
from quintet.common.value_parsers import count
from quintet.config import option
from quintet.config.schema import flags

if TYPE_CHECKING:
    from quintet.clients.batch_files import BatchCounts
    from quintet.clients.batch_resume import BatchRun
    from quintet.clients.progress import BatchProgress


@dataclass(frozen=True)
class BatchPace:
    """Limits for sending the lines."""

    concurrency: int = option(64, count(), "most requests at once", group="batch")
    max_line_bytes: int = option(8 * 2**20, count(), "longest line that is read (8M)", group="batch", metavar="BYTES")
    max_retries: int = option(
        5, count(0), "how often a line is sent again where the server has no room for it (429, 503)", group="batch"
    )
    timeout: int = option(
        3600, count(), "seconds without a byte of an answer that fail a line", group="batch", metavar="SECONDS"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_model_argument(parser)
    group = parser.add_argument_group("batch")
    group.add_argument("--input-file", "-i", required=True, metavar="FILE|URL", help="requests, a JSON object per line")
    group.add_argument("--output-file", "-o", required=True, metavar="FILE|URL", help="answers, in the same order")
    group.add_argument(
        "--resume", action="store_true",
        help="keep the answers that an earlier run of this input has left in FILE.part or FILE, and ask for the others",
    )  # fmt: skip
    group.add_argument(
        "--quiet",
        "-q",
        action="store_true",
        help="show no progress, and no summary unless a line failed or has unknown fields",
    )
    flags.add_arguments(parser, BatchPace)
    _batch_urls.add_arguments(parser)
    target.add_arguments(parser)
    engine.add_arguments(parser)


@_batch_urls.with_url_files
def run(arguments: argparse.Namespace) -> int:
    """Writes OUT.part while it works, and renames it at the end. 1 if any line failed."""
    pace, server = flags.from_arguments(arguments, BatchPace), target.target(arguments)
    output, part = Path(arguments.output_file), Path(arguments.output_file + ".part")
    if os.path.realpath(output) == os.path.realpath(arguments.input_file):
        raise ValueError(f"{output} is the input too; give another --output-file")
    if output.is_dir():
        raise ValueError(f"{output} is a folder; --output-file must name a file")
    if server.is_given:
        target.refuse_engine_flags(arguments)
    else:
        engine.config(engine.engine_settings(arguments))  # refuses before anything is started

    from quintet.clients import batch_resume as resume

    look = resume.resume_batch if arguments.resume else resume.start_batch
    with open(arguments.input_file, "rb") as source:
        work = look(source, output, part, pace.max_line_bytes)
        started = time.perf_counter()
        tally = _run_batch(work, server, arguments, pace)
    seconds = time.perf_counter() - started
    os.replace(part, output)
    if tally.failed or tally.ignored or not arguments.quiet:
        engine.print_stderr(_summary(tally, seconds, arguments.output_file))
    return 1 if tally.failed else 0


def _run_batch(
    work: "BatchRun", server: target.ServerTarget, arguments: argparse.Namespace, pace: BatchPace
) -> "BatchCounts":
    """Fills the part. What is in it outlives this process, however that ends."""
    from quintet.clients.http_client import run as run_loop
    from quintet.clients.progress import BatchProgress

    with work.open_part() as sink:
        try:
            # without open lines no server is needed
            with contextlib.nullcontext(server) if work.num_open == 0 else _server(server, arguments) as found:
                with BatchProgress(work.total, work.counts.num_kept, arguments.quiet) as progress:
                    tally = run_loop(_answer(work, sink, found, (pace, progress)))
        except (Exception, KeyboardInterrupt):
            if sink.tell():
                engine.print_stderr(f"the answers so far are in {work.part}; --resume goes on from there")
            raise
        os.fsync(sink.fileno())
    return tally


@contextlib.contextmanager
def _server(server: target.ServerTarget, arguments: argparse.Namespace) -> Iterator[target.ServerTarget]:
    """The one that was named, if it is there, or our own."""
    if server.is_given:
        from quintet.clients.remote_engine import RemoteEngine

        RemoteEngine(server).models()  # one clear message instead of one in every line
        yield server
        return

    from quintet.cli.commands._local_server import local_server

    if not arguments.quiet:
        engine.print_stderr("starting an engine for this batch; --url would use a server that runs")
    with local_server(arguments) as own:
        yield own


async def _answer(
    work: "BatchRun", sink: IO[bytes], server: target.ServerTarget, how: "tuple[BatchPace, BatchProgress]"
) -> "BatchCounts":
    from quintet.clients.batch_files import BatchOptions, BatchSender
    from quintet.clients.http_client import HttpClient
    from quintet.clients.http_connection import HttpTimeouts

    pace, progress = how
    connections = HttpClient(server.address, server.headers(), HttpTimeouts(first_byte=pace.timeout, idle=pace.timeout))
    try:
        manner = BatchOptions(pace.concurrency, pace.max_retries)
        batch = BatchSender(connections, server.display_name, manner, work.counts, progress.show)
        return await batch.write(work.requests(), sink)
    finally:
        connections.close()


def _summary(tally: "BatchCounts", seconds: float, file: str) -> str:
    kinds = ", ".join(f"{number} {kind}" for kind, number in tally.failures.most_common())
    kept = f" ({tally.num_kept} lines of an earlier run)" if tally.num_kept else ""
    failed = f", {tally.failed} failed ({kinds}; --resume asks again)" if tally.failed else ""
    rate = f"; {tally.tokens} tokens of output, {tally.tokens / seconds:.1f} tokens/s" if tally.tokens else ""
    fields = "; ".join(tally.ignored_fields)
    ignored = f"; in {tally.ignored} lines the server ignored fields that it does not know: {fields}" if fields else ""
    return f"{tally.done} lines: {tally.answered} answered{kept}{failed} in {seconds:.2f} s{rate}; {file}{ignored}"
