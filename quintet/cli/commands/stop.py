"""Unload a model of a server of several (`quintet serve --models`). The next request for it loads it again."""

import argparse

from quintet.clients import server_address as target
from quintet.clients.remote_engine import RemoteEngine
from quintet.common.terminal import print_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("MODEL", help="name of the model, as `quintet ps` lists it")
    target.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Waits until the model's engine has ended; an error if it has requests."""
    answer = RemoteEngine(target.target(arguments)).ask("POST", "/models/unload", {"model": arguments.MODEL})
    print_stderr(f"{answer.get('model', arguments.MODEL)} is unloaded")
    return 0
