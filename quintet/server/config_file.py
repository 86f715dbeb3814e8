"""`--config FILE`: flags in a YAML file, with or without dashes in their names."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from quintet.common.suggestions import refuse_unknown
from quintet.config import EngineConfig, flatten_nested, setting_fields, unsupported_reason
from quintet.config.schema.error_names import NameTranslation, Spelling
from quintet.server.config import ServerConfig

_MAX_BYTES = 2**20  # bytes; such a file has a page


class ConfigFile(NamedTuple):
    """Settings of the file, by field of ServerConfig or EngineConfig or an entry of one ("x_config.entry")."""

    settings: dict[str, Any]
    spellings: dict[str, Spelling]  # as it is written there


def read_config_file(path: str) -> ConfigFile:
    """ValueError says what is wrong in the file."""
    import yaml

    try:
        text = Path(path).read_bytes()
        if len(text) > _MAX_BYTES:
            raise ValueError(f"has {len(text)} bytes, and {_MAX_BYTES} is the most")
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise ValueError(f"--config {path}: the file cannot be read: {' '.join(str(error).split())}") from None
    if found is None:
        return ConfigFile({}, {})
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"--config {path}: the file must be a mapping such as `port: 8080`")
    return settings_by_field(found, path)


def settings_by_field(found: dict[str, Any], path: str, also: Collection[str] = ()) -> ConfigFile:
    """Returns settings by field. `path` names the file in errors; `also`: keys that a caller knows besides. ValueError
    for keys that are not known."""
    names = {
        alias: each.name
        for cls in (ServerConfig, EngineConfig)
        for each in setting_fields(cls)
        for alias in (each.name, *each.metadata.get("aliases", ()))
    }
    given: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in found.items():
        plain = key.lstrip("-").replace("-", "_")
        if plain not in names and (reason := unsupported_reason(plain)):
            raise ValueError(f"{path}: there is no {key}: {reason}")
        field, dot, entry = plain.partition(".")
        refuse_unknown(f"setting in {path}", [field], (*names, *also))
        name = f"{names[field]}{dot}{entry}"
        if name in given:
            raise ValueError(f"{path}: {key} is given twice")
        given[name], keys[name] = value, key
    try:
        flat = flatten_nested(EngineConfig, given)
    except ValueError as error:
        message = NameTranslation({name: Spelling(key) for name, key in keys.items()})(str(error))
        raise ValueError(f"{path}: {message}") from None
    for name in flat.keys() - keys.keys():  # an entry of a mapping
        field, _, entry = name.partition(".")
        keys[name] = f"{keys[field]}.{entry}"
    return ConfigFile(flat, {name: Spelling(key, path) for name, key in keys.items()})
