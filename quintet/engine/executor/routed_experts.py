"""Experts of tokens, for trainers that replay them (enable_return_routed_experts), kept where a token's KV is."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from quintet.config import EngineConfig
from quintet.engine.kv_cache.groups import KVCacheGroup
from quintet.engine.request import Request
from quintet.interface.platform import Device
from quintet.interface.types import HostBatch, IntArray
from quintet.layers.decoder import ModelBase
from quintet.layers.moe.moe import ExpertRouter, MoE
from quintet.layers.moe.routed_experts import RoutedExperts
from quintet.outputs import TokenDelta

if TYPE_CHECKING:
    from quintet.engine.executor.engine_plan import EnginePlan

OPTION = "enable_return_routed_experts"


class RoutedExpertsStore:
    """Expert ids by slot of the KV cache, on the host: tokens of cached prefixes have theirs, too.

    The slots are those of a group of layers that keeps all positions. A slot's ids are as old as its keys and values.
    """

    def __init__(self, slots: int, page_size: int, routers: Sequence[tuple[int, int]], group: int) -> None:
        """`routers`: see RoutedExperts; `group`: the place of the group in Request.pages and in batches."""
        self._ids = np.zeros((slots, len(routers), routers[0][1]), _kind(routers[0][0]))
        self._page_size, self._group = page_size, group

    def fetch(self, host: HostBatch, layers: Sequence[Tensor], device: Device) -> Callable[[], None]:
        """Starts the copies of a step's ids, [T, k] of each layer; calling the result waits, and stores them."""
        if len(layers) != self._ids.shape[1]:
            raise RuntimeError(
                f"{OPTION}: a step gave the experts of {len(layers)} layers, and the model has {self._ids.shape[1]} "
                "routers; the platform does not return Outputs.routed_experts: leave the setting out there"
            )
        slots, waiting = host.groups[self._group].slot_mapping, [device.to_host(each) for each in layers]

        def wait() -> None:
            for layer, each in enumerate(waiting):
                self._ids[slots, layer] = each().numpy()[: len(slots)]

        return wait

    def add_to(self, delta: TokenDelta, request: Request, upto: int) -> None:
        """Gives a delta the ids of the request's tokens before `upto` that were not given yet."""
        first = request.num_routed
        if upto <= first:
            return
        rows = self._ids[self._slots(request.pages[self._group], first, upto)]
        delta.routed_experts, delta.routed_shape, request.num_routed = rows.tobytes(), rows.shape, upto

    def _slots(self, pages: Sequence[int], start: int, stop: int) -> IntArray:
        """Slots of a request's tokens start .. stop - 1."""
        at = np.arange(start, stop, dtype=np.int32)
        slots: IntArray = np.asarray(pages, np.int32)[at // self._page_size] * self._page_size + at % self._page_size
        return slots


def bytes_of_token(routed: RoutedExperts | None) -> int:
    """Returns the bytes that the experts of one token take; 0: they are not returned."""
    if routed is None:
        return 0
    return sum(top_k * np.dtype(_kind(experts)).itemsize for experts, top_k in routed.routers)


def _kind(experts: int) -> type[np.integer[Any]]:
    """Returns the smallest of the types of ids that holds those of so many experts."""
    return np.uint8 if experts <= 2**8 else np.uint16 if experts <= 2**16 else np.int32


def check_routed_experts(config: EngineConfig, model: ModelBase, routed: RoutedExperts | None) -> None:
    """ValueError where the experts of tokens cannot be returned."""
    if routed is None:
        return
    if not routed.routers:
        raise ValueError(
            f"{OPTION}: {config.model} has no router that reports its choice: it has no experts, or transformers' own "
            "code mixes them; leave it out"
        )
    if len(set(routed.routers)) > 1:
        raise ValueError(f"{OPTION}: layers of {config.model} choose from different numbers of experts; leave it out")
    for each in model.modules():  # a platform's subclass may choose inside a kernel of its own
        if isinstance(each, MoE | ExpertRouter) and not each.records_experts:
            raise ValueError(
                f"{OPTION}: {type(each).__name__} of this platform chooses experts within a kernel, which does not "
                "return them; leave it out, or choose another device"
            )
    if config.kv_transfer_config.kv_connector is not None or config.stores_kv_externally:
        raise ValueError(
            f"{OPTION}: tokens whose keys and values come from a KV connector have no experts here; leave "
            "kv_transfer_config and KV offloading out"
        )


def describe_routed_experts(routed: RoutedExperts | None) -> list[str]:
    """Returns what returning experts takes, in words."""
    if routed is None:
        return []
    size = bytes_of_token(routed)
    return [f"{OPTION}: {size} bytes of host memory for each token of the KV cache ({len(routed.routers)} layers)"]


def make_store(prepared: "EnginePlan") -> RoutedExpertsStore | None:
    """Makes the store of an engine that returns experts. ValueError if no group of layers keeps all positions."""
    worker = prepared.ranks.workers[0]
    routed = worker.main.build.routed_experts
    if routed is None:
        return None
    group = _whole_group(worker.kv_cache_layout.groups)
    page_size = prepared.config.page_size
    return RoutedExpertsStore(prepared.memory_plan.num_pages * page_size, page_size, routed.routers, group)


def _whole_group(groups: Sequence[KVCacheGroup]) -> int:
    """Returns the first group whose pages stay as long as the request."""
    for index, group in enumerate(groups):
        if group.window is None and not group.cross:
            return index
    raise ValueError(
        f"{OPTION}: each layer of this model has a window, behind which pages are given back, and with them the "
        "experts of their tokens; leave it out"
    )
