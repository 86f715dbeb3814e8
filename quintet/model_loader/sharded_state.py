"""Each rank's weights as they were placed, in a folder of safetensors that a later engine reads as they are.

The layout is vLLM's sharded_state, one file for each rank; what is in a file is ours: formats and tables included.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quintet.layers.build import named_layers
from quintet.model_loader.weights_cache import assigned_tensors

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
SHARDS = "model-rank-*-part-*.safetensors"
FORMATS = ("sharded_state", "runai_streamer_sharded")  # load_formats that read them
COPIED_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")  # what a model needs besides its weights
INDEX = ".index.json"


def save(model: nn.Module, folder: Path, rank: int, layout: str) -> None:
    """Saves one rank's part. `layout`: digest of all that placing depends on."""
    first: dict[Any, str] = {}
    tensors: dict[str, Tensor] = {}
    kept: list[tuple[str, str, str]] = []  # path of a layer, its name of a tensor, the name in the file
    for (path, name), tensor in assigned_tensors(model):
        key, own = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()), f"{path}.{name}".lstrip(".")
        stored = first.setdefault(key, own) if tensor.numel() else own
        kept.append((path, name, stored))
        if stored == own:
            tensors[own] = tensor.clone(memory_format=torch.contiguous_format)
    save_file(tensors, folder / PATTERN.format(rank=rank, part=0), {"of": layout, "kept": json.dumps(kept)})


def copy_config_files(original: Path, folder: Path) -> None:
    """The configuration and the tokenizer."""
    for file in (file for pattern in COPIED_FILES for file in original.glob(pattern)):
        if not file.name.endswith(INDEX):
            shutil.copy(file, folder / file.name)


Read = Callable[[Path], dict[str, Tensor]]


def fill(model: nn.Module, folder: Path, rank: int, layout: str, read: Read | None = None) -> None:
    """A rank's model, from what save() wrote of one that is placed alike. ValueError where it is not.

    `read` gives a file's tensors, where safetensors itself is not to.
    """
    file = folder / PATTERN.format(rank=rank, part=0)
    try:
        with safe_open(file, framework="pt") as opened:
            metadata: Mapping[str, str] = opened.metadata() or {}
            if metadata.get("of") != layout:
                raise ValueError(
                    f"{file} was saved by another version of quintet, or with other settings (dtype, quantization, "
                    "max_model_len, tensor_parallel_size, pipeline_parallel_size) or on another platform; "
                    "give the same, or save it anew"
                )
            kept = json.loads(metadata["kept"])
            found = read(file) if read else {name: opened.get_tensor(name).clone() for name in opened.keys()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read ({' '.join(str(error).split())[:400]}); save it anew") from None
    if lost := sorted({stored for _, _, stored in kept} - found.keys()):
        raise ValueError(f"{file} lacks {', '.join(lost[:8])}; save it anew")
    layers = dict(named_layers(model))
    for path, name, stored in kept:
        layers[path].assign({name: found[stored]})


class ShardedStateLoader:
    """vLLM's name for what writes and reads these files; scripts read the pattern of their names here."""

    DEFAULT_PATTERN = PATTERN
