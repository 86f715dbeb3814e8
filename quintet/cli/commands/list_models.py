"""List the models on this machine: in the hub's cache, and GGUF files in folders. Other commands take their names."""

import argparse
import dataclasses
import json
import time

from quintet.cli.commands import _model_folders as places
from quintet.cli.tables import age, byte_size, table
from quintet.common.terminal import print_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    places.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints a table, last used first."""
    from quintet.hub.local_models import local_models

    found, warnings = local_models(places.folders_of(arguments), places.cache_of(arguments))
    for each in warnings:
        print_stderr(f"warning: the hub's cache: {each}")
    if arguments.json:
        print(json.dumps([dataclasses.asdict(each) for each in found], ensure_ascii=False, indent=2))
        return 0
    if not found:
        print_stderr("no models here: `quintet pull OWNER/NAME:Q4_K_M` downloads one; `bundled` is always there")
        return 0
    now = time.time()
    rows = [(each.name, byte_size(each.size), each.quantization, age(now - each.last_used)) for each in found]
    print(table(("model", "size", "quantization", "used"), rows))
    return 0
