"""Try an architecture: a small random copy of a model runs here and in transformers, and the outputs are compared."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from quintet.cli.commands import _engine as engine
from quintet.cli.commands import _model_folders as places

if TYPE_CHECKING:
    from quintet.api.trial.trial import TrialResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("MODEL", nargs="?", help="folder, GGUF file or hub id; its configuration alone is read")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print a JSON object; with --all it holds a list of results")
    group = parser.add_argument_group("all model types")
    group.add_argument(
        "--all", action="store_true", help="try every causal model type and encoder of transformers, by its defaults"
    )
    group.add_argument("--limit", metavar="SECONDS", type=float, default=60.0, help="time of one type (default: 60)")
    group.add_argument(
        "--total", metavar="SECONDS", type=float, default=600.0,
        help="time of all; later types are listed as not run (default: 600)",
    )  # fmt: skip
    places.add_cache_arguments(parser, "revision", "hf_token")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line. 0 if the model runs and its outputs equal those of transformers; 1 otherwise."""
    if arguments.all == (arguments.MODEL is not None):
        raise ValueError("give a MODEL, or --all, and not both: `quintet try bundled`")
    if arguments.all:
        return _run_all(arguments)
    config = engine.config(engine.engine_settings(arguments))

    from quintet.api.trial.trial import try_model

    result = try_model(config)
    print(json.dumps(result.to_dict()) if arguments.json else result)
    return 0 if result.passed else 1


def _run_all(arguments: argparse.Namespace) -> int:
    """Tries all types, one after another."""
    from quintet.api.trial.all_types import try_all

    def show(result: "TrialResult") -> None:
        print(result, file=sys.stderr if arguments.json else sys.stdout, flush=True)

    results = try_all(limit=arguments.limit, total=arguments.total, show=show)
    if arguments.json:
        from transformers import __version__

        print(json.dumps({"transformers": __version__, "results": [each.to_dict() for each in results]}, indent=1))
    return 0 if all(each.passed for each in results) else 1
