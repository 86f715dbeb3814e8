"""Stand before several servers as one: requests go to who has their beginning cached and has least to do."""

import argparse
import dataclasses
import logging

from quintet.common.logging_setup import install_server_log
from quintet.config import read_environment
from quintet.config.schema import flags
from quintet.router.config import EXCLUDED_SERVER_FIELDS, PORT, RouterConfig
from quintet.server.config import ServerConfig
from quintet.server.hosts import is_loopback
from quintet.server.listen import check_certificate, listen

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_arguments(parser, RouterConfig)
    flags.add_arguments(parser, ServerConfig, exclude=EXCLUDED_SERVER_FIELDS, defaults={"port": PORT})


def run(arguments: argparse.Namespace) -> int:
    """Routes until SIGTERM or Ctrl-C."""
    config, door = flags.from_arguments(arguments, RouterConfig), _server_config(arguments)
    install_server_log(dataclasses.asdict(door))
    if not (door.uds or door.api_key or is_loopback(door.host)):
        logger.warning("other machines can use this router without a key; give --api-key, or keep --host 127.0.0.1")
    from quintet.router.core import RouterCore
    from quintet.router.server import RouterServer, fit_connections
    from quintet.server.uvicorn_server import run_loop

    door = fit_connections(door)
    check_certificate(door)
    listener = listen(door)
    core = RouterCore(config, door.api_key[0] if door.api_key else None)
    run_loop(RouterServer(core, door).run(listener))
    return 0


def _server_config(arguments: argparse.Namespace) -> ServerConfig:
    """Flags come before the environment."""
    given = {"port": PORT, **flags.given_settings(arguments, ServerConfig)}
    environment = read_environment()
    if environment.api_key is not None:
        given["api_key"] = (*given.get("api_key", ()), environment.api_key)
    if environment.admin_api_key is not None:
        given.setdefault("admin_api_key", environment.admin_api_key)
    return ServerConfig(**given)
