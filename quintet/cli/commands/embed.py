"""Make vectors of texts, lines of JSON or rows of a NumPy array; the bundled embedding model if no other is named."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from quintet.cli.commands import _embedding_files as _texts
from quintet.cli.commands import _engine as engine
from quintet.cli.commands._embedding_files import TextLine
from quintet.config import BUNDLED_EMBED
from quintet.config.schema import flags
from quintet.pooling_params import PoolingParams

if TYPE_CHECKING:
    import numpy as np

    from quintet import LLM

_EXCLUDED = ("task", "step_tag_id", "returned_token_ids", "skip_reading_prefix_cache", "use_activation")
_WHOLE = -1  # texts that are too long are cut, as libraries of embeddings do, and counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "TEXT", metavar="[MODEL] TEXT", nargs="*", default=[],
        help="what becomes vectors; none or -: --input or standard input. A first word that names a model is the model",
    )  # fmt: skip
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input", "-i", metavar="FILE", help="a text on each line; .jsonl: strings, or objects (-: stdin)"
    )
    group.add_argument(
        "--output", "-o", metavar="FILE", help=".jsonl, or .npy for an array [texts, numbers] of float32"
    )
    group.add_argument("--field", default="text", metavar="NAME", help="which entry of objects is the text (text)")
    group.add_argument("--prompt-name", metavar="NAME", help="the model's prompt that is put before each text")
    group.add_argument("--quiet", "-q", action="store_true", help="print no figures to standard error")
    flags.add_arguments(parser, PoolingParams, _EXCLUDED, "vectors", {"truncate_prompt_tokens": _WHOLE})
    engine.add_arguments(parser, model=BUNDLED_EMBED)


def run(arguments: argparse.Namespace) -> int:
    """Writes the vectors in the order of the texts."""
    params = PoolingParams(**{"truncate_prompt_tokens": _WHOLE, **flags.given_settings(arguments, PoolingParams)})
    arguments.TEXT = engine.take_model(arguments, arguments.TEXT, arguments.input is not None)
    lines = _lines(arguments)
    _texts.need_file(arguments.input)
    llm = _texts.open_model(arguments)
    try:
        started = time.perf_counter()
        with _open_output(arguments) as write:
            done = _embed(llm, lines, params, arguments.prompt_name, write)
        seconds = time.perf_counter() - started
    finally:
        llm.close()
    if not arguments.quiet:
        note = (
            f"; {done.truncated} have {llm.pooling_bounds.max_model_len} tokens, or were cut to that"
            if done.truncated
            else ""
        )
        note += f"; {done.empty} empty lines were left out" if done.empty else ""
        engine.print_stderr(f"{done.texts} texts in {seconds:.2f} s, {done.texts / seconds:.1f} texts/s{note}")
    return 0


def _lines(arguments: argparse.Namespace) -> Iterator[TextLine]:
    if arguments.TEXT and arguments.input:
        raise ValueError(f"--input is given and the text {arguments.TEXT[0][:40]!r}, too; give one of them")
    if arguments.TEXT and arguments.TEXT != [_texts.STDIN]:
        return iter([TextLine(text, place, {}) for place, text in enumerate(arguments.TEXT, 1)])
    if arguments.input is None and not arguments.TEXT and sys.stdin.isatty():
        raise ValueError('no text: give one (`quintet embed "The sky is blue"`), or a file with --input')
    return _texts.read(arguments.input or _texts.STDIN, arguments.field)


class _EmbedCounts(NamedTuple):
    """Counts of embedded texts."""

    texts: int
    truncated: int  # those that are as long as the model takes
    empty: int  # lines before the last text that hold none


def _embed(
    llm: "LLM", lines: Iterator[TextLine], params: PoolingParams, prompt_name: str | None, write: "_Write"
) -> _EmbedCounts:
    count, cut, last, most = 0, 0, 0, llm.pooling_bounds.max_model_len
    for batch in _texts.batches(lines):
        texts = [each.text for each in batch]
        outputs = llm.embed(texts, pooling_params=params, prompt_name=prompt_name, use_tqdm=False)
        for line, output in zip(batch, outputs, strict=True):
            write(line, output.outputs.data)
            cut += len(output.prompt_token_ids) == most
        count, last = count + len(batch), batch[-1].number
    if not count:
        raise ValueError("there are no texts; put one on each line")
    return _EmbedCounts(count, cut, last - count)


_Write = Callable[[TextLine, "np.ndarray[Any, np.dtype[np.float32]]"], None]


@contextlib.contextmanager
def _open_output(arguments: argparse.Namespace) -> Iterator[_Write]:
    """Opens the output and yields a function that writes one vector to it."""
    if arguments.output is None:
        yield lambda line, vector: _write_json_line(sys.stdout, line, vector)
    elif arguments.output.endswith(".npy"):
        with _npy_writer(arguments.output) as write:
            yield write
    else:
        with _texts.atomic_file(arguments.output) as part, part.open("w", encoding="utf-8") as file:
            yield lambda line, vector: _write_json_line(file, line, vector)


def _write_json_line(file: IO[str], line: TextLine, vector: "np.ndarray[Any, np.dtype[np.float32]]") -> None:
    record = {**(line.other_fields or {"text": line.text}), "embedding": vector.tolist()}
    file.write(json.dumps(record, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def _npy_writer(file: str) -> Iterator[_Write]:
    """NumPy's own format; how many rows there are is known when all are."""
    import numpy as np

    rows: list[Any] = []
    with _texts.atomic_file(file) as part:
        yield lambda line, vector: rows.append(vector)
        with part.open("wb") as target:
            np.save(target, np.stack(rows))
