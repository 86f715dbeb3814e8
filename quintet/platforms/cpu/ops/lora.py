"""Adapters (LoRA) by quintet._cpu: a token's result does not depend on the other tokens."""

import functools

import torch
from torch import Tensor

from quintet.interface.weights import Matrix
from quintet.ops.lora import adapter_rows, add_lora, scale_adapted
from quintet.ops.moe import (
    ExpertGate,
    ExpertProducts,
    ExpertsLoRA,
    biased_experts,
    expert_matrix,
    experts,
    grouped_linear,
    lora_experts,
    quantized_experts,
    run_lora_experts,
)
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops import quantized_moe
from quintet.platforms.cpu.ops.elementwise import gate_arguments, is_missing
from quintet.platforms.cpu.ops.extension import dense_operands, extension, indices, kind_of, missing
from quintet.platforms.cpu.ops.moe import pack_experts

Columns = tuple[tuple[int, int], ...]
Stacks = tuple[Matrix, Matrix]


def probe() -> str | None:
    """Checks three tokens of two inputs: one without an adapter, and one of each of two adapters of rank 1."""
    if reason := missing("add_lora"):
        return reason
    y, x = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    lora_a, lora_b = torch.tensor([[[[1.0, 1.0]]], [[[1.0, 2.0]]]]), torch.tensor([[[2.0]], [[4.0]]])
    ranks, slots = torch.ones(2, 1, dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    got = _add_lora(y, x, lora_a, lora_b, ranks, slots, 0, ((0, 1),)).tolist()
    return None if got == [[21.0], [1.0], [7.0]] else f"two adapters gave {got}, not [[21], [1], [7]]"


@add_lora.provide("native", probe)
def _add_lora(  # noqa: PLR0913  # as the specification
    y: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    first: int,
    columns: Columns,
) -> Tensor:
    """ValueError for shapes, types or strides that do not fit.

    y is overwritten; if the numbers of its rows are not contiguous, the result is a copy. A recorded call reads ranks
    and slots when it is replayed.
    """
    (tokens, outputs), inputs = y.shape, x.shape[1]
    stretches, width = _stretches(columns, lora_a.shape[1])
    _check_adapters(x, lora_a, lora_b, outputs)
    if len(x) != tokens or y.dtype != x.dtype or width != outputs:
        raise ValueError(
            f"y {tuple(y.shape)} {y.dtype} does not fit x {tuple(x.shape)} {x.dtype} and columns {columns}; "
            "y has x's rows and type, and the columns' width"
        )
    adapters, parts, rank, _ = lora_a.shape
    if slots.shape != (tokens,) or ranks.dtype != torch.int32 or ranks.stride(1) != 1 or len(ranks) != adapters:
        raise ValueError(
            f"slots {tuple(slots.shape)} and ranks {tuple(ranks.shape)} {ranks.dtype} do not fit {tokens} tokens and "
            f"{adapters} adapters; both are int32, and each row of ranks is contiguous"
        )
    if not 0 <= first <= ranks.shape[1] - parts:
        raise ValueError(f"ranks {tuple(ranks.shape)} have no columns {first} to {first + parts - 1} for {parts} parts")
    (x, _), (y, _) = dense_operands(x, None, inputs), dense_operands(y, None, outputs)
    extension().add_lora(
        kind_of(x.dtype), y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), lora_a.data_ptr(), lora_b.data_ptr(),
        ranks.data_ptr() + first * ranks.element_size(), ranks.stride(0), indices(slots), stretches.data_ptr(),
        len(columns), tokens, inputs, outputs, adapters, parts, rank,
    )  # fmt: skip
    return y


@functools.cache
def _stretches(columns: Columns, parts: int) -> tuple[Tensor, int]:
    """Returns columns as int32 [stretches, 2], and their width. They stay in memory: recorded calls read them there."""
    if not columns or any(not 0 <= part < parts or width < 0 for part, width in columns):
        raise ValueError(f"columns {columns} do not name parts 0 to {parts - 1}, with widths of 0 or more")
    return torch.tensor(columns, dtype=torch.int32), sum(width for _, width in columns)


