"""Blocks and trunks with their parts in a fixed order, under the names that a family's checkpoints have for them."""

import math
from collections.abc import Mapping

from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.decoder import run_residual_layers
from quintet.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from quintet.layers.layer_state import StepState
from quintet.layers.pipeline import Stage, drop_other_layers


class NamedParts(nn.Module):
    """Modules by the checkpoint's names; subclasses say what each place is for."""

    def __init__(self, build: BuildContext, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._ops = build.ops.take("add")
        for name, part in parts.items():
            self.add_module(name, part)
        self._parts = tuple(parts.values())


class SerialBlock(NamedParts):
    """Norm, attention, norm, feed-forward: the second branch reads what the first has added."""

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        before, attend, between, feed = self._parts
        x, residual = before(x, residual)
        x, residual = between(attend(x, cache), residual)
        assert residual is not None
        return feed(x), residual


class ParallelBlock(NamedParts):
    """Norm, attention, feed-forward, or with a norm before each: both branches read the same (GPT-J 2021)."""

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        before, attend, *own, feed = self._parts
        normed, total = before(x, residual)
        fed = feed(own[0](total) if own else normed)
        return self._ops.add(attend(normed, cache), fed), total


class PostNormBlock(NamedParts):
    """Attention, norm, feed-forward, norm: each branch reads the plain residual (OLMo 2, 2024)."""

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        attend, after, feed, last = self._parts
        x = x if residual is None else self._ops.add(x, residual)
        x = self._ops.add(after(attend(x, cache)), x)
        return last(feed(x)), x


class BetweenNormsBlock(NamedParts):
    """Norm, attention, norm, norm, feed-forward, norm: one before each branch and one after."""

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        before, attend, after, between, feed, last = self._parts
        x, residual = before(x, residual)
        x, residual = between(after(attend(x, cache)), residual)
        assert residual is not None
        return last(feed(x)), residual


class NamedTrunk(NamedParts):
    """A trunk of parts with a checkpoint's names: an embedding, what is done to its rows (positions are added, norms
    applied), blocks, a last norm."""

    def __init__(self, build: BuildContext, parts: Mapping[str, nn.Module], scale: float = 1.0) -> None:
        super().__init__(build, parts)
        self._build, self._scale = build, scale
        build.ops.take("take_rows", "scale")

    @property
    def blocks(self) -> nn.ModuleList:
        """Its layers."""
        blocks = self._parts[-2]
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def keep_stage(self, stage: Stage) -> None:
        """Only what the stage has."""
        *before, layers, after = [name for name, _ in self.named_children()]
        drop_other_layers(self, stage, before, layers, [after])
        self._parts = tuple(self.children())

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        if not self._build.stage.first:
            return run_residual_layers(self.blocks, self._parts[-1], None, cache, self._build)
        table, *more, blocks, last = self._parts
        assert isinstance(table, VocabParallelEmbedding) and isinstance(blocks, nn.ModuleList)
        x = table.embed(cache.batch, self._scale)
        for each in more:
            placed = isinstance(each, PositionEmbedding)
            x = self._ops.add(x, each(cache.batch.positions)) if placed else each(x)
        return run_residual_layers(blocks, last, x, cache, self._build)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's, by head (Press et al. 2022): powers of 2 ** (-8 / n), where n is heads rounded down to a power of two;
    the heads past it take every other one of 2 n heads'."""
    rounded = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / rounded) for i in range(rounded)]
    rest = [2 ** (-8 * (2 * i + 1) / (2 * rounded)) for i in range(heads - rounded)]
    return (*first, *rest)
