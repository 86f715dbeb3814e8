"""The mixture of experts by Triton. Not verified on a GPU yet."""

import torch
from torch import Tensor

from quintet.ops.moe import experts, grouped_linear, route, route_grouped
from quintet.platforms.gpu.triton_probe import probing


def _check_route(device: torch.device) -> str | None:
    logits = torch.tensor([[1.0, 2.0], [8.0, 4.0]], device=device)
    weights, ids = _route(logits, 1, True)
    grouped = _route_grouped(logits, torch.zeros(2, device=device), 1, 1, 1, True)[1]
    if ids.tolist() == grouped.tolist() == [[1], [0]] and weights.tolist() == [[1.0], [1.0]]:
        return None
    return f"the largest of {logits.tolist()} were {ids.tolist()} and {grouped.tolist()}, by {weights.tolist()}"


def _check_experts(device: torch.device) -> str | None:
    """Two tokens, each of whom has an expert alone, which doubles or halves."""
    x = torch.tensor([[1.0, 2.0], [4.0, 8.0]], device=device).half()
    eye, ids = torch.eye(2, device=device).half(), torch.tensor([[0], [1]], device=device, dtype=torch.int32)
    down = eye * torch.tensor([2.0, 0.5], device=device).half()[:, None, None]
    got = _experts(x, eye.repeat(2, 2, 1), down, torch.ones(2, 1, device=device), ids, "relu").tolist()
    products = _grouped_linear(x, down, torch.ones(2, device=device, dtype=torch.int32)).tolist()
    if got == [[2.0, 8.0], [8.0, 32.0]] and products == [[2.0, 4.0], [2.0, 4.0]]:
        return None
    return f"experts gave {got}, not x * x doubled or halved, and their products {products}"


@route.provide("triton", probing(_check_route))
def _route(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.routing import chosen

    return chosen(_rows(logits), k, renormalize)


@route_grouped.provide("triton", probing(_check_route))
def _route_grouped(
    logits: Tensor, bias: Tensor, k: int, groups: int, kept: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.routing import chosen_of_groups

    if bias.shape != logits.shape[1:]:
        raise ValueError(f"a bias {tuple(bias.shape)} does not fit logits {tuple(logits.shape)}")
    return chosen_of_groups(_rows(logits), bias.contiguous(), k, groups, kept, renormalize)


@grouped_linear.provide("triton", probing(_check_experts))
def _grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    from quintet.platforms.gpu.kernels.moe import grouped

    if counts.shape != weight.shape[:1] or counts.dtype != torch.int32 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x {tuple(x.shape)}, weights {tuple(weight.shape)} and counts {tuple(counts.shape)} {counts.dtype} "
            "do not fit; counts are int32"
        )
    return grouped(_rows(x), _rows(weight), counts.contiguous())


@experts.provide("triton", probing(_check_experts))
def _experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    from quintet.platforms.gpu.kernels.activation import KINDS
    from quintet.platforms.gpu.kernels.moe import mixed

    if kind not in KINDS:  # torch computes the layer, as the specification says
        plain: Tensor = experts.reference(x, gate_up, down, weights, ids, kind)
        return plain
    num, hidden, inner = down.shape
    if gate_up.shape != (num, 2 * inner, hidden) or x.shape[1] != hidden:
        raise ValueError(f"weights {tuple(gate_up.shape)} and {tuple(down.shape)} do not fit x {tuple(x.shape)}")
    if ids.shape != weights.shape or len(ids) != len(x) or ids.dtype != torch.int32:
        raise ValueError(f"weights {tuple(weights.shape)} and ids {tuple(ids.shape)} {ids.dtype}: {len(x)} tokens")
    return mixed(_rows(x), _rows(gate_up), _rows(down), weights.float().contiguous(), ids.contiguous(), kind)


def _rows(x: Tensor) -> Tensor:
    """With each row's numbers side by side; x itself wherever they are."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
