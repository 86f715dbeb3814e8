"""Write a quantized checkpoint: compressed-tensors, by rounding to nearest, GPTQ or AWQ, and say what it costs."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.cli.commands._engine import print_stderr
from quintet.config import EngineConfig
from quintet.config.schema import flags
from quintet.quantize.config import QuantizeConfig

if TYPE_CHECKING:
    from quintet.conformance.divergence import Divergence
    from quintet.quantize.quantize import QuantizeResult

NUM_SEQUENCES, MAX_LENGTH = 16, 512  # of the text that both models are compared on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("MODEL", nargs="?", help="folder, hub id or 'bundled', in floats")
    flags.add_arguments(parser, QuantizeConfig)


def run(arguments: argparse.Namespace) -> int:
    """Writes the folder, then compares it with the original."""
    if arguments.MODEL is None:
        raise ValueError("no model to quantize: give a folder, a hub id or 'bundled'")
    asked = flags.from_arguments(arguments, QuantizeConfig)

    from quintet.quantize.quantize import quantize

    written = quantize(arguments.MODEL, asked)
    print(_summary(written))
    report: dict[str, Any] = {"model": arguments.MODEL, **asdict(written), "folder": str(written.folder)}
    if asked.report:
        found = _compare(arguments.MODEL, written, asked)
        print(found)
        report |= {"on": asked.evaluate or "the model's own words", **asdict(found)}
    if asked.json:
        Path(asked.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _summary(written: "QuantizeResult") -> str:
    return (
        f"{written.folder}: {written.products} products as {written.scheme} by {written.method}, {written.left} left "
        f"as they were; {written.bytes_before / 1e6:.1f} MB -> {written.bytes_after / 1e6:.1f} MB "
        f"in {written.seconds:.1f} s"
    )


def _compare(model: str, written: "QuantizeResult", asked: QuantizeConfig) -> "Divergence":
    """Both models over the same text."""
    from quintet.conformance.divergence import divergence
    from quintet.quantize.eval_text import held_out

    print_stderr("comparing with the original ...")
    before = EngineConfig(model, device=asked.device)
    rows = held_out(before, asked.evaluate, NUM_SEQUENCES, MAX_LENGTH)
    return divergence(before, before.replace(model=str(written.folder)), rows)
