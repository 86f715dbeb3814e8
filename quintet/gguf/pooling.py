"""Entries of an embedding model in a GGUF file: the pooling type, and the products behind the pooling."""

from collections.abc import Mapping
from typing import Any

from quintet.gguf.model import GGUFModel
from quintet.gguf.names import Computed

TYPES: Mapping[int, str] = {1: "MEAN", 2: "CLS", 3: "LAST"}  # pooling_type of llama.cpp; 0 and none: of tokens
DENSE = ("dense_2", "dense_3")  # tensors of Sentence Transformers' modules 2_Dense and 3_Dense, without bias
DENSE_WEIGHTS: Mapping[str, Computed] = {f"/{each}.weight": Computed("same", (f"{each}.weight",)) for each in DENSE}


def pooling_entries(model: GGUFModel) -> dict[str, Any]:
    """Returns entries of config.json: a file that names a pooling type, or whose tokens see both ways, is of a model
    that gives embeddings, no text."""
    kind, both = TYPES.get(model.get("pooling_type", 0)), model.get("attention.causal") is False
    entries: dict[str, Any] = {"architectures": ["EmbeddingModel"]} if kind or both else {}
    return entries | ({"pooling_type": kind} if kind else {}) | ({"is_causal": False} if both else {})


def dense_sizes(model: GGUFModel) -> dict[str, tuple[int, int]]:
    """Returns outputs and inputs of the products behind the pooling, in order, by their names in the file."""
    found = {name: model.shape(f"{name}.weight", axes=2) for name in DENSE if model.has(f"{name}.weight")}
    return {name: (shape[0], shape[1]) for name, shape in found.items()}
