"""Models that take raw tensors as input: recognized by their config.json, and refused with the reason."""

from collections.abc import Mapping
from typing import Any

# names of classes, of those that vLLM runs through TerraTorch
ARCHITECTURES = ("Terratorch", "PrithviGeoSpatialMAE", "PrithviMAE")


def why_raw(raw: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json cannot be run; None: it takes no raw tensors."""
    named = raw.get("architectures")
    found = next((each for each in named if each in ARCHITECTURES), None) if isinstance(named, list) else None
    if found is None:
        return None
    return (
        f"{found} is a model of TerraTorch: its input is raw tensors, such as a satellite's images, and models here "
        "take tokens; run it by TerraTorch itself"
    )
