"""Adapters (LoRA) of a model: room on the device for several, and each rank's share of one."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quintet.common.suggestions import nearest_name
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
    module_of,
)
from quintet.layers.lora_step import ALL_MODULES, LoRASizes
from quintet.layers.moe.lora import STACKS, ExpertsPool
from quintet.layers.moe.moe import Experts, slices_of

__all__ = ["LoRAMatrices", "LoRAPools", "PackedLoRA", "adaptable_modules"]

# what vLLM calls products that it computes as one
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
AdaptableLayer = ColumnParallelLinear | VocabParallelEmbedding | Experts


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
        self, model: nn.Module, build: BuildContext, sizes: LoRASizes, modules: Mapping[str, str] | None = None
    ) -> None:
        """Adds a pool to each product that may be adapted, to experts, and to the embedding of tokens. `modules`:
        adaptable_modules() of the model before its layers were dealt out to pipeline stages."""
        self.sizes, self._rank, self._dtype = sizes, build.rank, build.dtype
        self._known = adaptable_modules(model, sizes) if modules is None else modules
        self._ranks = LoRARanks(build)
        self._pools: dict[str, LoRAPool] = {}
        self._columns = 0
        for path, layer in _adaptable(model, sizes):
            if not _takes(path, layer, sizes):
                continue
            pool: LoRAPool
            if isinstance(layer, VocabParallelEmbedding):
                pool = EmbeddingPool(build, layer, path, self._ranks, sizes)
            elif isinstance(layer, Experts):
                pool = ExpertsPool(build, layer, path, self._ranks)
            else:
                pool = ProductPool(build, layer, path, self._ranks)
            pool.first = self._columns
            self._columns += pool.num_columns
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
        unknown = sorted(name for name, each in adapter.items() if self._known.get(name, "?") and each.lora_b.any())
        if unknown:
            lacking = sorted({self._known[name] for name in unknown if name in self._known})
            here = sorted({name.rpartition(".")[2] for name, target in self._known.items() if not target})
            raise ValueError(
                f"the adapter changes {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}, which "
                + (
                    f"have no room: set lora_target_modules to {ALL_MODULES}, or to a list with {', '.join(lacking)}"
                    if lacking
                    else f"this model has no product for; it may be another model's (products here: {', '.join(here)})"
                )
            )
        ranks = torch.zeros((1, self._columns), dtype=torch.int32)
        has_extras = any(each.has_extras for each in adapter.values())
        packed = {
            path: pool.pack(adapter, self.sizes, ranks[0], read, has_extras) for path, pool in self._pools.items()
        }
        return PackedLoRA({path: tensors for path, tensors in packed.items() if tensors}, ranks, has_extras)

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
        """Copies the rows that the adapter has: hundreds of small copies in one call, between two steps."""
        experts = (each["ranks"] for each in packed.pools.values() if "ranks" in each)
        most = max((int(each.max()) for each in (packed.ranks, *experts) if each.numel()), default=0)
        places, rows = [self._ranks.ranks.narrow(0, slot, 1)], [packed.ranks]
        for path, tensors in packed.pools.items():
            pool = self._pools[path]
            held = pool._parameters  # where nn.Module would look them up, one after the other
            for name, tensor in tensors.items():
                count = len(tensor)
                there = held[name].narrow(0, slot * count, count)  # type: ignore[union-attr]  # place() has made it
                if name in RANKED and most < self.sizes.max_rank:
                    there, tensor = there.narrow(-2, 0, most), tensor.narrow(-2, 0, most)
                places.append(there)
                rows.append(tensor)
        torch._foreach_copy_(places, rows)

    def _weight(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, slot: int | None = None) -> Weight:
        """A tensor of a pool, or one slot of it: each rank keeps its own whole."""
        part = CheckpointSlice(name, shape, ((0, shape[0]),) * (self._rank + 1))
        rows = None if slot is None else (slot * shape[0], shape[0])
        return Weight(name, (part,), 0, self._rank, dtype, "vector", rows=rows)


def adaptable_modules(model: nn.Module, sizes: LoRASizes) -> dict[str, str]:
    """Returns the modules of the checkpoint that products, the embedding of tokens and experts compute, and for each
    that has no room what lora_target_modules lacks, else "". ValueError if the platform lacks adapters of experts, or a
    target is the name of no module here."""
    found, names = dict[str, str](), dict[str, str]()
    targets = set(sizes.targets or ()) - {ALL_MODULES}
    for path, layer in _adaptable(model, sizes):
        taken = _takes(path, layer, sizes)
        targets -= {each for each in targets if _is_named(path, layer, each)}
        for name in _modules(path, layer):
            end = (path if _is_mixture(layer) else name).rpartition(".")[2]
            found[name] = "" if taken else end
            names.setdefault(name.rpartition(".")[2], end)
    if targets:
        raise ValueError(_refusal([each for each in sizes.targets or () if each in targets], names))
    return found


def _refusal(targets: Sequence[str], names: Mapping[str, str]) -> str:
    """Why these targets are refused. `names`: ends of modules that may be adapted -> what a target calls them."""
    refused = []
    for target in targets:
        last = target.rpartition(".")[2]
        instead = [names[each] for each in FUSED.get(last, (last,)) if each in names]
        instead += [names[fused] for fused, parts in FUSED.items() if last in parts and fused in names]
        nearest = ", ".join(dict.fromkeys(instead)) or nearest_name(last, names.values())
        hint = f" (write {nearest})" if instead else f" (did you mean {nearest!r}?)" if nearest else ""
        refused.append(f"{target!r}{hint}")
    return (
        f"lora_target_modules: no module that adapters may change has the name {', '.join(refused)}; names of this "
        f"model: {', '.join(sorted(set(names.values())))}, or {ALL_MODULES}"
    )


def _takes(path: str, layer: AdaptableLayer, sizes: LoRASizes) -> bool:
    """True if there is to be room beside a layer. A mixture is named by its path, for its experts take much; other
    layers by the ends of their modules, too."""
    is_mixture = _is_mixture(layer)
    if sizes.targets is None or ALL_MODULES in sizes.targets:
        taken = not is_mixture or sizes.targets is not None
    else:
        taken = any(_is_named(path, layer, target) for target in sizes.targets)
    if taken and is_mixture and not sizes.experts:
        raise ValueError(
            "lora_target_modules: this platform serves no adapters of experts (Capabilities.lora_experts is False); "
            "leave experts out, or write the adapter into the model (quintet merge-lora)"
        )
    if taken and isinstance(layer, Experts) and layer.moves_experts:
        raise ValueError(
            "lora_target_modules: experts move to other ranks with enable_eplb, and adapters of them would not; leave "
            "experts or enable_eplb out"
        )
    return taken


def _is_mixture(layer: AdaptableLayer) -> bool:
    return isinstance(layer, Experts) and layer.is_mixture


def _is_named(path: str, layer: AdaptableLayer, target: str) -> bool:
    """True if a target is the end of a layer's name."""
    names = [path] if _is_mixture(layer) else [path, *_modules(path, layer)]
    return any(f".{name}".endswith(f".{target}") for name in names)


def _modules(path: str, layer: AdaptableLayer) -> set[str]:
    """Modules of the checkpoint that a layer computes."""
    if isinstance(layer, VocabParallelEmbedding):
        return {path}
    if isinstance(layer, Experts):
        stacks = (each for each in layer.weights(path) if each.name in STACKS)
        return {module_of(part) for stack in stacks for part in slices_of(stack)}
    return {module_of(part) for part in layer.output_slices(path)}


def _adaptable(model: nn.Module, sizes: LoRASizes) -> list[tuple[str, AdaptableLayer]]:
    """Products, experts, and the first table of tokens; further ones are of other ids."""
    found: list[tuple[str, AdaptableLayer]] = []
    tables = 0
    for path, layer in named_layers(model):
        if isinstance(layer, ColumnParallelLinear) and not isinstance(layer, SubLinear):
            found.append((path, layer))
        elif isinstance(layer, Experts) and layer.takes_lora and (layer.is_mixture or sizes.experts):
            found.append((path, layer))
        elif isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, PositionEmbedding):
            tables += 1
            if tables == 1:
                found.append((path, layer))
    return found


def _zeros(each: PoolTensor) -> Tensor:
    return torch.zeros(each.shape, dtype=each.dtype)
