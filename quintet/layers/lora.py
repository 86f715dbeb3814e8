"""Low-rank adapters (LoRA) beside a model's products: room on the device for several, and each rank's share of one."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quintet.interface.platform import Platform
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, Layer, named_layers
from quintet.layers.linear import ColumnParallelLinear, SubLinear
from quintet.layers.lora_step import LoRASizes


class LoRAMatrices(NamedTuple):
    """Matrices of an adapter for the product of one module, to which it adds x A^T B^T; on the host, whole."""

    lora_a: Tensor  # [r, K]
    lora_b: Tensor  # [N, r], scaled


class PackedLoRA(NamedTuple):
    """An adapter as one rank's pools take it, on the host."""

    pools: Mapping[str, tuple[Tensor, Tensor]]  # a pool's path -> A [1, P, R, K] and B [1, R, N] of this rank
    ranks: Tensor  # [1, M] int32: rows of each part of all pools

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.ranks.nbytes + sum(a.nbytes + b.nbytes for a, b in self.pools.values())


class LoRARanks(Layer):
    """Rows that adapters have in each part of all pools."""

    ranks: Tensor  # [S, M] int32


class LoRAPool(Layer):
    """Room for S adapters beside one product. Its parts are the modules of the checkpoint that the product computes:
    q, k and v have an A of their own each, and the columns of B are the product's outputs."""

    lora_a: Tensor  # [S, P, R, K]
    lora_b: Tensor  # [S, R, N]

    def __init__(self, build: BuildContext, product: ColumnParallelLinear, path: str, ranks: LoRARanks) -> None:
        super().__init__(build, "add_lora")
        assert build.lora is not None, "pools are for models with adapters"
        self._step, self._rank, self._dtype, self.path = build.lora, build.rank, build.dtype, path
        self._slices = product.output_slices(path)
        self.modules_here = tuple(dict.fromkeys(_module(part) for part in self._slices))
        self._inputs = product.inputs
        self.columns = tuple(
            (self.modules_here.index(_module(part)), _width(part, build.rank)) for part in self._slices
        )
        self.first = 0  # its column of the ranks
        self._rows = (ranks,)  # a module of the model, and none of this one: it stands in a tuple

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """y [T, N] and what each row's adapter adds to it; x [T, K]."""
        held, ranks = self._parameters, self._rows[0].ranks
        out: Tensor = self.ops.add_lora(
            y, x, held["lora_a"], held["lora_b"], ranks, self._step.slots, self.first, self.columns
        )
        return out

    def shapes(self, sizes: LoRASizes) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors."""
        start, stop = self._inputs.ranges[self._rank]
        outputs = sum(width for _, width in self.columns)
        parts, rank = len(self.modules_here), sizes.max_rank
        return {
            "lora_a": (sizes.max_loras, parts, rank, stop - start),
            "lora_b": (sizes.max_loras, rank, outputs),
        }

    def pack(
        self, adapter: Mapping[str, LoRAMatrices], sizes: LoRASizes, ranks: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Returns an adapter's A and B for this rank, and enters its rows into `ranks` [M]; None if it has none here.
        ValueError names a module whose matrices do not fit."""
        given = {module: adapter[module] for module in self.modules_here if module in adapter}
        if not given:
            return None
        shapes = self.shapes(sizes)
        a, b = (torch.zeros((1, *shapes[name][1:]), dtype=self._dtype) for name in ("lora_a", "lora_b"))
        start, stop = self._inputs.ranges[self._rank]
        for module, matrices in given.items():
            self._check(module, matrices, sizes)
            part, rows = self.modules_here.index(module), len(matrices.lora_a)
            ranks[self.first + part] = rows
            a[0, part, :rows] = matrices.lora_a[:, start:stop].to(self._dtype)
        column = 0
        for piece, (_, width) in zip(self._slices, self.columns, strict=True):
            if (module := _module(piece)) in given:
                matrix = given[module].lora_b
                cut = replace(piece, shape=(piece.shape[0], matrix.shape[1]), transposed=False)
                mine = Weight("lora_b", (cut,), 0, self._rank, self._dtype, "vector").local({piece.source: matrix})
                b[0, : matrix.shape[1], column : column + width] = mine.t().to(self._dtype)
            column += width
        return a, b

    def _check(self, module: str, matrices: LoRAMatrices, sizes: LoRASizes) -> None:
        a, b = matrices
        outputs = next(part.total or part.shape[0] for part in self._slices if _module(part) == module)
        if a.shape[1] != self._inputs.total or b.shape[0] != outputs:
            raise ValueError(
                f"{module}: the adapter's A is {list(a.shape)} and B {list(b.shape)}, and the product has "
                f"{self._inputs.total} inputs and {outputs} outputs; it was made for another model"
            )
        if len(a) > sizes.max_rank:
            raise ValueError(
                f"{module}: the adapter has rank {len(a)}, and max_lora_rank is {sizes.max_rank}; raise it to "
                f"{len(a)} or more"
            )


