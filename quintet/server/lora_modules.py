"""`--lora-modules`: adapters (LoRA) that are served from the start, as name=path or as JSON objects."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from quintet.common.suggestions import refuse_unknown
from quintet.hub.adapters import local_adapter
from quintet.lora.errors import AdapterError
from quintet.lora.peft_config import read_peft_config, weights_file

MAX_NAME = 256  # characters
_FORMS = 'must be NAME=FOLDER, or JSON such as {"name": "sql", "path": "adapters/sql"}'


@dataclass(frozen=True)
class LoRAModule:
    """An adapter, and its name in requests."""

    name: str
    path: str  # a folder, or a hub id
    base_model_name: str | None = None  # that /v1/models shows as its parent


def check_adapter_name(name: str) -> None:
    """Raises ValueError for a name that requests cannot have."""
    if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
        raise ValueError(f"must be 1 to {MAX_NAME} characters that can be printed, not {name[:MAX_NAME]!r}")


def parse_lora_modules(value: Any) -> tuple[LoRAModule, ...]:
    """Reads a list of modules, or one. Raises ValueError for another form and for a name that is given twice."""
    given = [value] if isinstance(value, str | Mapping | LoRAModule) else value
    if not isinstance(given, Iterable):
        raise ValueError(f"{_FORMS}, not {value!r}")
    modules = tuple(module for each in given for module in _modules(each))
    names = [each.name for each in modules]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"names {twice!r} twice; give each adapter a name of its own")
    return modules


def check_files(modules: Iterable[LoRAModule], max_rank: int) -> None:
    """Reads the configurations of adapters on this machine, before a model is loaded. ValueError names the module, what
    is wrong with it, and the remedy."""
    for module in modules:
        try:
            folder = local_adapter(module.path)
            if folder is None:
                continue  # of the hub: the engine downloads it
            config = read_peft_config(folder)
            weights_file(folder)
            if config.rank > max_rank and not config.rank_pattern:
                raise AdapterError(
                    folder, f"has rank {config.rank} (r), and {max_rank} is the largest that is allowed; raise "
                    f"max_lora_rank to {config.rank}",
                )  # fmt: skip
        except (ValueError, OSError) as error:
            raise ValueError(f"lora_modules: {module.name}={module.path}: {error}") from None


def _modules(given: Any) -> list[LoRAModule]:
    if isinstance(given, LoRAModule):
        return [given]
    if isinstance(given, str) and given.lstrip().startswith(("{", "[")):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"{_FORMS}: {error}") from None
    if isinstance(given, list):
        return [module for each in given for module in _modules(each)]
    if isinstance(given, str):
        name, separator, path = given.partition("=")
        if not (name and separator and path):
            raise ValueError(f"{_FORMS}, not {given!r}; give the model before this flag")
        given = {"name": name, "path": path}
    if not isinstance(given, Mapping):
        raise ValueError(f"{_FORMS}, not {given!r}")
    return [_module(given)]


def _module(given: Mapping[Any, Any]) -> LoRAModule:
    known = [each.name for each in fields(LoRAModule)]
    refuse_unknown("entry of an adapter", map(str, given), known)
    for name in known:
        value = given.get(name)
        if not (isinstance(value, str) and value) and not (name == "base_model_name" and value is None):
            raise ValueError(f"{_FORMS}; {name} is {value!r}")
    module = LoRAModule(given["name"], given["path"], given.get("base_model_name"))
    try:
        check_adapter_name(module.name)
    except ValueError as error:
        raise ValueError(f"{_FORMS}; name {error}") from None
    return module
