"""Serve a model over HTTP, as OpenAI's API does; with no MODEL, the bundled one. SIGTERM lets running requests end."""

import argparse
import dataclasses
import logging
from typing import Any

from quintet.cli.commands import _engine as engine
from quintet.common.imports import without_garbage_collection
from quintet.common.logging_setup import install_server_log
from quintet.common.plugins import STAT_LOGGERS, entry_points
from quintet.config import BUNDLED, EngineConfig, read_environment
from quintet.config.schema import flags
from quintet.config.schema.error_names import NameTranslation, Spelling
from quintet.config.schema.typed_flags import strings_in
from quintet.hub.model_names import is_model_name, served_name
from quintet.router.models.config import ModelsConfig
from quintet.server.config import ServerConfig, check_adapters
from quintet.server.config_file import read_config_file
from quintet.server.file_limits import fit_file_limit
from quintet.server.hosts import is_loopback
from quintet.server.listen import check_certificate, listen
from quintet.server.lora_modules import check_files

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "MODEL",
        nargs="?",
        help="folder, Hugging Face hub id, 'bundled-embed' or 'bundled-vision'; the bundled chat model if not given",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of flags without their dashes; flags come before it"
    )
    flags.add_arguments(parser, ServerConfig)
    flags.add_arguments(parser, ModelsConfig)
    engine.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C."""
    models = flags.from_arguments(arguments, ModelsConfig)
    if models.models is not None:
        return _run_models(arguments, models)
    if given := flags.given_settings(arguments, ModelsConfig):
        raise ValueError(f"--{min(given).replace('_', '-')} has no effect without --models; leave it out")
    served, loaded = _settings(arguments)
    install_server_log(dataclasses.asdict(served))
    if served.headless or loaded.node_rank:
        return _run_follower(served, loaded)
    check_files(served.lora_modules, loaded.max_lora_rank)
    _warn_if_open(served)
    served = fit_file_limit(served)
    logger.info("%s", engine.loading_message(loaded.model))  # before the imports, which take a second
    with without_garbage_collection():
        from quintet.server.processes.supervisor import Supervisor  # before there is anything to clear up

    _check_plugins(served)
    check_certificate(served)
    listener = listen(served)
    return Supervisor(loaded, served, listener, arguments.wording).run()


def _check_plugins(served: ServerConfig) -> None:
    """Imports the operator's code, before the engine starts. ValueError says what cannot be used."""
    if served.middleware:
        from quintet.server.http.middleware import custom as yours

        yours.load_middlewares(served.middleware)
    if served.endpoint_plugins:
        from quintet.server.http.endpoint_plugins import load_endpoint_plugins

        load_endpoint_plugins(served.endpoint_plugins)
    if entry_points(STAT_LOGGERS):
        from quintet.server.metrics.stat_loggers import load_stat_loggers

        load_stat_loggers()


def _run_models(arguments: argparse.Namespace, config: ModelsConfig) -> int:
    """Serves several models, each by an engine of its own."""
    from quintet.router.models.app import ModelsApp
    from quintet.router.models.core import ModelsCore
    from quintet.router.models.models_file import REFUSED, read_models
    from quintet.router.server import RouterServer, fit_connections
    from quintet.server.uvicorn_server import run_loop

    server, loaded = _given_settings(arguments)
    if "model" in loaded:
        raise ValueError("--models names the models; leave out MODEL and --model")
    for name in REFUSED:
        if name in server:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --models; leave it out")
    served = ServerConfig(**server)
    specs = read_models(str(config.models), loaded, server)
    install_server_log(dataclasses.asdict(served))
    _warn_if_open(served)
    served = fit_connections(served)
    check_certificate(served)
    listener = listen(served)
    run_loop(RouterServer(ModelsCore(specs, config), served, ModelsApp).run(listener))
    return 0


def _warn_if_open(served: ServerConfig) -> None:
    if not (served.uds or served.api_key or is_loopback(served.host)):
        logger.warning("other machines can use this server without a key; give --api-key, or keep --host 127.0.0.1")


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
    """Returns the settings of a server of one model."""
    server, loaded = _given_settings(arguments)
    if loaded.get("nnodes", 1) == 1:  # machines compare their settings, and machine 0 may be an LLM
        loaded.setdefault("capture_decode_ahead", True)  # captured later, each would hold up running requests
    config = engine.config(loaded)
    for name in ("reasoning_parser", "reasoning_parser_plugin"):  # vLLM has them there, too
        if server.get(name) is None:
            server[name] = getattr(config.structured_outputs_config, name)
    if config.enable_lora:
        _add_lora_environment(server)
    served = ServerConfig(**server)
    check_adapters(served, config.enable_lora, served.served_model_name or (served_name(config.model),))
    return served, config


def _add_lora_environment(server: dict[str, Any]) -> None:
    environment = read_environment()
    if environment.allow_runtime_lora or environment.vllm_allow_runtime_lora:
        server.setdefault("allow_runtime_lora", True)
    if environment.lora_cache_dir is not None and server.get("allow_runtime_lora"):
        server.setdefault("lora_cache_dir", environment.lora_cache_dir)


def _given_settings(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns settings of the server and of the engine. Flags come before the file, and the file before the
    environment."""
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
    return server, loaded


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
