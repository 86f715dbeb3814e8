"""A model's config.json as transformers' class reads it: every default filled in, in a plain object."""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from quintet.hub import transformers_cache as readings
from quintet.hub.legacy_configs import LEGACY_ADAPTERS, adapted_config, resolved_model_type, version
from quintet.models import added_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Entries = dict[str, Any]
# types that repositories give with code of their own, where the entries are those of a type that transformers has
EQUIVALENT_TYPES = {"kimi_k2": "deepseek_v3", "minimax_m3_text": "minimax_m3_vl_text"}
# that checkpoints say as a number, which an earlier class took, and transformers 5 refuses (4, of Llama 4)
NUMERIC_SWITCHES = ("attn_temperature_tuning",)
Overrides = Mapping[str, Any] | Callable[[Any], Any] | None  # of a config.json, entry by entry or by a function
LONGEST = 400  # characters of transformers' reason, which may repeat what the file says


class HFConfig(SimpleNamespace):
    """A model's configuration, by attribute, under the names that transformers gives; the parts of a wrapper alike."""

    def get_text_config(self) -> "HFConfig":
        """Returns the text config of a multimodal wrapper; else itself."""
        text: HFConfig | None = getattr(self, "text_config", None)
        return text or self

    def to_dict(self) -> Entries:
        return {
            name: value.to_dict() if isinstance(value, HFConfig) else deepcopy(value)
            for name, value in vars(self).items()
        }


def read_config(kind: str, raw: Mapping[str, Any], file: Path) -> HFConfig:
    """Reads the config of this model_type. ValueError if transformers has no such type, or refuses an entry of it."""
    name = digest(kind, raw)
    if (kept := readings.find(name, thaw)) is not None:
        return kept
    config = transformers_config(kind, raw, file)
    reading = json.loads(json.dumps(freeze(config)))
    # another package's class may change without transformers
    if kind in LEGACY_ADAPTERS or type(config).__module__.startswith("transformers."):
        readings.store(name, reading)
    return thaw(reading)


def changed_config(raw: Mapping[str, Any], file: Path, change: Callable[[Any], Any]) -> HFConfig:
    """Returns the config that a user's function makes of transformers' object for a file; it is not cached."""
    from transformers import PretrainedConfig

    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{file} names no model_type, so hf_overrides has no config to change")
    changed = change(transformers_config(kind, raw, file))
    if not isinstance(changed, PretrainedConfig):
        raise ValueError(f"hf_overrides is a function, and must return the config; it gave {type(changed).__name__}")
    return thaw(json.loads(json.dumps(freeze(changed))))


def is_known_type(kind: Any) -> bool:
    """Returns whether transformers has a config class for a model_type."""
    from transformers import CONFIG_MAPPING

    return isinstance(kind, str) and kind in CONFIG_MAPPING


def digest(kind: str, raw: Mapping[str, Any]) -> str:
    parts = [kind.encode(), json.dumps(raw, sort_keys=True).encode()]
    return readings.digest("config", [*parts, version()] if kind in LEGACY_ADAPTERS else parts)


def transformers_config(kind: str, raw: Mapping[str, Any], file: Path) -> "PretrainedConfig":
    """transformers' own object. ValueError as read_config()."""
    kind = resolved_model_type(EQUIVALENT_TYPES.get(kind, kind), raw)
    config_class = None if kind in LEGACY_ADAPTERS else find_config_class(kind, raw.get("architectures"))
    try:
        # A deep copy: transformers moves entries about in what it is given.
        copied = json.loads(json.dumps({**raw, "model_type": kind}), object_hook=_read)
        config: PretrainedConfig = adapted_config(kind, copied) if config_class is None else config_class(**copied)
        if isinstance(getattr(config, "text_config", None), dict):
            raise ValueError("it has a text_config, and models of this type have no parts")
        if config.dtype is not None and not isinstance(config.dtype, torch.dtype):
            raise ValueError(f"{config.dtype} is no dtype of torch")
    except Exception as error:  # whatever a class raises, in any version of transformers
        reason = " ".join(str(error).split())[:LONGEST]
        raise ValueError(f"{file} (with hf_overrides) is no valid {kind} config: {reason}") from error
    return config


