"""Captures every declared variant; the step that comes back runs these and no others."""

from collections.abc import Iterable

import torch
from quintet.contract import Batch, HostBatch, Layout, Outputs, ShapeBucket, State, Step
from torch import Tensor, nn

from acme.attention import pieces_of
from acme.device import AcmeDevice
from acme.memory import Block
from acme.program import Program, capture
from acme.tensor import leaves, tensors


def compiled(model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
    """Every variant's program. The weights say which device it is; its cache was allocated before."""
    programs = Programs(model, tensors(list(model.parameters()))[0].buffer.device)
    for bucket in buckets:
        programs.add(bucket)
    programs.reserve()
    return programs


Sizes = tuple[tuple[int, ...], ...]  # of a batch's leaves


class Programs:
    """A model's step: one program per variant, and the workspace that they share."""

    def __init__(self, model: nn.Module, device: AcmeDevice) -> None:
        self._model, self._device = model, device
        self._programs: dict[Sizes, Program] = {}
        self._workspace: Block | None = None
        self._count = 0

    def compilations(self) -> int:
        """How many programs were captured so far."""
        return self._count

    def add(self, bucket: ShapeBucket) -> None:
        state = tuple(_page(layout) for layout in self._device.layouts)
        host = bucket.batch
        groups = tuple(group._replace(plan=(pieces_of(host),)) for group in host.groups)
        batch = _described(host._replace(groups=groups))
        self._programs[sizes(batch)] = capture(self._model, self._device, state, batch)
        self._count += 1

    def reserve(self) -> None:
        """The memory of the program that needs most: they run one after the other."""
        most = max((program.workspace for program in self._programs.values()), default=0)
        self._workspace = self._device.pool.take(most, "workspace", "the largest step")

    def __call__(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        return self.find(batch).launch(state, batch), state

    def find(self, batch: Batch) -> Program:
        program = self._programs.get(sizes(batch))
        if program is None:
            declared = sorted({tokens for (tokens,), *_ in self._programs})
            raise RuntimeError(
                f"a step of {batch.token_ids.shape[0]} tokens was never compiled, only steps of {declared}: "
                "steps must be padded to a variant"
            )
        return program


def _described(host: HostBatch) -> Batch:
    """Meta tensors of these shapes."""
    return host.on(torch.from_numpy(x).to("meta") for x in host.leaves())


def _page(layout: Layout) -> Tensor:
    """A cache of one page: their number is no part of a program."""
    return torch.empty((1, *layout.shape), dtype=layout.dtype, device="meta")


def sizes(batch: Batch) -> Sizes:
    """What it is padded to."""
    return tuple(tuple(x.shape) for x in leaves(batch))
