"""The mixture of experts by Triton. Not verified on a GPU yet."""

import torch
from torch import Tensor

from quintet.interface.weights import Matrix
from quintet.ops.moe import biased_experts, experts, grouped_linear, route, route_grouped, route_limited
from quintet.platforms.gpu.ops.probe import probing


def _check_route(device: torch.device) -> str | None:
    logits = torch.tensor([[1.0, 2.0], [8.0, 4.0]], device=device)
    weights, ids = _route(logits, 1, True)
    given = torch.zeros(2, device=device), 1, 1, 1, True
    grouped, limited = (each(logits, *given)[1] for each in (_route_grouped, _route_limited))
    if ids.tolist() == grouped.tolist() == limited.tolist() == [[1], [0]] and weights.tolist() == [[1.0], [1.0]]:
        return None
    found = ids.tolist(), grouped.tolist(), limited.tolist()
    return f"the largest of {logits.tolist()} were {found}, by {weights.tolist()}"


def check_experts(device: torch.device) -> str | None:
    """Checks two tokens, each with an expert of its own, which doubles or halves."""
    x = torch.tensor([[1.0, 2.0], [4.0, 8.0]], device=device).half()
    eye, ids = torch.eye(2, device=device).half(), torch.tensor([[0], [1]], device=device, dtype=torch.int32)
    down = eye * torch.tensor([2.0, 0.5], device=device).half()[:, None, None]
    got = mixed_experts(x, eye.repeat(2, 2, 1), down, torch.ones(2, 1, device=device), ids, "relu").tolist()
    products = _grouped_linear(x, down, torch.ones(2, device=device, dtype=torch.int32)).tolist()
    if got == [[2.0, 8.0], [8.0, 32.0]] and products == [[2.0, 4.0], [2.0, 4.0]]:
        return None
    return f"experts gave {got}, not x * x doubled or halved, and their products {products}"


def _check_biased(device: torch.device) -> str | None:
    """A token of zeros: what comes out follows from the biases alone, clamped and not."""
    stack, x = torch.zeros(1, 2, 1, device=device).half(), torch.zeros(1, 1, device=device).half()
    ids, one = torch.zeros(1, 1, device=device, dtype=torch.int32), torch.ones(1, 1, device=device)
    both, last = torch.tensor([[-30.0, 8.0]], device=device).half(), torch.tensor([[0.5]], device=device).half()
    stacks = Matrix(stack), Matrix(torch.ones(1, 1, 1, device=device).half())
    got = _biased_experts(x, stacks, (both, last), one, ids, (0.0, 7.0)).tolist()
    return None if got == [[8 * -15 + 0.5]] else f"8 * -30 / 2 + 0.5 came out as {got}"


@route.provide("triton", probing(_check_route))
def _route(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.routing import chosen

    return chosen(_rows(logits), k, renormalize)


@route_grouped.provide("triton", probing(_check_route))
def _route_grouped(
    logits: Tensor, bias: Tensor, k: int, groups: int, kept: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.routing import chosen_of_groups

    return chosen_of_groups(_rows(logits), _matching_bias(bias, logits), k, (groups, kept), renormalize)


@route_limited.provide("triton", probing(_check_route))
def _route_limited(
    logits: Tensor, bias: Tensor, k: int, groups: int, kept: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.routing import chosen_of_groups

    return chosen_of_groups(_rows(logits), _matching_bias(bias, logits), k, (groups, kept), renormalize, softmax=True)


def _matching_bias(bias: Tensor, logits: Tensor) -> Tensor:
    if bias.shape != logits.shape[1:]:
        raise ValueError(f"a bias {tuple(bias.shape)} does not fit logits {tuple(logits.shape)}")
    return bias.contiguous()


@grouped_linear.provide("triton", probing(check_experts))
def _grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return by_groups(x, weight, counts, False)


def by_groups(x: Tensor, weight: Tensor, counts: Tensor, fixed: bool) -> Tensor:
    """The op grouped_linear. `fixed`: by one tile, however many rows there are."""
    from quintet.platforms.gpu.kernels.moe import FIXED, grouped

    if counts.shape != weight.shape[:1] or counts.dtype != torch.int32 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x {tuple(x.shape)}, weights {tuple(weight.shape)} and counts {tuple(counts.shape)} {counts.dtype} "
            "do not fit; counts are int32"
        )
    return grouped(_rows(x), _rows(weight), counts.contiguous(), FIXED if fixed else None)


@experts.provide("triton", probing(check_experts))
def mixed_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    """The provider, which others that take fewer shapes go back to."""
    from quintet.platforms.gpu.kernels.activation import KINDS

    if kind not in KINDS:  # torch computes the layer, as the specification says
        plain: Tensor = experts.reference(x, gate_up, down, weights, ids, kind)
        return plain
    return by_experts(x, (gate_up, down), weights, ids, kind, False)


def by_experts(
    x: Tensor, stacks: tuple[Tensor, Tensor], weights: Tensor, ids: Tensor, kind: str, fixed: bool
) -> Tensor:
    """The op experts, of a kind that the kernels know. `fixed`: by one tile, however many rows an expert has."""
    from quintet.platforms.gpu.kernels.activation import KINDS
    from quintet.platforms.gpu.kernels.moe import FIXED, ExpertGate, mixed

    gate_up, down = stacks
    _check_sizes(x, gate_up, down, weights, ids)
    tile = FIXED if fixed else None
    weights, ids = weights.float().contiguous(), ids.contiguous()
    return mixed(_rows(x), _rows(gate_up), _rows(down), weights, ids, ExpertGate(KINDS[kind]), tile)


@biased_experts.provide("triton", probing(_check_biased))
def _biased_experts(
    x: Tensor,
    stacks: tuple[Matrix, Matrix],
    biases: tuple[Tensor, Tensor],
    weights: Tensor,
    ids: Tensor,
    clamp: tuple[float, float],
) -> Tensor:
    from quintet.platforms.gpu.kernels.moe import ExpertGate, mixed

    if not all(stack.format.plain for stack in stacks):
        raise ValueError("experts are floats on this platform; their stacks came in another form")
    gate_up, down = (stack.values for stack in stacks)
    _check_sizes(x, gate_up, down, weights, ids)
    first, second = (bias.contiguous() for bias in biases)
    if first.shape != gate_up.shape[:2] or second.shape != down.shape[:2]:
        raise ValueError(f"biases {tuple(first.shape)} and {tuple(second.shape)} do not fit {tuple(gate_up.shape)}")
    gate = ExpertGate("clamped", clamp, (first, second))
    return mixed(_rows(x), _rows(gate_up), _rows(down), weights.float().contiguous(), ids.contiguous(), gate)


def _check_sizes(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> None:
    num, hidden, inner = down.shape
    if gate_up.shape != (num, 2 * inner, hidden) or x.shape[1] != hidden:
        raise ValueError(f"weights {tuple(gate_up.shape)} and {tuple(down.shape)} do not fit x {tuple(x.shape)}")
    if ids.shape != weights.shape or len(ids) != len(x) or ids.dtype != torch.int32:
        raise ValueError(f"weights {tuple(weights.shape)} and ids {tuple(ids.shape)} {ids.dtype}: {len(x)} tokens")


def _rows(x: Tensor) -> Tensor:
    """Returns x with contiguous rows; x itself if they are contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
