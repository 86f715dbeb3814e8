"""Remove a model from the hub's cache or from a folder of GGUF files. Asks first, unless --yes is given."""

import argparse
import sys

from quintet.cli.commands import _model_folders as places
from quintet.cli.tables import byte_size
from quintet.common.terminal import print_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("MODEL", nargs="+", help="as `quintet list` names it; OWNER/NAME: all files of a repository")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    places.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Removes each; 1 if one was kept."""
    from quintet.hub.model_removal import plan_removal

    folders, cache, kept = places.folders_of(arguments), places.cache_of(arguments), 0
    for name in arguments.MODEL:
        removal = plan_removal(name, folders, cache)
        if not arguments.yes and not _agrees(f"remove {removal.description}, {byte_size(removal.size)}? [y/N] "):
            kept += 1
            continue
        removal.run()
        print(f"removed {name}: {byte_size(removal.size)}")
    return 1 if kept else 0


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ValueError("cannot ask without a terminal; --yes removes without a question")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print_stderr("")
        return False
