"""Serve a model over HTTP, as OpenAI's API does; with no MODEL, the bundled one. SIGTERM lets running requests end."""

import argparse
import dataclasses
import logging
from typing import Any

from quintet.cli.commands import _engine as engine
from quintet.cli.config_file import read_config_file
from quintet.common.logging_setup import install_server_log
from quintet.config import BUNDLED, EngineConfig, read_environment
from quintet.config.schema import flags
from quintet.config.schema.error_names import NameTranslation, Spelling
from quintet.config.schema.typed_flags import strings_in
from quintet.hub.model_names import is_model_name
from quintet.server.config import ServerConfig
from quintet.server.file_limits import fit_file_limit
from quintet.server.hosts import is_loopback
from quintet.server.listen import check_certificate, listen

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "MODEL", nargs="?", help="folder, Hugging Face hub id or 'bundled-embed'; the bundled chat model if not given"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of flags without their dashes; flags come before it"
    )
    flags.add_arguments(parser, ServerConfig)
    engine.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C."""
    served, loaded = _settings(arguments)
    install_server_log(dataclasses.asdict(served))
    logger.info("%s", engine.loading_message(loaded.model))  # before the imports, which take a second
    if served.headless or loaded.node_rank:
        return _run_follower(served, loaded)
    if not (served.uds or served.api_key or is_loopback(served.host)):
        logger.warning("other machines can use this server without a key; give --api-key, or keep --host 127.0.0.1")
    served = fit_file_limit(served)
    from quintet.server.processes.supervisor import Supervisor  # before there is anything to clear up

    if served.middleware:
        from quintet.server.http.middleware import custom as yours

        yours.load_middlewares(served.middleware)
    check_certificate(served)
    listener = listen(served)
    return Supervisor(loaded, served, listener, arguments.wording).run()


def _run_follower(served: ServerConfig, loaded: EngineConfig) -> int:
    """A machine beside machine 0."""
    if not loaded.node_rank:
        raise ValueError(
            "--headless: machine 0 takes the requests, by HTTP; leave it out here, and give the others --node-rank 1 "
            "and up, with --nnodes"
        )
    if not served.headless:
        logger.info("machine %d of %d serves no HTTP: machine 0 does", loaded.node_rank, loaded.nnodes)
    from quintet.engine.parallel.multi_node import follow_rank_0

    return follow_rank_0(loaded)


def _settings(arguments: argparse.Namespace) -> tuple[ServerConfig, EngineConfig]:
    """Flags come before the file, and the file before the environment."""
    file: dict[str, Any] = {}
    if arguments.config:
        file, spelled = read_config_file(arguments.config)
        typed = {*flags.given_settings(arguments, ServerConfig), *engine.engine_settings(arguments)}
        arguments.wording = _with_file_keys(
            arguments.wording, {k: v for k, v in spelled.items() if k not in typed}, file
        )
    server_names = {each.name for each in dataclasses.fields(ServerConfig)}
    server = {name: file.pop(name) for name in list(file) if name in server_names}
    server.update(flags.given_settings(arguments, ServerConfig))
    if arguments.MODEL is None and "model" not in {**file, **engine.engine_settings(arguments)}:
        arguments.MODEL = _model_after_names(arguments, server)
    loaded: dict[str, Any] = {**file, **engine.engine_settings(arguments)}
    environment = read_environment()
    if environment.api_key is not None:
        server["api_key"] = (*server.get("api_key", ()), environment.api_key)
    if environment.admin_api_key is not None:
        server.setdefault("admin_api_key", environment.admin_api_key)
    if loaded.get("nnodes", 1) == 1:  # machines compare their settings, and machine 0 may be an LLM
        loaded.setdefault("capture_decode_ahead", True)  # captured later, each would hold up running requests
    config = engine.config(loaded)
    for name in ("reasoning_parser", "reasoning_parser_plugin"):  # vLLM has them there, too
        if server.get(name) is None:
            server[name] = getattr(config.structured_outputs_config, name)
    return ServerConfig(**server), config


def _model_after_names(arguments: argparse.Namespace, server: dict[str, Any]) -> str | None:
    """Takes the model of `--served-model-name NAME MODEL` out of the names; None if each flag has one name."""
    names = list(flags.given_settings(arguments, ServerConfig).get("served_model_name", ()))
    if len(names) <= sum(word.split("=")[0] == "--served-model-name" for word in arguments.words):
        return None
    if not is_model_name(names[-1]):
        raise ValueError(
            f"--served-model-name takes {' and '.join(map(repr, names))} as names, and no model is left; give the "
            f"model first: `quintet serve {BUNDLED} --served-model-name {' '.join(names)}`"
        )
    server["served_model_name"] = names[:-1]
    return str(names[-1])


def _with_file_keys(wording: NameTranslation, spelled: dict[str, Spelling], file: dict[str, Any]) -> NameTranslation:
    """Makes errors about a setting of the config file name the file's key."""
    return wording.with_more(
        spelled, {f"{each.file}: {each.word}": strings_in(file[name]) for name, each in spelled.items() if name in file}
    )