def find_config_class(kind: str, architectures: Any) -> "type[PretrainedConfig]":
    """Returns transformers' class of a model_type; where it has none, the `config_class` of the model that a package
    added for it. ValueError if there is neither."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    if kind in CONFIG_MAPPING:
        known: type[PretrainedConfig] = CONFIG_MAPPING[kind]
        return known
    model = added_class(kind, architectures if isinstance(architectures, list) else None)
    found = getattr(model, "config_class", None)
    remedy = f"give the model class that a package adds config_class, a PretrainedConfig with model_type = {kind!r}"
    if model is None or found is None:
        lacking = "no package adds a model for it" if model is None else f"{model.__qualname__} has no config_class"
        raise ValueError(f"transformers has no config for model type {kind!r}, and {lacking}; {remedy}")
    if not isinstance(found, type) or not issubclass(found, PretrainedConfig):
        raise ValueError(f"{model.__qualname__}.config_class is {found!r}, no subclass of PretrainedConfig; {remedy}")
    config_class: type[PretrainedConfig] = found
    if config_class.model_type != kind:
        raise ValueError(f"{found.__qualname__}.model_type is {config_class.model_type!r}, not {kind!r}; {remedy}")
    return config_class


def _read(entry: Entries) -> Any:
    """Decodes floats that JSON lacks, as transformers writes them, {"__float__": "Infinity"}, and numeric switches."""
    if entry.keys() == {"__float__"}:
        return float(entry["__float__"])
    switches = {name: bool(entry[name]) for name in NUMERIC_SWITCHES if isinstance(entry.get(name), int)}
    return {**entry, **switches} if switches else entry


def freeze(config: "PretrainedConfig") -> Entries:
    """Returns the reading: entries as JSON, names of those with number keys, and the parts of a wrapper."""
    from transformers import PretrainedConfig

    entries = _with_aliases(config, {**_property_values(config), **config.to_dict()})
    del entries["transformers_version"], entries["_name_or_path"]  # of this installation, not of the file
    held = _with_aliases(config, vars(config))
    parts = {name: value for name, value in held.items() if isinstance(value, PretrainedConfig)}
    if (text := config.get_text_config()) is not config:
        parts["text_config"] = text  # its name in most wrappers
    return {
        "entries": {name: value for name, value in entries.items() if name not in parts},
        "numbered": [name for name, value in entries.items() if _with_number_keys(value)],
        "parts": {name: freeze(part) for name, part in parts.items()},
    }


def _with_aliases(config: "PretrainedConfig", entries: Entries) -> Entries:
    """Also under the names that are common to all families, such as hidden_size for n_embd."""
    return entries | {name: entries[own] for name, own in config.attribute_map.items() if own in entries}


def _property_values(config: "PretrainedConfig") -> Entries:
    """Returns what the class computes from the entries (its properties): numbers, names and lists of them."""
    from transformers import PretrainedConfig

    own = [each for each in type(config).__mro__ if issubclass(each, PretrainedConfig) and each is not PretrainedConfig]
    names = {name for each in own for name, value in vars(each).items() if isinstance(value, property)}
    derived = {name: _computed(config, name) for name in names if not name.startswith("_")}
    return {name: value for name, value in derived.items() if isinstance(value, (bool, int, float, str, list))}


def _computed(config: "PretrainedConfig", name: str) -> Any:
    """Returns a property of the class; None if the file lacks what it is computed from: models then lack the entry."""
    try:
        return getattr(config, name)
    except Exception:  # whatever a class raises
        return None


def _with_number_keys(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(key, int) for key in value)


def thaw(reading: Mapping[str, Any]) -> HFConfig:
    entries: Entries = {**reading["entries"], **{name: thaw(part) for name, part in reading["parts"].items()}}
    for name in reading["numbered"]:
        entries[name] = {int(key): value for key, value in entries[name].items()}
    if entries["dtype"] is not None:
        entries["dtype"] = getattr(torch, entries["dtype"])
    return HFConfig(**entries)
