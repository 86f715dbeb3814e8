"""Chooses the code that computes a model (model_impl), and reads the configuration that this code needs."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quintet.common.json_files import read_object
from quintet.common.plugins import load_plugins
from quintet.common.suggestions import refuse_unknown
from quintet.config import EngineConfig
from quintet.gguf.config import config as gguf_config
from quintet.gguf.file import is_gguf
from quintet.hub.config_checks import check_entries, check_shape
from quintet.hub.hf_config import Overrides, is_known_type, transformers_config
from quintet.hub.hf_overrides import known_names, merge_overrides, model_overrides
from quintet.hub.pooling_task import is_pooling_model
from quintet.hub.resolve import load_model_config
from quintet.hub.wrappers import text_model_type
from quintet.model_loader.gguf_weights import model_of
from quintet.models import added_for, families
from quintet.models.encoders.checkpoints import refuse_encoder_decoder

# a switch of transformers' configs: an entry that differs between layers may be read
PER_LAYER = "allow_global_per_layer_attribute_access"
logger = logging.getLogger(__name__)


def read_model(config: EngineConfig, place: Path, extra_families: Mapping[str, str]) -> tuple[Any, str]:
    """The model's configuration, and why transformers' code computes it; "" where a family's file does. `own`: families
    that the platform brings; `place`: of resolve_config()."""
    load_plugins()
    why = _why_backend(config, place, extra_families)
    if not why:
        return load_model_config(place, model_overrides(config), _is_pooling(config, place), config.mmproj), ""
    file = place if place.is_file() else place / "config.json"
    return _for_backend(_raw_config(place), file, model_overrides(config), config.trust_remote_code), why


def _is_pooling(config: EngineConfig, place: Path) -> bool:
    """Returns whether it is run as a pooling model, by its config.json and the user's overrides of entries."""
    overrides = model_overrides(config)
    raw = _raw_config(place)
    return is_pooling_model(config, raw if callable(overrides) else {**raw, **(overrides or {})}, place)


def _raw_config(place: Path) -> dict[str, Any]:
    """Entries of config.json, or those that a GGUF file stands for; none of Mistral's own format."""
    if is_gguf(place):
        return gguf_config(model_of(place))
    return {} if place.is_file() else read_object(place / "config.json")


def _why_backend(config: EngineConfig, place: Path, own: Mapping[str, str]) -> str:
    if place.is_file() and not is_gguf(place):
        if config.model_impl == "transformers":
            raise ValueError(f"model_impl='transformers' reads a config.json, not {place.name}; leave it out")
        return ""
    overrides = model_overrides(config)
    raw = {**_raw_config(place), **({} if callable(overrides) else overrides or {})}
    if config.model_impl == "transformers":
        refuse_encoder_decoder(raw.get("model_type"), raw, asked=True)
        return "model_impl transformers: asked for"
    kind, architectures = raw.get("model_type"), raw.get("architectures")
    if not isinstance(kind, str) or config.model_impl == "quintet" or kind in families() or kind in own:
        return ""
    if isinstance(architectures, list) and added_for(kind, architectures):
        return ""
    text = text_model_type(kind, raw, place / "config.json")
    if text in families() or text in own or (not is_known_type(kind) and not raw.get("auto_map")):
        return ""
    refuse_encoder_decoder(text, raw)
    return f"model_impl transformers: quintet has no file for model type {text!r}, and transformers' own code runs"


def _for_backend(raw: dict[str, Any], file: Path, overrides: Overrides, trusted: bool) -> Any:
    """transformers' own object, with the user's entries merged in."""
    check_entries(raw, str(file))
    entries = {} if callable(overrides) else overrides or {}
    check_entries(entries, "hf_overrides")
    code = raw.get("auto_map")
    if code is not None and not isinstance(code, Mapping):
        raise ValueError(
            f"{file}: auto_map is {type(code).__name__}, not an object; correct it, or fetch the model anew"
        )
    kind = entries.get("model_type", raw.get("model_type"))
    if code and not trusted and not is_known_type(kind):
        raise ValueError(
            f"{file}: the code of model type {kind!r} comes with the model (auto_map), and none of it was run. "
            "trust_remote_code=True (--trust-remote-code) runs it: it can then do whatever you can; read it first"
        )
    config = _by_code(file, raw, entries) if code and trusted else _by_transformers(kind, raw, entries, file)
    config = overrides(config) if callable(overrides) else config
    for part in (config, config.get_text_config()):  # layers are traced one by one, whatever an entry is for most
        if hasattr(part, PER_LAYER):
            setattr(part, PER_LAYER, True)
    config.runs_own_code = bool(code and trusted)  # whatever the file says under this name
    if not config.runs_own_code:
        vars(config).pop("auto_map", None)
    check_shape(config.get_text_config(), str(file))
    return config


def _by_transformers(kind: Any, raw: dict[str, Any], overrides: Mapping[str, Any], file: Path) -> Any:
    if not isinstance(kind, str):
        raise ValueError(f"{file} names no model_type, so that transformers does not know it either")
    config = transformers_config(kind, raw, file)
    return transformers_config(kind, _changed(raw, overrides, config), file) if overrides else config


def _changed(raw: dict[str, Any], overrides: Mapping[str, Any], config: Any) -> dict[str, Any]:
    refuse_unknown("entry of hf_overrides", overrides, {*raw, *known_names(config)})
    return merge_overrides(raw, overrides, config.to_dict())


def _by_code(file: Path, raw: dict[str, Any], overrides: Mapping[str, Any]) -> Any:
    """The configuration of a model that brings code: this runs it."""
    from transformers import AutoConfig

    named = ", ".join(sorted(str(each) for each in raw["auto_map"].values()))[:200]
    logger.warning(
        "trust_remote_code: %s brings code (%s), which runs in this process: it can do whatever you can, such as read "
        "and change your files and use the network; quintet has not looked at it",
        file.parent, named,
    )  # fmt: skip
    try:
        config = AutoConfig.from_pretrained(file.parent, trust_remote_code=True)
        if overrides:
            entries = _changed(raw, overrides, config)
            config = type(config).from_dict({**entries, "_name_or_path": str(file.parent)})
    except Exception as error:  # whatever that code raises
        raise ValueError(
            f"the code of {file.parent} makes no configuration: {type(error).__name__}: {error}"
        ) from error
    return config
