"""Rotary positions of requests with media, where a text model has three for each token (M-RoPE)."""

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from quintet.engine.request import CoreRequest
from quintet.interface.types import IntArray
from quintet.media.items import AUDIO, IMAGE, VIDEO, MediaItem

# kind -> fields of an item -> arguments of get_rope_index(): patches of time, height and width, seconds of a patch, and
# windows of sound, which are counted
FIELDS = {
    IMAGE: {"image_grid_thw": "image_grid_thw", "target_sizes": "target_sizes"},
    VIDEO: {
        "video_grid_thw": "video_grid_thw",
        "target_sizes_videos": "target_sizes_videos",
        "second_per_grid_ts": "second_per_grid_ts",
        "video_second_per_grid": "second_per_grids",
    },
    AUDIO: {"feature_attention_mask": "audio_seqlens"},
}
TYPES = {IMAGE: 1, VIDEO: 2}  # kind -> mm_token_type_ids


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
        self._theirs.spatial_merge_size = getattr(config.vision_config, "spatial_merge_size", None)
        self._taken = inspect.signature(self._theirs.get_rope_index).parameters
        self._longest = longest

    def positions(self, admitted: CoreRequest) -> RequestRotary:
        """Returns the positions of a request with media. ValueError if some are beyond those that there are, are no
        whole numbers, or cannot be computed of this prompt."""
        ids = torch.tensor([list(admitted.prompt_ids)])
        types = _types(admitted.media, ids.shape[1])
        given = {"input_ids": ids, "mm_token_type_ids": types, "attention_mask": torch.ones_like(ids)}
        for kind, names in FIELDS.items():
            mine = [each.fields for each in admitted.media if each.kind == kind]
            for name, argument in names.items() if mine else ():
                if name in mine[0]:
                    arrays = [each[name].array() for each in mine]
                    arrays = [each.sum(-1) for each in arrays] if kind == AUDIO else arrays
                    given[argument] = torch.from_numpy(np.concatenate(arrays))
        positions, shifts = self._computed({key: given[key] for key in given if key in self._taken})
        prompt = positions[:, 0].numpy()  # int64: a video's seconds may be any number
        shift = int(shifts.reshape(-1)[0])
        if not types[0, -1]:  # as generate() goes on: frames far apart may lie behind the text
            shift = int(prompt[0, -1]) + 1 - ids.shape[1]
        last = max(int(prompt.max()), ids.shape[1] + admitted.max_tokens - 1 + shift)
        if last >= self._longest or prompt.min() < 0:
            raise ValueError(
                f"the media take rotary positions up to {last}, and the model has {self._longest} (max_model_len); "
                "give smaller or fewer ones, or raise max_model_len"
            )
        if (prompt % 1).any():
            raise ValueError("a video's frames get positions between whole numbers; give another fps, such as 1 or 2")
        return RequestRotary(np.ascontiguousarray(prompt.astype(np.int32)), shift)

    def _computed(self, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            positions, shifts = self._theirs.get_rope_index(**given)
        except MemoryError:
            raise
        except Exception as error:  # whatever that code raises for placeholders that it does not expect
            raise ValueError(
                "the model's code finds no positions for the prompt's media; put the tokens that begin and end an item "
                "around each placeholder, as the chat template does"
            ) from error
        return positions, shifts


def _types(media: tuple[MediaItem, ...], count: int) -> torch.Tensor:
    """Returns [1, count]: transformers' numbers for tokens of images and videos, 0 for others."""
    found = torch.zeros(1, count, dtype=torch.int32)
    for each in media:
        for first, stop in each.spans:
            found[0, first:stop] = TYPES.get(each.kind, 0)
    return found
