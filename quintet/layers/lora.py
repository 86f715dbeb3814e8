"""Adapters (LoRA) of a model: room on the device for several, and each rank's share of one."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quintet.interface.platform import Platform
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, named_layers
from quintet.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from quintet.layers.linear import ColumnParallelLinear, SubLinear
from quintet.layers.lora_pool import (
    RANKED,
    EmbeddingPool,
    LoRAMatrices,
    LoRAPool,
    LoRARanks,
    PoolTensor,
    ProductPool,
    ReadWeight,
)
from quintet.layers.lora_step import LoRASizes

__all__ = ["LoRAMatrices", "LoRAPools", "PackedLoRA", "adaptable_modules"]


class PackedLoRA(NamedTuple):
    """An adapter as one rank's pools take it, on the host."""

    pools: Mapping[str, Mapping[str, Tensor]]  # a pool's path -> its tensors for one adapter
    ranks: Tensor  # [1, M] int32: rows of each part of all pools
    has_extras: bool = False  # it has more than the A and B of products, on whatever rank

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.ranks.nbytes + sum(each.nbytes for pool in self.pools.values() for each in pool.values())


class LoRAPools:
    """All pools of a rank's model."""

    def __init__(
        self, model: nn.Module, build: BuildContext, sizes: LoRASizes, other_stages: Collection[str] = ()
    ) -> None:
        """Adds a pool to each product, and to the embedding of tokens. `other_stages`: modules that adapters may
        change, and of which other pipeline stages have the layers."""
        self.sizes, self._rank, self._dtype = sizes, build.rank, build.dtype
        self._other_stages = frozenset(other_stages)
        self._ranks = LoRARanks(build)
        self._pools: dict[str, LoRAPool] = {}
        self._columns = 0
        for path, layer in _adaptable(model):
            pool: LoRAPool
            if isinstance(layer, VocabParallelEmbedding):
                pool = EmbeddingPool(build, layer, path, self._ranks, sizes)
            else:
                pool = ProductPool(build, layer, path, self._ranks)
            pool.first = self._columns
            self._columns += len(pool.modules_here)
            layer.add_lora_pool(pool)
            self._pools[path] = pool
        model.add_module("lora_ranks", self._ranks)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = (each for pool in self._pools.values() for each in pool.tensors(self.sizes).values())
        one = sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in tensors)
        return self.sizes.max_loras * (one + 4 * self._columns)

    @property
    def modules(self) -> frozenset[str]:
        """Modules of the checkpoint that an adapter may change."""
        return frozenset(module for pool in self._pools.values() for module in pool.modules_here)

    def place(self, platform: Platform) -> None:
        """Makes the pools on the device, without an adapter."""
        for pool in self._pools.values():
            for name, each in pool.tensors(self.sizes).items():
                shape = (self.sizes.max_loras * each.shape[0], *each.shape[1:])
                weight = self._weight(name, shape, each.dtype)
                pool.assign(platform.place(weight, {name: torch.zeros(shape, dtype=each.dtype)}))
        shape = (self.sizes.max_loras, self._columns)
        zeros = torch.zeros(shape, dtype=torch.int32)
        self._ranks.assign(platform.place(self._weight("ranks", shape, torch.int32), {"ranks": zeros}))
        self.write(platform, 0, self._empty())  # a platform may compile what writing takes: now, and not for a request

    def _empty(self) -> PackedLoRA:
        """An adapter of no rows, in all pools."""
        pools = {
            path: {name: _zeros(each) for name, each in pool.tensors(self.sizes).items()}
            for path, pool in self._pools.items()
        }
        return PackedLoRA(pools, torch.zeros((1, self._columns), dtype=torch.int32))

    def pack(self, adapter: Mapping[str, LoRAMatrices], read: ReadWeight | None = None) -> PackedLoRA:
        """Returns an adapter as write() takes it. `read`: of the checkpoint, whose weights DoRA's factors depend on;
        None: they are not computed, and the adapter is only checked.

        ValueError names modules that nothing here computes, but those whose B is zero: an encoder's pooler that the
        training did not reach changes nothing.
        """
        there = self.modules | self._other_stages
        unknown = sorted(name for name, each in adapter.items() if name not in there and each.lora_b.any())
        if unknown:
            here = sorted({module.rpartition(".")[2] for module in self.modules})
            raise ValueError(
                f"the adapter changes {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}, which this model "
                f"has no product for; it may be another model's (products here: {', '.join(here)})"
            )
        ranks = torch.zeros((1, self._columns), dtype=torch.int32)
        packed = {path: pool.pack(adapter, self.sizes, ranks[0], read) for path, pool in self._pools.items()}
        pools = {path: tensors for path, tensors in packed.items() if tensors}
        return PackedLoRA(pools, ranks, any(each.has_extras for each in adapter.values()))

    def write(self, platform: Platform, slot: int, packed: PackedLoRA) -> None:
        """Writes an adapter into a slot of all pools, from 0 on; no step runs that reads it."""
        if self.sizes.by_torch:
            self._copy(slot, packed)
            return
        for path, tensors in packed.pools.items():
            pool = self._pools[path]
            for name, tensor in tensors.items():
                weight = self._weight(name, tuple(tensor.shape), tensor.dtype, slot)
                platform.place(weight, {name: tensor}, into=pool.assigned_tensors)
        weight = self._weight("ranks", tuple(packed.ranks.shape), torch.int32, slot)
        platform.place(weight, {"ranks": packed.ranks}, into=self._ranks.assigned_tensors)

    @torch.inference_mode()
    def _copy(self, slot: int, packed: PackedLoRA) -> None:
        """Copies the rows that the adapter has: hundreds of small copies, between two steps."""
        most = int(packed.ranks.max())
        for path, tensors in packed.pools.items():
            pool = self._pools[path]
            held = pool._parameters  # where nn.Module would look them up, one after the other
            for name, tensor in tensors.items():
                count = len(tensor)
                there = held[name].narrow(0, slot * count, count)  # type: ignore[union-attr]  # place() has made it
                if name in RANKED and most < self.sizes.max_rank:
                    there, tensor = there.narrow(-2, 0, most), tensor.narrow(-2, 0, most)
                there.copy_(tensor)
        self._ranks.ranks.narrow(0, slot, 1).copy_(packed.ranks)

    def _weight(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, slot: int | None = None) -> Weight:
        """A tensor of a pool, or one slot of it: each rank keeps its own whole."""
        part = CheckpointSlice(name, shape, ((0, shape[0]),) * (self._rank + 1))
        rows = None if slot is None else (slot * shape[0], shape[0])
        return Weight(name, (part,), 0, self._rank, dtype, "vector", rows=rows)


def adaptable_modules(model: nn.Module) -> frozenset[str]:
    """Returns the modules of the checkpoint that products of the model, and its embedding of tokens, compute."""
    found = set[str]()
    for path, layer in _adaptable(model):
        if isinstance(layer, VocabParallelEmbedding):
            found.add(path)
        else:
            found.update(part.source.removesuffix(".weight") for part in layer.output_slices(path))
    return frozenset(found)


def _adaptable(model: nn.Module) -> list[tuple[str, ColumnParallelLinear | VocabParallelEmbedding]]:
    """Products, and the first table of tokens; further ones are of other ids."""
    found: list[tuple[str, ColumnParallelLinear | VocabParallelEmbedding]] = []
    tables = 0
    for path, layer in named_layers(model):
        if isinstance(layer, ColumnParallelLinear) and not isinstance(layer, SubLinear):
            found.append((path, layer))
        elif isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, PositionEmbedding):
            tables += 1
            if tables == 1:
                found.append((path, layer))
    return found


def _zeros(each: PoolTensor) -> Tensor:
    return torch.zeros(each.shape, dtype=each.dtype)
