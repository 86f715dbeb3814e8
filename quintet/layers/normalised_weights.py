"""Heads with weights that are scaled to length 1 while they are loaded."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quintet.layers.weight_transform import TransformedTensor

HEAD = "lm_head.weight"
MIN_LENGTH = {0: 1e-7, 1: 1e-12}  # what lengths are kept away from 0 by: added to a column's, the least of a row's


def normalise_head(entries: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> Mapping[str, Any]:
    """A checkpoint's tensors, the head among them as by_row() or by_column() makes it."""
    return {name: TransformedTensor(entry, change) if name == HEAD else entry for name, entry in entries.items()}


def normalise_rows(head: Tensor) -> Tensor:
    """[vocab, hidden], each token's length 1 (Baichuan 2)."""
    return torch.nn.functional.normalize(head.float(), eps=MIN_LENGTH[1]).to(head.dtype)


def normalise_columns(head: Tensor) -> Tensor:
    """[vocab, hidden], each feature's length over all tokens 1 (Ling)."""
    wide = head.float()
    return (wide / (wide.norm(dim=0, keepdim=True) + MIN_LENGTH[0])).to(head.dtype)
