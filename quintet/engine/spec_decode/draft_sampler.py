"""Draws draft tokens of a second model's logits, with the random numbers that the requests draw with themselves."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quintet.engine.executor.worker import Worker
from quintet.engine.request import Request
from quintet.interface.types import IntArray
from quintet.ops.sampling import Draw


class DraftSampler:
    """Draws with each request's random numbers, so that the same tokens come out where both models agree. Penalties and
    the like are left out: they cost drafts, never a token."""

    def __init__(self, worker: Worker, vocab_size: int, token_ids: IntArray | None = None) -> None:
        """token_ids [D]: the model's token of each column of the logits, where these are fewer than its tokens."""
        self._ops, self._device, self._vocab_size = worker.ops, worker.device, vocab_size
        self._token_ids = token_ids
        self._columns = None if token_ids is None else worker.upload(token_ids)[0]

    def __call__(self, logits: Tensor, requests: Sequence[Request], positions: Sequence[int]) -> list[int]:
        """logits [L, V], row r of requests[r], which draws the token at positions[r] -> the tokens; -1: none."""
        if all(request.params.greedy for request in requests):
            found: list[int] = self._device.to_host(self._ops.greedy(logits))()[: len(requests)].tolist()
            return found if self._token_ids is None else [int(self._token_ids[each]) for each in found]
        wide = self._ops.widen(logits, logits.shape[0], False)
        if self._columns is not None:  # noise belongs to a token, not to a column
            columns = self._columns.long()
            wide = wide.new_full((len(wide), self._vocab_size), float("-inf")).index_copy_(1, columns, wide)
        drawn = self._ops.sample(wide, *self._settings(requests, positions, logits.shape[0]))
        found = self._device.to_host(drawn)()[: len(requests)].tolist()
        return found

    def _settings(self, requests: Sequence[Request], positions: Sequence[int], rows: int) -> tuple[Draw, int]:
        """Returns the settings of a draw of so many rows, and of how many of the largest logits it depends on."""
        off = (0.0, 0, 1.0, 0.0)
        drawn = [each.params for each in requests]
        cuts = [off if p.greedy else (p.temperature, max(p.top_k, 0), p.top_p, p.min_p) for p in drawn]
        width = max((k or (self._vocab_size if p < 1 else 0) for _, k, p, _ in cuts), default=0)
        padding = rows - len(cuts)
        temperature, top_k, top_p, min_p = zip(*cuts, *[off] * padding, strict=True)
        keys = [*(each.core_request.random_key for each in requests), *[(0, 0)] * padding]
        arrays = [np.array(temperature, np.float32), np.array(top_k, np.int32)]
        arrays += [np.array(top_p, np.float32), np.array(min_p, np.float32), np.array(keys, np.int32).reshape(-1, 2)]
        arrays.append(np.array([*positions, *[0] * padding], np.int32))
        return Draw(*self._device.to_device(arrays)), min(width, self._vocab_size)
