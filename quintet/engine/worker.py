"""One rank: a device, its share of the model, the cache, and the step that runs them."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from quintet.engine.loader import load, num_bytes, reload
from quintet.layers.build import Build, replacements, settle
from quintet.layers.decoder import CausalLM
from quintet.layers.forms import Forms
from quintet.models import model_class
from quintet.ops import bind
from quintet.platforms.interface import DROPPED, KV, Attention, Platform
from quintet.types import Array, AttentionSpec, Batch, Bucket, HostBatch, KVLayout, Memory

logger = logging.getLogger(__name__)

FIELDS = len(HostBatch._fields) - 1  # all but `extra`


@dataclass(frozen=True)
class Shape:
    """The sizes that a worker builds its model with."""

    dtype: torch.dtype
    page_size: int
    max_model_len: int
    forms: Forms = Forms()  # of the weights of products
    kv_dtype: torch.dtype | None = None  # of the cache; None: dtype
    attention: str = "auto"  # the provider of paged attention that was asked for


@dataclass(frozen=True)
class Place:
    """Which rank this is, and where the ranks meet."""

    rank: int = 0
    size: int = 1
    endpoint: str = ""


class Carried(NamedTuple):
    """Tokens of a step that the step before it samples: the host does not know them yet."""

    sampled: Tensor  # [S] int32, on the first rank's device
    rows: Array  # [T] int32: which of those each token is, -1 if the host knows it


class Worker:
    """Built empty, so that the memory plan can ask for sizes; load() then fills it."""

    def __init__(self, platform: Platform, hf_config: Any, shape: Shape, place: Place = Place()) -> None:
        self.platform, self.place = platform, place
        self.device = platform.open(place.rank)
        self.ops = bind(platform.op_priority, {} if shape.attention == "auto" else {"paged_attention": shape.attention})
        self._comm = platform.connect(place.rank, place.size, place.endpoint)
        self.build(hf_config, shape)
        self._kv: KV = ()

    def build(self, hf_config: Any, shape: Shape) -> None:
        """Makes the model without its weights; again, if the plan settles on another length."""
        self._attentions: list[Attention] = []

        def attention(spec: AttentionSpec) -> Attention:
            made = self.platform.attention(spec, self.ops, self.place.rank)
            self._attentions.append(made)
            return made

        sizes = shape.dtype, shape.page_size, shape.max_model_len
        layers = replacements(self.platform.layers)
        build = Build(self.ops, attention, self._comm, *sizes, shape.forms, shape.kv_dtype, layers)
        self.model: CausalLM = model_class(hf_config, self.platform.models)(hf_config, build).eval()
        settle(self.model)
        # one attention of each kind plans a step: the plan is shared by the layers that are alike
        self._planners = list({type(attention): attention for attention in self._attentions}.values())

    @property
    def layouts(self) -> list[KVLayout]:
        return [attention.layout for attention in self._attentions]

    @property
    def page_bytes(self) -> int:
        """What one page takes over all layers of this rank."""
        return sum(layout.page_bytes for layout in self.layouts)

    @property
    def weight_bytes(self) -> int:
        return num_bytes(self.model, self.platform)

    def memory(self) -> Memory:
        return self.device.memory()

    def load(
        self,
        folder: Path | None,
        pages: int,
        buckets: Sequence[Bucket],
        progress: bool,
        ahead: Sequence[Bucket] = (),
    ) -> None:
        """Reads the weights (random ones without a folder), makes the cache, compiles the step, and runs those of
        `ahead` so that they are captured."""
        self._folder, self._pages, self._buckets, self._ahead = folder, pages, buckets, ahead
        self._read(progress)
        self._begin(progress)

    def _read(self, progress: bool) -> None:
        """The weights, from the checkpoint as it is now."""
        load(self.model, self.platform, self._folder, progress, self.place.rank)
        self._empty = False

    def _begin(self, progress: bool) -> None:
        """Makes the cache, compiles the step, and captures."""
        self.renew_cache()
        shown, hidden = self._buckets, not (progress and self._buckets)
        self._step = self.platform.compile(
            self.model, tqdm(shown, desc="Compiling", unit="bucket", disable=hidden, leave=False)
        )
        if self._ahead:
            self._capture(progress)

    @torch.inference_mode()
    def _capture(self, progress: bool) -> None:
        before, start = self.memory().free, time.perf_counter()
        for bucket in tqdm(self._ahead, desc="Capturing", unit="step", disable=not progress, leave=False):
            self.device.to_host(self.run(HostBatch.decoding(bucket)))()  # waits for it
        took, seconds = max(0, before - self.memory().free), time.perf_counter() - start
        logger.info("captured %d steps ahead in %.1f s: %.1f MiB", len(self._ahead), seconds, took / 2**20)

    def sleep(self, level: int) -> int:
        """Gives memory back -> bytes; until wake() nothing may be asked of this worker."""
        freed = self.device.sleep(level)  # refuses before anything is let go
        freed += sum(_storages(self._kv).values())
        self._step, self._kv = _asleep, ()  # a recorded step holds addresses
        if level == DROPPED:
            freed += self._drop_weights()
        return freed

    def wake(self) -> None:
        """As after load(); the weights are read again if they were dropped. What failed may be tried again."""
        self.device.wake()
        if self._empty:
            self._read(progress=False)
        self._begin(progress=False)

    def reload(self, folder: Path | None) -> None:
        """Other weights of the same model, written over those that are there: no step is compiled anew."""
        reload(self.model, self.platform, folder)
        self._folder = folder

    def _drop_weights(self) -> int:
        """-> the bytes that they still took."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        held = _storages(tensors)
        for tensor in tensors:
            tensor.data = tensor.new_empty(0)
        self._empty = True
        return sum(held.values())

    def renew_cache(self) -> None:
        """An empty cache, once the one before is let go."""
        self._kv = ()
        self._kv = self.device.allocate_kv(self.layouts, self._pages)

    def run(self, host: HostBatch, carried: Carried | None = None) -> Tensor:
        """One step -> logits [L, vocab], on the device."""
        if not self._kv:  # an interruption came between the old cache and the new one
            self.renew_cache()
        for attention in self._planners:
            host = attention.plan(host)
        arrays: list[Array] = [*host[:FIELDS], *host.extra]  # type: ignore[list-item]  # the last field is a tuple
        fields = len(arrays)
        if carried is not None:
            rows = np.full(len(host.token_ids), -1, np.int32)  # attention may have padded the step
            rows[: len(carried.rows)] = carried.rows
            arrays.append(rows)
        tensors = self.device.to_device(arrays)
        batch = Batch(*tensors[:FIELDS], extra=tensors[FIELDS:fields])  # type: ignore[arg-type, misc]
        if carried is not None:
            sampled = self._from_first(carried.sampled)
            batch = batch._replace(token_ids=self.ops.place_tokens(batch.token_ids, sampled, tensors[fields]))
        logits, self._kv = self._step(self._kv, batch)
        return logits

    def _from_first(self, x: Tensor) -> Tensor:
        """The first rank's x [S], on every rank; what the other ranks bring follows it."""
        if self._comm.size == 1:
            return x
        own = x if self._comm.rank == 0 else self.upload(np.zeros(x.shape[0], np.int32))[0]
        return self._comm.all_gather(own, 0)

    def upload(self, *arrays: np.ndarray[Any, Any]) -> tuple[Tensor, ...]:
        return self.device.to_device(arrays)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of each piece of memory, however many tensors lie on it."""
    return {memory.data_ptr(): memory.nbytes() for memory in (tensor.untyped_storage() for tensor in tensors)}


def _asleep(kv: KV, batch: Batch) -> tuple[Tensor, KV]:
    """The step of a worker that sleeps."""
    raise RuntimeError("a step was asked of a worker that is asleep")
