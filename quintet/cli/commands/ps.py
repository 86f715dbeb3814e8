"""List the models that a server of several (`quintet serve --models`) has loaded, with memory, requests and time."""

import argparse
import json
from typing import Any

from quintet.cli.tables import table
from quintet.clients import server_address as target
from quintet.clients.errors import incompatible_server
from quintet.clients.remote_engine import RemoteEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    target.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the models that are not unloaded."""
    server = target.target(arguments)
    answer = RemoteEngine(server).ask("GET", "/models/loaded")
    if arguments.json:
        print(json.dumps(answer, indent=2))
        return 0
    try:
        rows, memory = [_cells(each) for each in answer["models"]], answer["memory"]
        total = f"memory: {_gib(memory['planned'])} of {_gib(memory['budget'])} planned"
        if not memory["budget"]:
            total = "memory: not planned yet; the server is reading the headers of its models"
    except (KeyError, TypeError):
        raise incompatible_server(server.display_name, "/models/loaded lists no models") from None
    print(table(("name", "state", "memory", "requests", "waiting", "until"), rows))
    print(f"\n{total}")
    return 0


def _cells(model: dict[str, Any]) -> tuple[str, ...]:
    expires = model["expires"]
    until = "busy" if model["in_flight"] else "stays loaded" if expires is None else f"{expires:.0f} s"
    name = model["name"] + " (pinned)" * model["pinned"]
    return name, model["state"], _gib(model["memory"]), str(model["in_flight"]), str(model["waiting"]), until


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
