"""Tied heads by a model's files: a head that differs from the token embedding counts, not tie_word_embeddings."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quintet.interface.weights import StoredTensor

logger = logging.getLogger(__name__)

HEAD = "lm_head."
WEIGHT = "lm_head.weight"


def is_tied(tensors: Mapping[str, StoredTensor], configs: Iterable[Any]) -> bool | None:
    """Returns whether a model's head is its token embedding, by its files; None if they leave it to config.json.
    `configs`: the text model's, and its wrapper's; either may say that the two are tied."""
    tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
    own = [name.removeprefix(HEAD) for name in tensors if name.startswith(HEAD)]
    if all("." in part or part == "bias" for part in own):  # what has a dot is of a layer before the head's product
        return tied or None
    if not tied:
        return False
    if equals_embedding(tensors):
        return True
    logger.warning(
        "config.json has tie_word_embeddings=true, and the files hold an lm_head that differs from the token "
        "embedding: that head is used; set tie_word_embeddings to false in config.json to silence this"
    )
    return False


def check_stored_head(folder: object, tensors: Mapping[str, StoredTensor]) -> None:
    """ValueError if files for a model that shares its token embedding's weight have another head."""
    if not equals_embedding(tensors):
        raise ValueError(
            f"{folder} holds an {WEIGHT} that differs from the token embedding, and the model was built with one "
            "weight for both; load it anew as a model of its own"
        )


def equals_embedding(tensors: Mapping[str, StoredTensor]) -> bool:
    """Returns whether the head's weight has the numbers of another table of its shape."""
    head = tensors.get(WEIGHT)
    if head is None or head.read is None:
        return False
    tables = (each.read for name, each in tensors.items() if name != WEIGHT and each.shape == head.shape)
    return any(_are_equal(head.read(), read()) for read in tables if read is not None)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Compares the first rows before all of them: tables are large, and most that differ do so there."""
    return all(torch.equal(one[rows], other[rows].to(one.dtype)) for rows in (slice(0, 8), slice(8, None)))
