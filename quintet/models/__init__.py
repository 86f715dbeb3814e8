"""Model families: one file each, and the file's name is its registry entry."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

_ALIASES = {"gemma3_text": "gemma3"}  # model_type in config.json -> file, where they differ
_REGISTERED: dict[str, str] = {}  # what packages add: model_type -> dotted module name


def register(model_type: str, module: str) -> None:
    """Adds a family, or replaces one: `module` has a class Model(config, build) like the files here."""
    _REGISTERED[model_type] = module


def families() -> list[str]:
    """The model types that can be loaded, sorted."""
    files = [m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg]
    return sorted({*files, *_ALIASES, *_REGISTERED})


def built_in(kind: str) -> str | None:
    """The file here that a model type is built from; None for what a package has added."""
    return None if kind in _REGISTERED else _ALIASES.get(kind, kind)


def model_class(config: Any, overrides: Mapping[str, str] | None = None, backend: bool = False) -> type:
    """The class of a transformers config's family, a platform's own first; ValueError with what there is, if none.
    With `backend`, the one that runs any model by transformers' own code."""
    if backend:
        made: type = importlib.import_module("quintet.models.backend").Model
        return made
    kind, overrides = config.model_type, overrides or {}
    if kind not in families() and kind not in overrides:
        raise ValueError(
            f"model type {kind!r} is not supported; quintet has {', '.join(families())}; "
            "a package can add it with quintet.models.register()"
        )
    module = overrides.get(kind) or _REGISTERED.get(kind) or f"quintet.models.{_ALIASES.get(kind, kind)}"
    model: type = importlib.import_module(module).Model
    return model