def _check_adapters(x: Tensor, lora_a: Tensor, lora_b: Tensor, outputs: int) -> None:
    adapters, _, rank, inputs = lora_a.shape
    if (
        x.shape[1] != inputs
        or lora_b.shape != (adapters, rank, outputs)
        or not x.dtype == lora_a.dtype == lora_b.dtype
        or not (lora_a.is_contiguous() and lora_b.is_contiguous())
    ):
        raise ValueError(
            f"lora_a {tuple(lora_a.shape)} {lora_a.dtype} and lora_b {tuple(lora_b.shape)} {lora_b.dtype} do not fit "
            f"x {tuple(x.shape)} {x.dtype} and {outputs} outputs; they are contiguous [S, P, R, K] and [S, R, N] in "
            "x's type"
        )


def probe_scale() -> str | None:
    """Checks two tokens, one of which has an adapter."""
    if reason := missing("scale_adapted"):
        return reason
    y, slots = torch.tensor([[3.0], [3.0]]), torch.tensor([0, 2], dtype=torch.int32)
    got = _scale_adapted(y, torch.tensor([[9.0], [2.0]]), torch.tensor([[9.0], [1.0]]), slots).tolist()
    return None if got == [[3.0], [7.0]] else f"two tokens gave {got}, not [[3], [7]]"


@scale_adapted.provide("native", probe_scale)
def _scale_adapted(y: Tensor, gains: Tensor, offsets: Tensor, slots: Tensor) -> Tensor:
    """ValueError for shapes or types that do not fit. y is overwritten, as add_lora() does; slots are read anew when a
    recorded call is replayed."""
    tokens, outputs = y.shape
    for what, each in (("gains", gains), ("offsets", offsets)):
        if each.shape != (len(gains), outputs) or each.dtype != torch.float32 or not each.is_contiguous():
            raise ValueError(
                f"{what} {tuple(each.shape)} {each.dtype} do not fit y {tuple(y.shape)}; they are contiguous float32 "
                "[S, N]"
            )
    if slots.shape != (tokens,):
        raise ValueError(f"slots {tuple(slots.shape)} do not fit {tokens} tokens")
    y, _ = dense_operands(y, None, outputs)
    extension().scale_adapted(
        kind_of(y.dtype), y.data_ptr(), y.stride(0), gains.data_ptr(), offsets.data_ptr(), indices(slots), tokens,
        outputs, len(gains),
    )  # fmt: skip
    return y


def probe_rows() -> str | None:
    """Checks three tokens: of the second adapter, of none, and of an id that a table has not."""
    if reason := missing("adapter_rows"):
        return reason
    ids, slots = (torch.tensor(each, dtype=torch.int32) for each in ([5, 5, 9], [2, 0, 1]))
    got = _adapter_rows(ids, slots, 2, 3, 4).tolist()
    return None if got == [4, -1, -1] else f"three tokens gave rows {got}, not [4, -1, -1]"


@adapter_rows.provide("native", probe_rows)
def _adapter_rows(ids: Tensor, slots: Tensor, adapters: int, rows: int, first: int) -> Tensor:
    """ValueError where ids and slots do not fit; both are read anew when a recorded call is replayed."""
    if ids.shape != slots.shape or ids.dim() != 1:
        raise ValueError(f"ids {tuple(ids.shape)} and slots {tuple(slots.shape)} do not fit; both are [T]")
    out = empty((len(ids),), torch.int32)
    extension().adapter_rows(out.data_ptr(), indices(ids), indices(slots), len(ids), adapters, rows, first)
    return out


