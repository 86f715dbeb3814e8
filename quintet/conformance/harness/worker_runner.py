"""Runs a Worker without an engine: prompts, chunks and decoding over a paged cache, as a check lays them out."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.conformance.check import NotSupported
from quintet.conformance.harness.manual_steps import Stretch, host_batch
from quintet.conformance.harness.reference_model import SERVED, Tiny
from quintet.engine.executor.batch_builder import CaptureSizes, pad
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import MemoryRoom, Worker
from quintet.engine.kv_cache.state_slots import SLOTS_PER_REQUEST
from quintet.interface.platform import Capabilities, Platform
from quintet.interface.types import HostBatch, HostInputs, MaxShape, Outputs, RankInfo, ShapeBucket
from quintet.platforms import choose

PAGED_TOKENS = 2048  # what the cache holds
SIZES = (16, 128)
REQUESTS = 8
MAX_STATE_REQUESTS = 64  # requests with states kept at once, where layers keep some


class WorkerRunner:
    """A loaded model and its requests. Pages are handed out in a shuffled order."""

    def __init__(
        self,
        tiny: Tiny,
        platform: Platform,
        dtype: torch.dtype = torch.float32,
        rank_info: RankInfo | None = None,
        sizes: Sequence[int] = SIZES,
        **sizing: Any,  # other fields of ModelSizes
    ) -> None:
        """`sizes`: tokens that a step is padded to, where shapes are fixed."""
        own = ModelSizes(dtype, **{"page_size": 16, "max_model_len": SERVED, **sizing})
        try:
            self.worker = Worker(platform, tiny.config, own, rank_info or RankInfo())
        except ValueError as reasons:  # of a layer's attention: what the contract asks for
            raise NotSupported(str(reasons)) from None
        self._kept = self.worker.kv_cache_layout.groups
        pages = 2 + PAGED_TOKENS // own.page_size * len(self._kept)
        layout = self.worker.kv_cache_layout
        tables = layout.table_widths(-(-own.max_model_len // own.page_size), layout.encoder_pages(own.page_size))
        self._fixed: list[ShapeBucket] = []
        captured: tuple[ShapeBucket, ...] = ()
        facts = platform.probe()
        if isinstance(facts, Capabilities) and facts.static_shapes:
            inputs = ("token_type_ids",) * self.worker.model.uses_token_types + ("adapters", "adapter_extras") * (
                own.lora is not None
            )
            self._fixed = [ShapeBucket(size, min(size, REQUESTS), size, tables, inputs=inputs) for size in sizes]
        else:
            most = ShapeBucket(PAGED_TOKENS, REQUESTS, PAGED_TOKENS, tables)
            captured = self.worker.estimate(MaxShape(most, tiny.text.hidden_size, tiny.text.vocab_size)).buckets
        self._captured = CaptureSizes(captured)
        self.adapters: Mapping[Any, int] = {}  # request -> 1 + the slot of its adapter; others have none
        self.extras: set[int] = set()  # slots of adapters that have more than the A and B of products
        slots = 1 + SLOTS_PER_REQUEST * MAX_STATE_REQUESTS
        self.worker.load(tiny.folder, MemoryRoom(pages, slots), self._fixed or captured, progress=False)
        torch.set_num_threads(1)  # see tiny.make
        self._page_size = own.page_size
        self._free = list(range(1, pages))
        random.Random(0).shuffle(self._free)
        self._pages: dict[Any, list[list[int]]] = {}  # by group
        self._lengths: dict[Any, int] = {}
        self._slots: dict[Any, tuple[int, int]] = {}  # of the last step: read, and written
        self._free_slots = list(range(1, slots)) if self.worker.kv_cache_layout.states else []

    def step(self, chunks: Mapping[Any, Sequence[int]]) -> dict[Any, Tensor]:
        """Runs each request's next tokens in one batch -> logits [T, vocab] of all of them, per request."""
        logits = self.outputs(chunks).logits
        assert logits is not None
        return self.host_outputs(chunks, logits)

    def outputs(
        self, chunks: Mapping[Any, Sequence[int]], segments: Mapping[Any, Sequence[int]] | None = None
    ) -> Outputs:
        """The same -> all that the step gives, on the device. `segments`: of each token, where a model takes them."""
        return self.worker.run(self.padded_batch(chunks, segments))

    def padded_batch(
        self, chunks: Mapping[Any, Sequence[int]], segments: Mapping[Any, Sequence[int]] | None = None
    ) -> HostBatch:
        """Lays out a step of each request's next tokens, in a size that was compiled."""
        firsts = {key: self._lengths.get(key, 0) for key in chunks}
        for key, tokens in chunks.items():
            self._grow(key, firsts[key] + len(tokens))
        host = self._batch(chunks, firsts)
        if self.worker.model.uses_token_types:
            given = [(segments or {}).get(key, [0] * len(tokens)) for key, tokens in chunks.items()]
            host = host._replace(inputs=HostInputs(token_type_ids=np.concatenate(given, dtype=np.int32)))
        slots = [self.adapters.get(key, 0) for key, tokens in chunks.items() for _ in tokens]
        if self.worker.lora is not None and (self._fixed or any(slots)):
            extras = [slot if slot in self.extras else 0 for slot in slots]
            inputs = host.inputs._replace(adapters=np.array(slots, np.int32))
            if self._fixed or any(extras):
                inputs = inputs._replace(adapter_extras=np.array(extras, np.int32))
            host = host._replace(inputs=inputs)
        return pad(host, self._fixed) if self._fixed else self._captured.pad(host)

    def host_outputs(self, chunks: Mapping[Any, Sequence[int]], rows: Tensor) -> dict[Any, Tensor]:
        """One of the outputs of such a step, a row for each token: on the host in float32, per request."""
        sizes = [len(tokens) for tokens in chunks.values()]
        on_host = self.worker.device.to_host(rows)()[: sum(sizes)].to(torch.float32, copy=True)
        return dict(zip(chunks, on_host.split(sizes), strict=True))

    def trim(self, key: Any) -> None:
        """Gives back the pages that no later token of the request can see: they are the next ones, in any group."""
        for kept, pages in zip(self.worker.kv_cache_layout.groups, self._pages[key], strict=True):
            gone = kept.first_visible(self._lengths[key]) // self._page_size
            self._free += [page for page in pages[:gone] if page]
            pages[:gone] = [0] * gone

    def finish(self, key: Any) -> None:
        self._free += [page for pages in self._pages.pop(key) for page in pages if page]
        self._free_slots += [slot for slot in self._slots.pop(key, ()) if slot]
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
        for pages in self._pages.setdefault(key, [[] for _ in self._kept]):
            while len(pages) * self._page_size < length:
                pages.append(self._free.pop())
        self._lengths[key] = length

    def _turned(self, before: int, state: int) -> tuple[int, int]:
        """A step reads what the last one wrote, and writes where that one read."""
        return state, before or self._free_slots.pop(0)

    def _batch(self, chunks: Mapping[Any, Sequence[int]], firsts: dict[Any, int]) -> HostBatch:
        stretches = []
        for key, tokens in chunks.items():
            if self.worker.kv_cache_layout.states:
                self._slots[key] = self._turned(*self._slots.get(key, (0, 0)))
            stretches.append(Stretch(tokens, firsts[key], self._pages[key], self._slots.get(key)))
        return host_batch(stretches, self._page_size, self._kept)


def most_pages(tiny: Tiny, tokens: int, page_size: int, step: int) -> int:
    """Returns the pages of a request of `tokens` tokens, over all groups of layers, with `step` tokens in a step."""
    sizes = ModelSizes(torch.float32, page_size, tokens)
    return Worker(choose("null").platform(), tiny.config, sizes).kv_cache_layout.max_pages(tokens, page_size, step)


def random_prompts(seed: int, lengths: Sequence[int], vocab: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(vocab) for _ in range(length)] for length in lengths]
