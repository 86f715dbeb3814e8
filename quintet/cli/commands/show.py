"""Show a model's size, context and quantization, and whether it fits into memory here. Loads and downloads nothing."""

import argparse
import dataclasses

from quintet.cli.commands import _engine as engine
from quintet.config import BUNDLED, read_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_model_argument(parser)
    engine.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each fact. 1 if the model does not fit."""
    settings = {"model": BUNDLED, **engine.engine_settings(arguments)}
    config = engine.config(settings)

    from quintet.api.model_summary import summarize
    from quintet.hub.model_names import is_local
    from quintet.hub.resolve import resolve_model

    offline = dataclasses.replace(read_environment(), hf_hub_offline=True)
    try:
        path = resolve_model(config, offline)
    except (ConnectionError, FileNotFoundError):
        if is_local(config.model) or "/" not in config.model:
            raise
        raise FileNotFoundError(
            f"{config.model!r} is not on this machine: `quintet pull {config.model}` downloads it, and `quintet list` "
            "shows the models that are here"
        ) from None
    summary = summarize(config, path)
    print(summary)
    return 0 if summary.fits else 1
