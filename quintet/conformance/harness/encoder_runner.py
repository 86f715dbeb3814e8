"""Runs a Worker of an encoder-decoder model without an engine: passes of its encoder, and steps that read them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.conformance.harness.reference_model import Tiny
from quintet.conformance.harness.worker_runner import WorkerRunner
from quintet.engine.executor.media_parts import run_encoder
from quintet.interface.platform import Platform
from quintet.interface.types import HostBatch, HostGroup
from quintet.media.audio.waveform import blocks_of, num_rows


class EncoderRunner(WorkerRunner):
    """A loaded model, its requests, and the pages of their encoder's rows."""

    def __init__(self, tiny: Tiny, platform: Platform, dtype: torch.dtype, max_model_len: int) -> None:
        super().__init__(tiny, platform, dtype, max_model_len=max_model_len)
        self._encoded: dict[Any, tuple[list[int], int]] = {}  # request -> pages of rows, and their number

    def encode(self, key: Any, given: Tensor) -> None:
        """Runs the encoder's pass of a request: token ids [E], samples [N], or features [bins, 2 * E]."""
        if given.is_floating_point() and given.ndim == 1:
            frames, count = blocks_of(given.numpy()), num_rows(len(given))
        elif given.is_floating_point():
            frames, count = np.zeros((given.shape[1] + 2, given.shape[0]), np.float32), given.shape[1] // 2
            frames[1:-1] = given.T.numpy()
        else:
            frames, count = given.numpy(), len(given)
        pages = [self._free.pop() for _ in range(-(-count // self._page_size))]
        self._encoded[key] = pages, count
        within = np.arange(self._page_size, dtype=np.int32)
        slots = (np.array(pages, np.int32)[:, None] * self._page_size + within).reshape(-1)[:count]
        run_encoder(self.worker, frames, slots)

    def finish(self, key: Any) -> None:
        """Forgets a request and its rows."""
        super().finish(key)
        self._free += self._encoded.pop(key)[0]

    def _batch(self, chunks: Mapping[Any, Sequence[int]], firsts: dict[Any, int]) -> HostBatch:
        host = super()._batch(chunks, firsts)
        held = [self._encoded[key] for key in chunks]
        table = np.zeros((len(held), max(len(pages) for pages, _ in held)), np.int32)
        for row, (pages, _) in enumerate(held):
            table[row, : len(pages)] = pages
        lengths = np.array([count for _, count in held], np.int32)
        cross = HostGroup(np.zeros(len(host.token_ids), np.int32), table, lengths)
        own = len(self._kept)
        return host._replace(groups=(*host.groups[:own], cross, *host.groups[own:]))
