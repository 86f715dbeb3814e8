"""Mixture of experts by quintet._cpu: a token's result does not depend on the other tokens of its experts.

Weights of experts are packed as a product's are, one expert after another. What pads the outputs to whole blocks counts
as outputs: they are 0. Weights that were not packed have three dimensions, and go to torch.
"""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quintet.interface.weights import Matrix, Weight
from quintet.ops.activation import activate, gated
from quintet.ops.linear import linear as product
from quintet.ops.moe import (
    HASHED_FEATURES,
    count_experts,
    experts,
    grouped_linear,
    local_experts,
    route,
    route_grouped,
    route_limited,
    route_sparse,
    run_by_expert,
    ungated_experts,
)
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops import linear
from quintet.platforms.cpu.ops.elementwise import gate_arguments, is_missing
from quintet.platforms.cpu.ops.extension import KINDS, extension, indices, kind_of, missing


def can_pack(weight: Weight) -> bool:
    """True if pack() takes it, and with it the other stack of its layer: gate and up, or down."""
    return _can_serve() and not any(size % linear.PAIRS[weight.dtype] for size in weight.shape[1:])


def pack(weight: Weight, tensors: Mapping[str, Tensor]) -> Tensor:
    """A stack from the checkpoint's tensors, as pack_experts() lays it; joined beforehand only if blocks ask for it."""
    if weight.shape[1] % extension().LINEAR_COLUMNS:
        return pack_experts(weight.local(tensors).to(weight.dtype))
    packed = linear.pack(*(piece.to(weight.dtype) for piece in weight.local_slices(tensors)))
    return packed.view(weight.stack, -1, *packed.shape[1:])


def packed_bytes(weight: Weight) -> int:
    """Returns the bytes of pack()'s result."""
    return weight.stack * linear.packed_bytes(weight.shape[1:], weight.dtype)


@functools.cache
def _can_serve() -> bool:
    """True if experts run on our kernels, so that their weights should be packed."""
    return probe() is None


def pack_experts(weight: Tensor) -> Tensor:
    """[E, N, K], memory map or not -> [E, blocks, depth, lanes]: linear.pack() of each.

    ValueError where a pad would hide how many inputs there are, which experts() must know: bfloat16 lies in pairs.
    """
    if weight.dim() != 3 or 0 in weight.shape:
        raise ValueError(f"weights of experts are [experts, outputs, inputs], not {tuple(weight.shape)}")
    if weight.shape[2] % linear.PAIRS.get(weight.dtype, 1):
        raise ValueError(f"{weight.dtype} is packed in pairs, and {weight.shape[2]} inputs are odd")
    if weight.shape[1] % extension().LINEAR_COLUMNS == 0:
        packed = linear.pack(*weight)
        return packed.view(len(weight), -1, *packed.shape[1:])
    return torch.stack([linear.pack(each) for each in weight])


def unpack_experts(packed: Tensor, outputs: int) -> Tensor:
    """-> [E, outputs, K], as it was before pack_experts()."""
    inputs = packed.shape[2] * linear.PAIRS[packed.dtype]
    return torch.stack([linear.unpack(each, outputs, inputs) for each in packed])


def probe() -> str | None:
    """Checks two tokens, each with an expert of its own, which doubles or halves."""
    if reason := missing("experts"):
        return reason
    for dtype in KINDS:
        x, scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]], dtype=dtype), torch.tensor([2.0, 0.5], dtype=dtype)
        weights, ids = _route(x, 1, True)
        grouped = _route_grouped(x, torch.zeros(2), 1, 1, 1, True)
        if ids.tolist() != [[1], [1]] or weights.tolist() != [[1.0], [1.0]] or grouped[1].tolist() != ids.tolist():
            return f"the larger of {x.tolist()} in {dtype} was {ids.tolist()} by {weights.tolist()}"
        down = torch.eye(2, dtype=dtype) * scales[:, None, None]
        gate_up = pack_experts(torch.eye(2, dtype=dtype).repeat(2, 1, 1).repeat(1, 2, 1))
        products = _grouped_linear(x, pack_experts(down), torch.ones(2, dtype=torch.int32))[:, :2]
        got = _experts(x, gate_up, pack_experts(down), weights, torch.tensor([[0], [1]], dtype=torch.int32), "relu")
        want = torch.tensor([[2.0, 8.0], [8.0, 32.0]], dtype=dtype)  # x * x, doubled or halved
        if not torch.equal(got, want) or not torch.equal(products, x * scales[:, None]):
            return f"experts in {dtype} gave {got.tolist()}, not {want.tolist()}"
    return None


