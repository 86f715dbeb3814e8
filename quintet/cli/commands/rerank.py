"""Order the texts of a file by a query, the best first; the bundled embedding model if no other is named."""

import argparse
import json
import sys
import time
from typing import IO, Any

from quintet.cli.commands import _embedding_files as _texts
from quintet.cli.commands import _engine as engine
from quintet.cli.commands._embedding_files import TextLine
from quintet.config import BUNDLED_EMBED
from quintet.pooling_params import PoolingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_model_argument(parser)
    parser.add_argument("QUERY", help="what is looked for")
    parser.add_argument("FILE", help="documents: one on each line; .jsonl: strings, or objects; -: standard input")
    group = parser.add_argument_group("input and output")
    group.add_argument("--output", "-o", metavar="FILE", help="JSON lines with score and line, instead of a listing")
    group.add_argument("--json", action="store_true", help="print JSON lines")
    group.add_argument("--field", default="text", metavar="NAME", help="which entry of objects is the text (text)")
    group.add_argument("--top-n", type=_count, metavar="N", help="how many are shown; all if not given")
    group.add_argument("--quiet", "-q", action="store_true", help="print no figures to standard error")
    engine.add_arguments(parser, model=BUNDLED_EMBED)


def _count(word: str) -> int:
    if not word.isascii() or not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, not {word!r}")
    return int(word)


def run(arguments: argparse.Namespace) -> int:
    """Scores each document: a cross-encoder reads it with the query, other models compare embeddings."""
    lines = list(_texts.read(arguments.FILE, arguments.field))
    if not lines:
        raise ValueError(f"{arguments.FILE} holds no documents; put one on each line")
    llm = _texts.open_model(arguments)
    try:
        started = time.perf_counter()
        cut = PoolingParams(truncate_prompt_tokens=-1)
        texts = [line.text for line in lines]
        outputs = llm.score(arguments.QUERY, texts, pooling_params=cut, use_tqdm=sys.stderr.isatty())
        seconds = time.perf_counter() - started
    finally:
        llm.close()
    scores = [each.outputs.score for each in outputs]
    best = sorted(range(len(lines)), key=lambda at: -scores[at])[: arguments.top_n]
    found = [(scores[at], lines[at]) for at in best]
    if arguments.output is not None:
        with _texts.atomic_file(arguments.output) as part, part.open("w", encoding="utf-8") as file:
            _write(file, found)
    elif arguments.json:
        _write(sys.stdout, found)
    else:
        for score, line in found:
            print(f"{score:.4f}  {line.text}")
    if not arguments.quiet:
        engine.print_stderr(f"{len(lines)} documents in {seconds:.2f} s")
    return 0


def _write(file: IO[str], found: list[tuple[float, TextLine]]) -> None:
    for score, line in found:
        record: dict[str, Any] = {"score": score, "line": line.number, **(line.other_fields or {"text": line.text})}
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
