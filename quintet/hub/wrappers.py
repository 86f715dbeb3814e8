"""Multimodal wrappers: the type of their text model, which names its code; and models that take raw tensors alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quintet.hub.hf_config import EQUIVALENT_TYPES, is_known_type, transformers_config
from quintet.models import added_for, families

TEXT_PARTS = ("text_config", "llm_config")  # entries with a text model's config, of wrappers that transformers lacks
# names of classes, of those that vLLM runs through TerraTorch
RAW_TENSORS = ("Terratorch", "PrithviGeoSpatialMAE", "PrithviMAE")
SHARED = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")  # entries of a wrapper for its parts


def text_model_type(kind: str, raw: Mapping[str, Any], file: Path) -> str:
    """Returns the model_type of what computes text: of a multimodal wrapper its text model's, otherwise `kind`.
    ValueError if transformers refuses the wrapper's config."""
    if kind in families() or added_for(kind, _architectures(raw)):
        return kind
    if not is_known_type(kind):
        text = _text_part(raw)
        return kind if text is None else str(text["model_type"])
    config = transformers_config(kind, raw, file)
    try:
        return str(config.get_text_config().model_type)
    except ValueError:  # several of them (MusicGen)
        return kind


def text_entries(kind: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of the text model in a wrapper that transformers has no class for; others unchanged."""
    if kind in families() or added_for(kind, _architectures(raw)) or is_known_type(kind):
        return raw
    text = _text_part(raw)
    return raw if text is None else {**{name: raw[name] for name in SHARED if name in raw}, **text}


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the text config of a wrapper, if a family here computes it."""
    parts = [raw[name] for name in TEXT_PARTS if isinstance(raw.get(name), Mapping)]
    known = {*families(), *EQUIVALENT_TYPES}
    return next(
        (part for part in parts if isinstance(part.get("model_type"), str) and part["model_type"] in known), None
    )


def _architectures(raw: Mapping[str, Any]) -> list[str]:
    names = raw.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def why_raw(raw: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json cannot be run; None: it takes no raw tensors."""
    named = raw.get("architectures")
    found = next((each for each in named if each in RAW_TENSORS), None) if isinstance(named, list) else None
    if found is None:
        return None
    return (
        f"{found} is a model of TerraTorch: its input is raw tensors, such as a satellite's images, and models here "
        "take tokens; run it by TerraTorch itself"
    )
