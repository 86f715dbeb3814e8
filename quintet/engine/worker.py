"""One rank: a device, its share of the model, the cache, and the step that runs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from quintet.engine.loader import load, num_bytes
from quintet.layers.build import Build, replacements
from quintet.layers.decoder import CausalLM
from quintet.models import model_class
from quintet.ops import bind
from quintet.platforms.interface import KV, Attention, Platform
from quintet.types import Array, AttentionSpec, Batch, Bucket, HostBatch, KVLayout, Memory, Scheme

FIELDS = len(HostBatch._fields) - 1  # all but `extra`


@dataclass(frozen=True)
class Shape:
    """The sizes that a worker builds its model with."""

    dtype: torch.dtype
    page_size: int
    max_model_len: int
    scheme: Scheme | None = None
    kv_dtype: torch.dtype | None = None  # of the cache; None: dtype


@dataclass(frozen=True)
class Place:
    """Which rank this is, and where the ranks meet."""

    rank: int = 0
    size: int = 1
    endpoint: str = ""


class Worker:
    """Built empty, so that the memory plan can ask for sizes; load() then fills it."""

    def __init__(self, platform: Platform, hf_config: Any, shape: Shape, place: Place = Place()) -> None:
        self.platform, self.place = platform, place
        self.device = platform.open(place.rank)
        self.ops = bind(platform.op_priority)
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
        build = Build(self.ops, attention, self._comm, *sizes, shape.scheme, shape.kv_dtype, layers)
        self.model: CausalLM = model_class(hf_config, self.platform.models)(hf_config, build).eval()
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

    def load(self, folder: Path | None, pages: int, buckets: Sequence[Bucket], progress: bool) -> None:
        """Reads the weights (random ones without a folder), makes the cache, and compiles the step."""
        load(self.model, self.platform, folder, progress, self.place.rank)
        self._pages = pages
        self.renew_cache()
        shown = tqdm(buckets, desc="Compiling", unit="bucket", disable=not (progress and buckets), leave=False)
        self._step = self.platform.compile(self.model, shown)

    def renew_cache(self) -> None:
        """An empty cache, once the one before is let go."""
        self._kv = ()
        self._kv = self.device.allocate_kv(self.layouts, self._pages)

    def run(self, host: HostBatch) -> Tensor:
        """One step -> logits [L, vocab], on the device."""
        if not self._kv:  # an interruption came between the old cache and the new one
            self.renew_cache()
        for attention in self._planners:
            host = attention.plan(host)
        arrays: list[Array] = [*host[:FIELDS], *host.extra]  # type: ignore[list-item]  # the last field is a tuple
        tensors = self.device.to_device(arrays)
        logits, self._kv = self._step(self._kv, Batch(*tensors[:FIELDS], extra=tensors[FIELDS:]))  # type: ignore[arg-type, misc]
        return logits

    def upload(self, *arrays: np.ndarray[Any, Any]) -> tuple[Tensor, ...]:
        return self.device.to_device(arrays)
