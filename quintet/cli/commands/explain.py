"""Show what would run a model here: the platform, the memory plan, the provider of each op, and what was rejected."""

import argparse

from quintet.cli.commands import _engine as engine
from quintet.config import BUNDLED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_model_argument(parser)
    engine.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation as the engine words it."""
    kwargs = {"model": BUNDLED, **engine.engine_settings(arguments)}
    config = engine.config(kwargs)

    from quintet.api.explain import explain

    print(explain(config))
    return 0
