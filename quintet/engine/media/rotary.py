"""Rotary positions of requests with pictures, where a text model has three for each token (M-RoPE)."""

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from quintet.engine.request import CoreRequest
from quintet.interface.types import IntArray
from quintet.media.items import MediaItem

GRID = "image_grid_thw"  # field of a picture: patches of time, height and width


@dataclass(frozen=True)
class RequestRotary:
    """Rotary positions of one request."""

    prompt: IntArray  # [3, P], of its prompt's tokens
    shift: int  # of the tokens after them: from their own positions to their rotary ones

    def between(self, start: int, stop: int) -> IntArray:
        """Returns those of the tokens start .. stop - 1, [3, stop - start]."""
        size = self.prompt.shape[1]
        after = np.arange(max(start, size), stop, dtype=np.int32) + np.int32(self.shift)
        return np.concatenate([self.prompt[:, start:stop], np.broadcast_to(after, (3, len(after)))], axis=1)


class RotaryIndex:
    """Computes rotary positions by a wrapper's own get_rope_index()."""

    def __init__(self, config: Any, longest: int) -> None:
        """`config`: transformers' object, of the wrapper; `longest`: positions that the model has angles for."""
        from transformers import MODEL_MAPPING

        made = MODEL_MAPPING[type(config)]
        self._theirs: Any = made.__new__(made)
        nn.Module.__init__(self._theirs)  # no layers: the positions follow from the config
        self._theirs.config = config
        self._taken = inspect.signature(self._theirs.get_rope_index).parameters
        self._longest = longest

    def positions(self, admitted: CoreRequest) -> RequestRotary:
        """Returns the positions of a request with pictures. ValueError if some are beyond those that there are."""
        ids = torch.tensor([list(admitted.prompt_ids)])
        given = {
            "input_ids": ids,
            "mm_token_type_ids": _types(admitted.media, ids.shape[1]),
            GRID: torch.from_numpy(np.concatenate([each.fields[GRID].array() for each in admitted.media])),
        }
        positions, shifts = self._theirs.get_rope_index(**{key: given[key] for key in given if key in self._taken})
        prompt = np.ascontiguousarray(positions[:, 0].numpy().astype(np.int32))
        shift = int(shifts.reshape(-1)[0])
        last = max(int(prompt.max()), ids.shape[1] + admitted.max_tokens - 1 + shift)
        if last >= self._longest or prompt.min() < 0:
            raise ValueError(
                f"images take rotary positions up to {last}, and the model has {self._longest} (max_model_len); "
                "give smaller ones, or raise max_model_len"
            )
        return RequestRotary(prompt, shift)


def _types(media: tuple[MediaItem, ...], count: int) -> torch.Tensor:
    """Returns [1, count]: 1 for a picture's tokens, 0 for others."""
    found = torch.zeros(1, count, dtype=torch.int32)
    for each in media:
        for first, stop in each.spans:
            found[0, first:stop] = 1
    return found
