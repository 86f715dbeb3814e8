"""Runs a Worker without an engine: prompts, chunks and decoding over a paged cache, as a check lays them out."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.conformance.check import Lacking
from quintet.conformance.tiny import SERVED, Tiny
from quintet.engine.batch import pad
from quintet.engine.worker import Place, Shape, Worker
from quintet.platforms.interface import Capabilities, Platform
from quintet.types import Bucket, HostBatch

PAGED_TOKENS = 2048  # what the cache holds
SIZES = (16, 128)
REQUESTS = 8


class Runner:
    """A loaded model and its requests. Pages are handed out in a shuffled order."""

    def __init__(
        self,
        tiny: Tiny,
        platform: Platform,
        dtype: torch.dtype = torch.float32,
        place: Place | None = None,
        sizes: Sequence[int] = SIZES,
        **sizing: Any,  # other fields of Shape
    ) -> None:
        """`sizes`: tokens that a step is padded to, where shapes are fixed."""
        shape = Shape(dtype, **{"page_size": 16, "max_model_len": SERVED, **sizing})
        pages = 2 + PAGED_TOKENS // shape.page_size
        try:
            self.worker = Worker(platform, tiny.config, shape, place or Place())
        except ValueError as reasons:  # of a layer's attention: what the contract asks for
            raise Lacking(str(reasons)) from None
        self._buckets: list[Bucket] = []
        facts = platform.probe()
        if isinstance(facts, Capabilities) and facts.static_shapes:
            table = -(-shape.max_model_len // shape.page_size)
            self._buckets = [Bucket(size, min(size, REQUESTS), size, table) for size in sizes]
        self.worker.load(tiny.folder, pages, self._buckets, progress=False)
        torch.set_num_threads(1)  # see tiny.make
        self._page_size = shape.page_size
        self._free = list(range(1, pages))
        random.Random(0).shuffle(self._free)
        self._pages: dict[Any, list[int]] = {}
        self._lengths: dict[Any, int] = {}

    def step(self, chunks: dict[Any, Sequence[int]]) -> dict[Any, Tensor]:
        """Runs each request's next tokens in one batch -> logits [T, vocab] of all of them, per request."""
        firsts = {key: self._lengths.get(key, 0) for key in chunks}
        for key, tokens in chunks.items():
            self._grow(key, firsts[key] + len(tokens))
        host, sizes = self._batch(chunks, firsts), [len(tokens) for tokens in chunks.values()]
        logits = self.worker.run(pad(host, self._buckets) if self._buckets else host)
        on_host = self.worker.device.to_host(logits)()[: sum(sizes)].to(torch.float32, copy=True)
        return dict(zip(chunks, on_host.split(sizes), strict=True))

    def finish(self, key: Any) -> None:
        self._free += self._pages.pop(key)
        del self._lengths[key]

    def prompts(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Whole prompts in one batch, forgotten afterwards."""
        out = self.step(dict(enumerate(prompts)))
        for key in out:
            self.finish(key)
        return list(out.values())

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """`count` tokens after each prompt; a batch of prompts, then batches of single tokens."""
        out: list[list[int]] = [[] for _ in prompts]
        chunks = dict(enumerate(prompts))
        for _ in range(count):
            logits = self.step(chunks)
            for key, rows in logits.items():
                out[key].append(int(rows[-1].argmax()))
            chunks = {key: out[key][-1:] for key in logits}
        for key in range(len(prompts)):
            self.finish(key)
        return out

    def _grow(self, key: Any, length: int) -> None:
        pages = self._pages.setdefault(key, [])
        while len(pages) * self._page_size < length:
            pages.append(self._free.pop())
        self._lengths[key] = length

    def _batch(self, chunks: dict[Any, Sequence[int]], firsts: dict[Any, int]) -> HostBatch:
        positions = [range(firsts[key], firsts[key] + len(tokens)) for key, tokens in chunks.items()]
        size = self._page_size
        slots = [
            self._pages[key][p // size] * size + p % size for key, of in zip(chunks, positions, strict=True) for p in of
        ]
        table = np.zeros((len(chunks), max(len(self._pages[key]) for key in chunks)), dtype=np.int32)
        for row, key in enumerate(chunks):
            table[row, : len(self._pages[key])] = self._pages[key]
        counts = [len(tokens) for tokens in chunks.values()]
        return HostBatch(
            token_ids=_int32([token for tokens in chunks.values() for token in tokens]),
            positions=_int32([p for of in positions for p in of]),
            slots=_int32(slots),
            owners=_int32([row for row, count in enumerate(counts) for _ in range(count)]),
            starts=_int32([sum(counts[:row]) for row in range(len(counts) + 1)]),
            lengths=_int32([self._lengths[key] for key in chunks]),
            page_table=table,
            logit_rows=_int32(range(sum(counts))),
        )


def _int32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def random_prompts(seed: int, lengths: Sequence[int], vocab: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(vocab) for _ in range(length)] for length in lengths]