@route.provide("native", probe)
def _route(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    return _route_by(logits, None, (k, 1, 1, renormalize), extension().route)


@route_grouped.provide("native", probe)
def _route_grouped(
    logits: Tensor, bias: Tensor, k: int, groups: int, kept: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    if bias.shape != logits.shape[1:]:
        raise ValueError(f"a bias {tuple(bias.shape)} does not fit logits {tuple(logits.shape)}")
    return _route_by(logits, bias.float().contiguous(), (k, groups, kept, renormalize), extension().route)


def probe_limited() -> str | None:
    """Two tokens: the bias has the second chosen, which is the less likely."""
    if reason := missing("route_limited"):
        return reason
    weights, ids = _route_limited(torch.zeros(2, 2), torch.tensor([0.0, 1.0]), 1, 1, 1, False)
    good = weights.tolist() == [[0.5], [0.5]] and ids.tolist() == [[1], [1]]
    return None if good else f"the second of two was {ids.tolist()} by {weights.tolist()}"


@route_limited.provide("native", probe_limited)
def _route_limited(
    logits: Tensor, bias: Tensor, k: int, groups: int, kept: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    if bias.shape != logits.shape[1:]:
        raise ValueError(f"a bias {tuple(bias.shape)} does not fit logits {tuple(logits.shape)}")
    return _route_by(logits, bias.float().contiguous(), (k, groups, kept, renormalize), extension().route_limited)


def probe_sparse() -> str | None:
    """Each of 2, 2 and 0 by those that are left and within a half of it."""
    if reason := missing("route_sparse"):
        return reason
    weights, ids = _route_sparse(torch.tensor([[2.0, 2.0, 0.0]]), 3, 0.5)
    good = weights.tolist() == [[0.5, 1.0, 1.0]] and ids.tolist() == [[0, 1, 2]]
    return None if good else f"2, 2 and 0 were chosen as {ids.tolist()} by {weights.tolist()}"


@route_sparse.provide("native", probe_sparse)
def _route_sparse(logits: Tensor, k: int, margin: float) -> tuple[Tensor, Tensor]:
    tokens, num = logits.shape
    logits = _rows(logits)
    weights, ids = empty((tokens, k), torch.float32), empty((tokens, k), torch.int32)
    extension().route_sparse(
        kind_of(logits.dtype), weights.data_ptr(), ids.data_ptr(), logits.data_ptr(), tokens, num, logits.stride(0), k,
        margin,
    )  # fmt: skip
    return weights, ids


def probe_local() -> str | None:
    """Checks two experts, of which this rank has the second, and an id that is no expert's."""
    if reason := missing("local_experts"):
        return reason
    ids, loads = torch.tensor([[0, 1], [1, 7]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    got = _local_experts(torch.ones(2, 1), ids, torch.tensor([[-1], [0]], dtype=torch.int32)).tolist()
    counted = _count_experts(ids, loads).tolist()
    return None if (got, counted) == ([[-1, 0], [0, -1]], [1, 2]) else f"{ids.tolist()} were found at {got}: {counted}"


@local_experts.provide("native", probe_local)
def _local_experts(x: Tensor, ids: Tensor, places: Tensor) -> Tensor:
    (tokens, k), x = ids.shape, _rows(x)
    if len(x) != tokens or places.dtype != torch.int32 or not places.is_contiguous():
        raise ValueError(f"ids {tuple(ids.shape)} and places {tuple(places.shape)} {places.dtype}: {len(x)} tokens")
    out, ids = empty((tokens, k), torch.int32), ids.contiguous()
    extension().local_experts(
        kind_of(x.dtype), out.data_ptr(), indices(ids), x.data_ptr(), places.data_ptr(), tokens, k, *places.shape,
        x.stride(0), min(HASHED_FEATURES, x.shape[1]),
    )  # fmt: skip
    return out


@count_experts.provide("native", probe_local)
def _count_experts(ids: Tensor, loads: Tensor) -> Tensor:
    if loads.dtype != torch.int32 or not loads.is_contiguous():
        raise ValueError(f"loads are int32, side by side, not {loads.dtype} {tuple(loads.shape)}")
    ids = ids.contiguous()
    extension().count_experts(loads.data_ptr(), indices(ids), ids.numel(), len(loads))
    return loads


def _route_by(
    logits: Tensor, bias: Tensor | None, how: tuple[int, int, int, bool], choose: Callable[..., None]
) -> tuple[Tensor, Tensor]:
    """`how`: k, groups, those that are kept, and whether weights are renormalised."""
    tokens, num = logits.shape
    logits = _rows(logits)
    weights, ids = empty((tokens, how[0]), torch.float32), empty((tokens, how[0]), torch.int32)
    choose(
        kind_of(logits.dtype), weights.data_ptr(), ids.data_ptr(), logits.data_ptr(),
        0 if bias is None else bias.data_ptr(), tokens, num, logits.stride(0), *how,
    )  # fmt: skip
    return weights, ids


@grouped_linear.provide("native", probe)
def _grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """A packed weight's outputs are whole blocks: those past the plain weight's are 0."""
    if weight.dim() == 3:
        plain: Tensor = grouped_linear.reference(x, weight, counts)
        return plain
    rows, inputs = x.shape
    blocks = _blocks(x, weight, inputs)
    if counts.shape != weight.shape[:1]:
        raise ValueError(f"{len(weight)} experts do not have counts {tuple(counts.shape)}")
    x = _rows(x)
    outputs = blocks * extension().LINEAR_COLUMNS
    out = empty((rows, outputs), x.dtype)
    extension().grouped_linear(
        kind_of(x.dtype), out.data_ptr(), x.data_ptr(), x.stride(0), weight.data_ptr(), indices(counts), rows,
        len(weight), inputs, outputs,
    )  # fmt: skip
    return out


@experts.provide("native", probe)
def _experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    if gate_up.dim() == down.dim() == 3:
        plain: Tensor = experts.providers["torch"](x, gate_up, down, weights, ids, kind)
        return plain
    (tokens, hidden), k, dtype = x.shape, ids.shape[1], x.dtype
    inner = inner_of(x, gate_up, down)
    if ids.shape != weights.shape or len(ids) != tokens or weights.dtype != torch.float32:
        raise ValueError(f"weights {tuple(weights.shape)} {weights.dtype} and ids {tuple(ids.shape)}: {tokens} tokens")
    if is_missing(kind):

        def serve(rows: Tensor, counts: Tensor) -> Tensor:
            both = _grouped_linear(rows, gate_up, counts)[:, : 2 * inner]
            return _grouped_linear(gated.reference(both, kind), down, counts)[:, :hidden]

        return run_by_expert(x, weights, ids, len(down), serve)
    x, weights, ids = _rows(x), weights.contiguous(), ids.contiguous()
    out = empty((tokens, hidden), dtype)
    first, second = (empty((tokens * k, max(hidden, width)), dtype) for width in (inner, 2 * inner))
    numbers = empty((tokens * k + 2 * len(down),), torch.int32)
    extension().experts(
        kind_of(dtype), out.data_ptr(), x.data_ptr(), x.stride(0), gate_up.data_ptr(), down.data_ptr(),
        weights.data_ptr(), indices(ids), first.data_ptr(), second.data_ptr(), numbers.data_ptr(), tokens, len(down), k,
        hidden, inner, *gate_arguments(kind),
    )  # fmt: skip
    return out


def inner_of(x: Tensor, gate_up: Tensor, down: Tensor) -> int:
    """I, of packed [E, 2 I, D] and [E, D, I]; ValueError where they do not fit each other or x [T, D]."""
    columns, hidden = extension().LINEAR_COLUMNS, x.shape[1]
    inner = down.shape[2] * linear.PAIRS.get(down.dtype, 1) if down.dim() == 4 else 0
    there = _blocks(x, gate_up, hidden), _blocks(x, down, inner)
    if len(gate_up) != len(down) or there != (-(-2 * inner // columns), -(-hidden // columns)):
        raise ValueError(f"packed weights {tuple(gate_up.shape)} and {tuple(down.shape)} do not fit x {tuple(x.shape)}")
    return inner


def _blocks(x: Tensor, weight: Tensor, inputs: int) -> int:
    """Returns the blocks of each expert's packed weight; ValueError if it is not packed, or has other inputs."""
    pair = linear.PAIRS.get(x.dtype, 1)
    lanes = extension().LINEAR_COLUMNS * pair
    if (
        weight.dim() != 4
        or weight.dtype != x.dtype
        or weight.shape[2:] != (-(-inputs // pair), lanes)
        or not weight.is_contiguous()
    ):
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and {inputs} inputs do not fit packed weights "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
    return weight.shape[1]


def _rows(x: Tensor) -> Tensor:
    """x itself wherever its rows are contiguous and apart."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def probe_ungated() -> str | None:
    """Checks the packed products, and then one token's square, doubled."""
    if reason := probe():
        return reason
    x, up = torch.tensor([[3.0, -1.0]]), torch.eye(2)[None]
    weights, ids = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    got = _ungated_experts(x, pack_experts(up), pack_experts(up * 2), weights, ids, "relu2")
    return None if got.tolist() == [[18.0, 0.0]] else f"an expert of {x.tolist()} gave {got.tolist()}, not [[18, 0]]"


@ungated_experts.provide("native", probe_ungated)
def _ungated_experts(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    if up.dim() == down.dim() == 3:
        return _ungated_torch(x, up, down, weights, ids, kind)
    multiply, act, hidden = grouped_linear.providers["native"], activate.providers["torch"], x.shape[1]
    inner = down.shape[2] * linear.PAIRS.get(down.dtype, 1)

    def serve(rows: Tensor, counts: Tensor) -> Tensor:
        out: Tensor = multiply(act(multiply(rows, up, counts)[:, :inner], kind), down, counts)
        return out[:, :hidden]

    return run_by_expert(x, weights, ids, len(down), serve)


@ungated_experts.provide("torch")
def _ungated_torch(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    """Expert by expert, each on the tokens that it serves."""
    multiply, act = product.providers["torch"], activate.providers["torch"]
    each = x.new_zeros(*ids.shape, x.shape[1])  # [T, k, D]
    for expert, (first, second) in enumerate(zip(up, down, strict=True)):
        served = (ids == expert).nonzero(as_tuple=True)  # tokens, and the places that the expert has among theirs
        if len(served[0]):
            inner = act(multiply(x[served[0]], Matrix(first), None, (len(first),)), kind)
            each[served] = multiply(inner, Matrix(second), None, (len(second),))
    return (each.float() * weights[..., None]).sum(1).to(x.dtype)
