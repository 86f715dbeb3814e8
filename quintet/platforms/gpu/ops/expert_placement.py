"""Whole experts on ranks by Triton: where a token's are, and how often each is asked for."""

import torch
from torch import Tensor

from quintet.ops.moe import count_experts, local_experts
from quintet.platforms.gpu.ops.probe import probing


def _check(device: torch.device) -> str | None:
    ids = torch.tensor([[1, 0], [2, -1]], device=device, dtype=torch.int32)
    places = torch.tensor([[-1], [5]], device=device, dtype=torch.int32)
    found = _local_experts(torch.ones(2, 1, device=device), ids, places).tolist()
    counted = _count_experts(ids, torch.tensor([3, 0], device=device, dtype=torch.int32)).tolist()
    if found == [[5, -1], [-1, -1]] and counted == [4, 1]:
        return None
    return f"experts 1, 0 and two that are none are at {found}, and were counted as {counted}"


@local_experts.provide("triton", probing(_check))
def _local_experts(x: Tensor, ids: Tensor, places: Tensor) -> Tensor:
    from quintet.platforms.gpu.kernels.dealing import local

    if ids.dtype != torch.int32 or places.dtype != torch.int32 or len(ids) != len(x):
        raise ValueError(f"ids {tuple(ids.shape)} {ids.dtype} and places {places.dtype}: {len(x)} tokens, all int32")
    return local(x if x.stride(-1) == 1 else x.contiguous(), ids.contiguous(), places.contiguous())


@count_experts.provide("triton", probing(_check))
def _count_experts(ids: Tensor, loads: Tensor) -> Tensor:
    from quintet.platforms.gpu.kernels.dealing import count

    if ids.dtype != torch.int32 or loads.dtype != torch.int32 or not loads.is_contiguous():
        raise ValueError(f"ids {ids.dtype} and loads {loads.dtype}: both are int32, and loads dense, to be added to")
    return count(ids.contiguous(), loads)
