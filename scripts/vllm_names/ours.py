"""Finds which of vLLM's names quintet has, and which it refuses with a reason."""

import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import quintet
from quintet.cli.main import COMMANDS
from quintet.config import EngineConfig, setting_fields
from quintet.config.schema import unsupported
from quintet.config.schema.fields import entry_aliases
from quintet.config.schema.flags import Parser
from quintet.config.speculative import SpeculativeConfig
from quintet.config.structured_outputs import StructuredOutputsConfig
from quintet.media.families import FAMILIES
from quintet.models import families
from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS
from quintet.pooling_params import LateChunkingParams, LateInteractionParams, PoolingParams
from quintet.sampling_params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from quintet.server.config import ServerConfig
from quintet.server.metrics.catalogue import ALL_METRICS
from scripts.reference_pages.http_page import schema

ROOT = Path(__file__).parents[2]
_GROUPS = {"platform_plugins": "platforms"}
_CLASS = re.compile(r"^class (\w+)", re.M)
_STRING = re.compile(r'"([A-Za-z0-9_]+)"')


def has(group: str, name: str) -> bool:
    """Returns True if quintet has the name, under the same name."""
    name = name.removesuffix("_total") if group == "metrics" else name
    return name in _names(group) if group in _TABLES else _CHECKS[group](name)


def refused(group: str, name: str) -> bool:
    """Returns True if quintet refuses it and says what to do instead."""
    tables: Collection[str] = {
        "LLM: methods": unsupported.METHODS,
        "AsyncLLM: methods": unsupported.METHODS,
        **dict.fromkeys(("SamplingParams", "BeamSearchParams", "PoolingParams"), unsupported.PARAMETERS),
        "exports of the package": unsupported.NAMES,
        "HTTP routes": unsupported.ROUTES,
    }.get(group, ())
    if group == "engine arguments":
        return unsupported.unsupported_reason(name) is not None
    if group == "flags of the server":
        return f"--{name.replace('_', '-')}" in unsupported.FLAGS or unsupported.unsupported_reason(name) is not None
    return name in tables


def _fields(kind: type) -> set[str]:
    return {each.name for each in dataclasses.fields(kind)}


def _methods(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@cache
def _names(group: str) -> set[str]:
    return set(_TABLES[group]())


@cache
def _sources(folder: str) -> str:
    files = sorted((ROOT / folder).rglob("*.py"))
    return "\n".join(each.read_text() for each in files)


@cache
def _routes() -> set[str]:
    """Paths of the server's routes, those that a flag adds among them."""
    return set(schema()["paths"]) | {"/v1/realtime"}  # a WebSocket, which the description leaves out


def _takes(config: type, field: str, name: str) -> bool:
    """Returns True if a setting takes the value."""
    (found,) = (each for each in dataclasses.fields(config) if each.name == field)
    try:
        found.metadata["parse"](name)
    except (ValueError, TypeError):
        return False
    return True


def _takes_setting(name: str) -> bool:
    """Returns True if there is an engine argument of the name, or an alias, or it holds such settings."""
    known = {alias for each in setting_fields(EngineConfig) for alias in (each.name, *each.metadata["aliases"])}
    known |= {*entry_aliases(EngineConfig)}
    return name in known or any(each.startswith(f"{name}.") for each in known)


@cache
def _types_by_class() -> dict[str, set[str]]:
    """Model types by the names of transformers' classes."""
    from transformers.models.auto import modeling_auto

    found: dict[str, set[str]] = {}
    for table in (each for name, each in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")):
        for kind, classes in table.items():
            for name in (classes,) if isinstance(classes, str) else classes:
                found.setdefault(name, set()).add(kind)
    return found


@cache
def _equal_types() -> set[str]:
    """Model types that ran with transformers' results (`quintet try --all`)."""
    tried = json.loads((ROOT / "conformance" / "tried_models.json").read_text())["results"]
    return {each["model_type"] for each in tried if each["equal"]}


@cache
def _named() -> set[str]:
    """Names that the reading of checkpoints, or a test that runs one, has."""
    tests = ("tests/e2e", "tests/engine/pooling", "tools/quintet_tools/checkpoints")
    folders = ("quintet/hub", "quintet/models", "quintet/engine/pooling", *tests)
    return set(_STRING.findall("\n".join(map(_sources, folders)))) | set(_CLASS.findall(_sources("quintet/models")))


def _serves(name: str) -> bool:
    """Returns True for an architecture whose text model, or encoder, is served."""
    return bool(_types_by_class().get(name, set()) & ({*families()} | _equal_types())) or name in _named()


def _serves_media(name: str) -> bool:
    return bool(_types_by_class().get(name, set()) & {*FAMILIES}) or name in _STRING.findall(
        _sources("tests/e2e/media")
    )


def _has_command(name: str) -> bool:
    return name in COMMANDS or f"bench {name}" in COMMANDS or name == "bench"


def _flags() -> set[str]:
    """Names of the flags of `quintet serve`, under each name."""
    parser = Parser()
    importlib.import_module(COMMANDS["serve"].module).add_arguments(parser)
    options = (name for action in parser._actions for name in action.option_strings)
    return {name.removeprefix("--").replace("-", "_") for name in options}


def _exports() -> set[str]:
    return set(quintet.__all__)


_TABLES: dict[str, Callable[[], Collection[str]]] = {
    "LLM: methods": lambda: _methods(quintet.LLM),
    "AsyncLLM: methods": lambda: _methods(quintet.AsyncLLM),
    "exports of the package": _exports,
    "SamplingParams": lambda: _fields(SamplingParams),
    "BeamSearchParams": lambda: _fields(BeamSearchParams),
    "StructuredOutputsParams": lambda: _fields(StructuredOutputsParams),
    "RepetitionDetectionParams": lambda: _fields(RepetitionDetectionParams),
    "PoolingParams": lambda: _fields(PoolingParams),
    "LateInteractionParams": lambda: _fields(LateInteractionParams),
    "LateChunkingParams": lambda: _fields(LateChunkingParams),
    "RequestOutput": lambda: _fields(quintet.RequestOutput),
    "CompletionOutput": lambda: _fields(quintet.CompletionOutput),
    "flags of the server": lambda: {*_flags(), *_fields(ServerConfig), *_fields(EngineConfig)},
    "HTTP routes": _routes,
    "metrics": lambda: {each.name.removesuffix("_total") for each in ALL_METRICS},
    "tool parsers": TOOL_PARSERS.names,
    "reasoning parsers": REASONING_PARSERS.names,
}
_CHECKS: dict[str, Callable[[str], Any]] = {
    "commands": _has_command,
    "engine arguments": _takes_setting,
    "LoRA settings": _takes_setting,
    "quantization methods": lambda name: _takes(EngineConfig, "quantization", name),
    "KV cache dtypes": lambda name: _takes(EngineConfig, "kv_cache_dtype", name),
    "load formats": lambda name: _takes(EngineConfig, "load_format", name),
    "speculative methods": lambda name: _takes(SpeculativeConfig, "method", name),
    "structured output backends": lambda name: _takes(StructuredOutputsConfig, "backend", name),
    "KV connectors": lambda name: f'"{name}"' in _sources("quintet"),
    "plug-in groups": lambda name: f'"quintet.{_GROUPS.get(name, name)}"' in _sources("quintet"),
    "architectures: text": lambda name: _serves(name) or _serves_media(name),
    "architectures: pooling": _serves,
    "architectures: multimodal": _serves_media,
}