@functools.cache
def probe_experts() -> str | None:
    """Checks two tokens of one expert: without an adapter, and with one that doubles what comes in and goes out."""
    if reason := missing("EXPERT_LORA") or probe() or quantized_moe.probe():
        return reason
    one = torch.ones(1, 1, 1)
    stacks = Matrix(pack_experts(torch.ones(1, 2, 1))), Matrix(pack_experts(one))
    ranks, slots = torch.ones(1, 3, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    lora = ExpertsLoRA(torch.ones(1, 2, 1, 1), torch.ones(1, 1, 2), one[None], one, ranks, slots, ((0, 1), (1, 1)))
    ids, x = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    got = _lora_experts(x, stacks, ExpertGate("relu"), torch.ones(2, 1), ids, lora).tolist()
    return None if got == [[1.0], [8.0]] else f"experts with an adapter gave {got}, not [[1], [8]]"


@lora_experts.provide("native", probe_experts)
def _lora_experts(
    x: Tensor, stacks: Stacks, gate: ExpertGate, weights: Tensor, ids: Tensor, lora: ExpertsLoRA
) -> Tensor:
    """Stacks that are not packed, or an activation that the extension lacks, go product by product. A recorded call
    reads ranks and slots when it is replayed. ValueError for shapes, types or strides that do not fit."""
    plain = [stack.format.plain for stack in stacks]
    packed = plain[0] == plain[1] and all(stack.values.dim() > 3 for stack in stacks)
    if not packed or (gate.biases is None and is_missing(gate.kind)):
        return _by_products(x, stacks, gate, weights, ids, lora)
    if gate.biases is None:
        between: tuple[float, ...] = gate_arguments(gate.kind)
    else:
        between = quantized_moe.biased_gate(x, gate.biases, gate.clamp)
    inner = sum(width for _, width in lora.columns) // 2
    return quantized_moe.run_native(x, stacks, weights, ids, between, _describe(x, inner, lora, len(stacks[0].values)))


def _describe(x: Tensor, inner: int, lora: ExpertsLoRA, num: int) -> list[int]:
    """Describes adapters as csrc/cpu/bindings/bind_checks.h reads them."""
    tokens, hidden = x.shape
    adapters, parts, rank, _ = lora.gate_up_a.shape
    wanted = {
        "gate_up_a": (adapters, parts, rank, hidden),
        "gate_up_b": (adapters, rank, 2 * inner),
        "down_a": (adapters, 1, rank, inner),
        "down_b": (adapters, rank, hidden),
        "ranks": (adapters, parts + 1),
    }
    for name, shape in wanted.items():
        tensor = getattr(lora, name)
        dtype = torch.int32 if name == "ranks" else x.dtype
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or adapters % num:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} {tensor.dtype} does not fit {num} experts and x {tuple(x.shape)}; it is "
                f"contiguous {shape}, {dtype}"
            )
    if lora.slots.shape != (tokens,):
        raise ValueError(f"slots {tuple(lora.slots.shape)} do not fit {tokens} tokens")
    stretches = _expert_stretches(lora.columns, parts, hidden)
    tensors = (lora.ranks, stretches, lora.gate_up_a, lora.gate_up_b, lora.down_a, lora.down_b)
    sizes = (adapters // num, parts, rank, len(lora.columns))
    return [indices(lora.slots), *(each.data_ptr() for each in tensors), *sizes]


@functools.cache
def _expert_stretches(columns: tuple[tuple[int, int], ...], parts: int, hidden: int) -> Tensor:
    """Returns columns of gate_up and of down; they stay in memory: recorded calls read them there."""
    if not columns or any(not 0 <= part < parts or width < 0 for part, width in columns):
        raise ValueError(f"columns {columns} do not name parts 0 to {parts - 1}, with widths of 0 or more")
    return torch.tensor((*columns, (0, hidden)), dtype=torch.int32)


def _by_products(
    x: Tensor, stacks: Stacks, gate: ExpertGate, weights: Tensor, ids: Tensor, lora: ExpertsLoRA
) -> Tensor:
    """Each product by itself; rows without an adapter have what the mixture gives without adapters."""
    outputs = sum(width for _, width in lora.columns), x.shape[1]

    def multiply(rows: Tensor, stack: int, counts: Tensor) -> Tensor:
        matrix = stacks[stack]
        if matrix.format.plain and matrix.values.dim() > 3:
            product: Tensor = grouped_linear.providers["native"](rows, matrix.values, counts)
            return product[:, : outputs[stack]]
        out, first = rows.new_zeros(len(rows), outputs[stack]), 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                own, weight = rows[first : first + count], expert_matrix(matrix, expert)
                out[first : first + count] = quantized_moe.product_of(own, weight, outputs[stack])
            first += count
        return out

    products = ExpertProducts(len(stacks[0].values), multiply, add_lora.providers["native"])
    found = run_lora_experts(x, gate, weights, ids, lora, products)
    return torch.where((lora.slots > 0)[:, None], found, _base(x, stacks, gate, weights, ids))


def _base(x: Tensor, stacks: Stacks, gate: ExpertGate, weights: Tensor, ids: Tensor) -> Tensor:
    """The mixture without adapters."""
    base: Tensor
    if gate.biases is not None:
        base = biased_experts.providers["native"](x, stacks, gate.biases, weights, ids, gate.clamp)
    elif stacks[0].format.plain:
        plain = (stack.values for stack in stacks)
        base = experts.providers["native"](x, *plain, weights, ids, gate.kind)
    else:
        base = quantized_experts.providers["native"](x, *stacks, weights, ids, gate.kind)
    return base
