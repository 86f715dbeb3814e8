"""Checkpoints that other libraries wrote, and what those make of them: tests/data/quantized."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from quintet.hub.resolve import load_model_config
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.quantization.checkpoint_config import CheckpointQuantization, read_quantization_config
from quintet.model_loader.loader import tensors_of
from quintet.models import model_class
from quintet_tools.checkpoints.tiny import Tiny

DATA = Path(__file__).parents[2] / "data" / "quantized"


def said(folder: Path) -> dict[str, Any]:
    """Its quantization_config."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def plan(folder: Path) -> CheckpointQuantization:
    found = read_quantization_config(said(folder), lambda: tensors_of(folder, model_class(config(folder))))
    assert found is not None
    return found


def config(folder: Path) -> Any:
    return load_model_config(folder, None)


def wanted(name: str) -> dict[str, Tensor]:
    """The library's own: "ids" [T], "logits" [T, vocab], and every fourth row of dequantized weights."""
    return load_file(DATA / name / "wanted.safetensors")


def tiny(name: str) -> Tiny:
    """Without a reference: wanted() has its logits."""
    return Tiny(DATA / name, config(DATA / name), None)


def forms(name: str, kept: frozenset[str] | None = None) -> QuantizationPlan:
    return QuantizationPlan(checkpoint=plan(DATA / name), supported_kinds=kept)
