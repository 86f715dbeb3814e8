"""Captures every declared bucket; the step that comes back runs these and no others."""

from collections.abc import Iterable

import torch
from quintet.platforms.interface import KV, Step
from quintet.types import Batch, Bucket, HostBatch, KVLayout
from torch import Tensor, nn

from acme.attention import planned
from acme.device import AcmeDevice
from acme.memory import Block
from acme.program import Program, capture
from acme.tensor import mapped, tensors


def compiled(model: nn.Module, buckets: Iterable[Bucket]) -> Step:
    """Every bucket's program. The weights say which device it is; its cache was allocated before."""
    programs = Programs(model, tensors(list(model.parameters()))[0].buffer.device)
    for bucket in buckets:
        programs.add(bucket)
    programs.reserve()
    return programs


class Programs:
    """A model's step: one program per bucket, and the workspace that they share."""

    def __init__(self, model: nn.Module, device: AcmeDevice) -> None:
        self._model, self._device = model, device
        self._programs: dict[Bucket, Program] = {}
        self._workspace: Block | None = None
        self._count = 0

    def compilations(self) -> int:
        """How many programs were captured so far."""
        return self._count

    def add(self, bucket: Bucket) -> None:
        kv = tuple(_page(layout) for layout in self._device.layouts)
        host = HostBatch.empty(bucket)
        batch = _described(planned(host) if kv else host)  # a model without attention has nobody who plans
        self._programs[sizes(batch)] = capture(self._model, self._device, kv, batch)
        self._count += 1

    def reserve(self) -> None:
        """The memory of the program that needs most: they run one after the other."""
        most = max((program.workspace for program in self._programs.values()), default=0)
        self._workspace = self._device.pool.take(most, "workspace", "the largest step")

    def __call__(self, kv: KV, batch: Batch) -> tuple[Tensor, KV]:
        return self.find(batch).launch(kv, batch), kv

    def find(self, batch: Batch) -> Program:
        program = self._programs.get(sizes(batch))
        if program is None:
            declared = sorted(tokens for tokens, *_ in self._programs)
            raise RuntimeError(
                f"a step of {batch.token_ids.shape[0]} tokens was never compiled, only steps of {declared}: "
                "steps must be padded to a bucket"
            )
        return program


def _described(host: HostBatch) -> Batch:
    """Meta tensors of these shapes."""
    return Batch(*mapped(tuple(host), lambda x: torch.empty(x.shape, dtype=torch.int32, device="meta")))


def _page(layout: KVLayout) -> Tensor:
    """A cache of one page: their number is no part of a program."""
    return torch.empty((1, *layout.page_shape), dtype=layout.dtype, device="meta")


def sizes(batch: Batch) -> Bucket:
    """What it is padded to."""
    requests, pages = batch.page_table.shape
    return Bucket(batch.token_ids.shape[0], requests, batch.logit_rows.shape[0], pages)