class LoRAPools:
    """All pools of a rank's model."""

    def __init__(
        self, model: nn.Module, build: BuildContext, sizes: LoRASizes, other_stages: Collection[str] = ()
    ) -> None:
        """Adds a pool to each product. `other_stages`: modules that adapters may change, and of which other pipeline
        stages have the products."""
        self.sizes, self._rank, self._dtype = sizes, build.rank, build.dtype
        self._other_stages = frozenset(other_stages)
        self._ranks = LoRARanks(build)
        self._pools: dict[str, LoRAPool] = {}
        count = 0
        for path, product in _products(model):
            pool = LoRAPool(build, product, path, self._ranks)
            pool.first = count
            count += len(pool.modules_here)
            product.add_lora_pool(pool)
            self._pools[path] = pool
        self._columns = count
        model.add_module("lora_ranks", self._ranks)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        numbers = sum(torch.Size(shape).numel() for pool in self._pools.values() for shape in self._shapes(pool))
        return numbers * self._dtype.itemsize + 4 * self.sizes.max_loras * self._columns

    def _shapes(self, pool: LoRAPool) -> Iterator[tuple[int, ...]]:
        yield from pool.shapes(self.sizes).values()

    @property
    def modules(self) -> frozenset[str]:
        """Modules of the checkpoint that an adapter may change."""
        return frozenset(module for pool in self._pools.values() for module in pool.modules_here)

    def place(self, platform: Platform) -> None:
        """Makes the pools on the device, without an adapter."""
        for pool in self._pools.values():
            for name, shape in pool.shapes(self.sizes).items():
                pool.assign(
                    platform.place(
                        self._weight(name, shape, self._dtype), {name: torch.zeros(shape, dtype=self._dtype)}
                    )
                )
        shape = (self.sizes.max_loras, self._columns)
        zeros = torch.zeros(shape, dtype=torch.int32)
        self._ranks.assign(platform.place(self._weight("ranks", shape, torch.int32), {"ranks": zeros}))
        self.write(platform, 0, self._empty())  # a platform may compile what writing takes: now, and not for a request

    def _empty(self) -> PackedLoRA:
        """An adapter of no rows, in all pools."""
        pools = {
            path: (torch.zeros((1, *a[1:]), dtype=self._dtype), torch.zeros((1, *b[1:]), dtype=self._dtype))
            for path, (a, b) in ((path, tuple(self._shapes(pool))) for path, pool in self._pools.items())
        }
        return PackedLoRA(pools, torch.zeros((1, self._columns), dtype=torch.int32))

    def pack(self, adapter: Mapping[str, LoRAMatrices]) -> PackedLoRA:
        """Returns an adapter as write() takes it. ValueError names modules that no product here computes, but those
        whose B is zero: an encoder's pooler that the training did not reach changes nothing."""
        there = self.modules | self._other_stages
        unknown = sorted(name for name, each in adapter.items() if name not in there and each.lora_b.any())
        if unknown:
            here = sorted({module.rpartition(".")[2] for module in self.modules})
            raise ValueError(
                f"the adapter changes {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}, which this model "
                f"has no product for; it may be another model's (products here: {', '.join(here)})"
            )
        ranks = torch.zeros((1, self._columns), dtype=torch.int32)
        packed = {path: pool.pack(adapter, self.sizes, ranks[0]) for path, pool in self._pools.items()}
        return PackedLoRA({path: each for path, each in packed.items() if each is not None}, ranks)

    def write(self, platform: Platform, slot: int, packed: PackedLoRA) -> None:
        """Writes an adapter into a slot of all pools, from 0 on; no step runs that reads it."""
        if self.sizes.by_torch:
            self._copy(slot, packed)
            return
        for path, (a, b) in packed.pools.items():
            pool = self._pools[path]
            for name, tensor in (("lora_a", a), ("lora_b", b)):
                weight = self._weight(name, tuple(tensor.shape), self._dtype, slot)
                platform.place(weight, {name: tensor}, into=pool.assigned_tensors)
        weight = self._weight("ranks", tuple(packed.ranks.shape), torch.int32, slot)
        platform.place(weight, {"ranks": packed.ranks}, into=self._ranks.assigned_tensors)

    @torch.inference_mode()
    def _copy(self, slot: int, packed: PackedLoRA) -> None:
        """Copies the rows that the adapter has: hundreds of small copies, between two steps."""
        most = int(packed.ranks.max())
        for path, pair in packed.pools.items():
            held = self._pools[path]._parameters  # where nn.Module would look them up, one after the other
            for name, tensor in zip(("lora_a", "lora_b"), pair, strict=True):
                there = held[name].narrow(0, slot, 1)  # type: ignore[union-attr]  # place() has made it
                if most < self.sizes.max_rank:
                    there, tensor = there.narrow(-2, 0, most), tensor.narrow(-2, 0, most)
                there.copy_(tensor)
        self._ranks.ranks.narrow(0, slot, 1).copy_(packed.ranks)

    def _weight(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, slot: int | None = None) -> Weight:
        """A tensor of a pool, or one slot of it: each rank keeps its own whole."""
        part = CheckpointSlice(name, shape, ((0, shape[0]),) * (self._rank + 1))
        rows = None if slot is None else (slot, 1)
        return Weight(name, (part,), 0, self._rank, dtype, "vector", rows=rows)


def adaptable_modules(model: nn.Module) -> frozenset[str]:
    """Returns the modules of the checkpoint that products of the model compute."""
    return frozenset(_module(part) for path, product in _products(model) for part in product.output_slices(path))


def _products(model: nn.Module) -> list[tuple[str, ColumnParallelLinear]]:
    products = ((path, layer) for path, layer in named_layers(model) if isinstance(layer, ColumnParallelLinear))
    return [(path, layer) for path, layer in products if not isinstance(layer, SubLinear)]


def _module(part: CheckpointSlice) -> str:
    return part.source.removesuffix(".weight")


def _width(part: CheckpointSlice, rank: int) -> int:
    start, stop = part.ranges[rank]
    return stop - start
