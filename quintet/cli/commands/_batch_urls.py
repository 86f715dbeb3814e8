"""Batches with an http(s) address as input or output: fetched before, sent after, local files in between."""

import argparse
import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quintet.cli.commands import _engine as engine
from quintet.common.value_parsers import count, optional, text
from quintet.config import option
from quintet.config.schema import flags

Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class BatchTransferOptions:
    """Settings for input and output at http(s) addresses."""

    output_tmp_dir: str | None = option(
        None, optional(text), "folder where answers for an http(s) address lie until they are sent", group="batch",
        metavar="FOLDER",
    )  # fmt: skip
    max_input_bytes: int = option(
        2**30, count(), "largest input that is fetched from an http(s) address (1G)", group="batch", metavar="BYTES"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_arguments(parser, BatchTransferOptions)


def with_url_files(run: Run) -> Run:
    """The command, which may be given addresses for its files. Answers that cannot be sent stay here."""

    @functools.wraps(run)
    def run_over_http(arguments: argparse.Namespace) -> int:
        from quintet.clients.url_files import is_url

        transfer = flags.from_arguments(arguments, BatchTransferOptions)
        source, target = is_url(arguments.input_file), is_url(arguments.output_file)
        if target and getattr(arguments, "resume", False):
            raise ValueError("--resume goes on with a file that is here; let --output-file name one")
        if target and arguments.input_file == arguments.output_file:
            raise ValueError("--output-file is the input's address too; give another")
        if not (source or target):
            return run(arguments)
        folder = Path(tempfile.mkdtemp(prefix="batch-of-quintet-", dir=transfer.output_tmp_dir))
        try:
            return _run(run, arguments, folder, transfer, source, target)
        finally:
            _remove_unless_unsent(folder)

    return run_over_http


def _run(
    run: Run, arguments: argparse.Namespace, folder: Path, transfer: BatchTransferOptions, source: bool, target: bool
) -> int:
    from quintet.clients.url_files import fetch, send, without_query

    here = argparse.Namespace(**vars(arguments))
    if source:
        here.input_file = str(folder / "in.jsonl")
        with open(here.input_file, "wb") as file:
            fetch(arguments.input_file, file, transfer.max_input_bytes)
    if not target:
        return run(here)
    answers = folder / "out.jsonl"
    here.output_file = str(answers)
    code = run(here)
    try:
        send(arguments.output_file, answers)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; the answers are in {answers}") from None
    answers.unlink()
    if not arguments.quiet:
        engine.print_stderr(f"the answers were sent to {without_query(arguments.output_file)}")
    return code


def _remove_unless_unsent(folder: Path) -> None:
    """Deletes the folder, unless it holds output that could not be sent: that is left to the user."""
    (folder / "in.jsonl").unlink(missing_ok=True)
    left = [each for each in folder.iterdir() if each.stat().st_size]
    if not left:
        shutil.rmtree(folder)
