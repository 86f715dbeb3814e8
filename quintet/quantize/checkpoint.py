"""A checkpoint that is to be quantized."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.config import EngineConfig
from quintet.hub.hf_overrides import QUANTIZATION_ENTRIES
from quintet.hub.resolve import load_model_config, resolve_model
from quintet.interface.weights import FLOATS, StoredTensor
from quintet.layers.decoder import ModelBase
from quintet.model_loader.loader import Checkpoint, TensorEntry, tensors_of
from quintet.model_loader.tied_head import is_tied
from quintet.models import model_class
from quintet.quantize.targets import outline

ANY = StoredTensor(None, FLOATS)


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint in floats."""

    folder: Path
    config: Any  # as transformers reads config.json
    model: ModelBase  # without weights
    checkpoint: Checkpoint
    tied: bool  # the head is the token embedding

    @classmethod
    def load(cls, name: str) -> "SourceCheckpoint":
        """A folder, a hub id or "bundled". ValueError or OSError says why it cannot be quantized."""
        folder = resolve_model(EngineConfig(name))
        if folder.is_file():
            raise ValueError(f"{name!r} is a GGUF file; give the original, a folder of safetensors")
        whole = load_model_config(folder)
        config = whole.get_text_config()
        if any(getattr(each, entry, None) for each in (whole, config) for entry in QUANTIZATION_ENTRIES):
            raise ValueError(f"{name!r} is quantized already; give the original, in floats")
        tied = is_tied(tensors_of(folder, model_class(config)), (config, whole))
        model = outline(config, tied)
        return cls(folder, config, model, Checkpoint(folder, model), bool(tied))

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Tensors by the modules' names."""
        return self.checkpoint.entries

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        kinds = [entry.dtype for name, entry in self.entries.items() if name.endswith(".weight")]
        return next((each for each in kinds if isinstance(each, torch.dtype)), torch.bfloat16)

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    def read(self, name: str) -> Tensor:
        """By the modules' name."""
        return self.checkpoint.read(name, ANY)

    def file_name(self, name: str) -> str:
        """The name in the new file: that of the old one, where the tensor is one by itself."""
        entry = self.entries[name]
        return name if entry.at else entry.name
