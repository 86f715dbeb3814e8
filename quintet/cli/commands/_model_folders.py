"""Flags of the commands for models on this machine: folders of GGUF files, and the hub's cache."""

import argparse
import os

from quintet.config import EngineConfig, read_environment
from quintet.config.schema import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("places").add_argument(
        "--folder", metavar="DIR", action="append", default=[],
        help="folder of GGUF files, beside those of QUINTET_MODEL_FOLDERS; may be repeated",
    )  # fmt: skip
    add_cache_arguments(parser)


def add_cache_arguments(parser: argparse.ArgumentParser, *names: str) -> None:
    """`--download-dir`, and the engine's flags of other names."""
    wanted = ("download_dir", *names)
    flags.add_arguments(parser, EngineConfig, [each for each in flags.names_of(EngineConfig) if each not in wanted])


def folders_of(arguments: argparse.Namespace) -> list[str]:
    """Returns the folders of the flags and of the environment, each once."""
    listed = (read_environment().model_folders or "").split(os.pathsep)
    return list(dict.fromkeys([*arguments.folder, *filter(None, listed)]))


def cache_of(arguments: argparse.Namespace) -> str | None:
    """Returns the folder of the hub's cache, if it is not the usual one."""
    directory = flags.given_settings(arguments, EngineConfig).get("download_dir")
    return None if directory is None else str(directory)
