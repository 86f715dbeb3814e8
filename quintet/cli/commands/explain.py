"""Show what would run a model here: the platform, the memory plan, the provider of each op, and what was rejected."""

import argparse

from quintet.cli.commands import _engine as engine
from quintet.config import BUNDLED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "MODEL", nargs="?", default=None, help="folder, hub id, 'bundled' or 'bundled-embed', instead of --model"
    )
    engine.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation as the engine words it."""
    kwargs = engine.engine_settings(arguments)
    if arguments.MODEL is not None and kwargs.get("model", arguments.MODEL) != arguments.MODEL:
        raise ValueError(f"two models: {arguments.MODEL!r} and --model {kwargs['model']!r}; give one")
    kwargs["model"] = arguments.MODEL or kwargs.get("model", BUNDLED)
    config = engine.config(kwargs)

    from quintet.api.explain import explain

    print(explain(config))
    return 0
