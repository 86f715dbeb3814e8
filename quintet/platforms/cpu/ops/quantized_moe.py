"""The mixture of experts with quantized weights by quintet._cpu: each expert's product is that of a matrix by itself.

Stacks lie as matrices do, one expert after another, each padded to whole blocks of outputs. What was not packed has its
canonical shape, and goes to the specification.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quintet.interface.weights import Matrix, Weight, WeightFormat
from quintet.ops.activation import gated
from quintet.ops.linear import linear
from quintet.ops.moe import biased_experts, expert_matrix, quantized_experts, run_by_expert
from quintet.ops.quantize import attributes, concat_outputs, stack_attributes
from quintet.platforms.cpu import gguf_weights as blocks
from quintet.platforms.cpu import weight_layout as tiles
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops import float8, quantized
from quintet.platforms.cpu.ops import moe as native_moe
from quintet.platforms.cpu.ops.elementwise import gate_arguments, is_missing
from quintet.platforms.cpu.ops.extension import extension, indices, kind_of, missing
from quintet.platforms.cpu.weight_layout import COLUMNS


def packer_of(fmt: WeightFormat) -> Any:
    """Returns the module that packs a canonical matrix of the format, by its pack(), can_pack() and packed_bytes()."""
    return float8 if fmt.kind == "fp8" else tiles


def can_pack_format(fmt: WeightFormat, inputs: int) -> bool:
    """True if a quantized matrix is packed: for products that are there, and serve it."""
    serves = float8 if fmt.kind == "fp8" else quantized
    return serves.probe() is None and bool(packer_of(fmt).can_pack(fmt, inputs))


def can_pack(weight: Weight) -> bool:
    """True if a stack is packed as our products read it."""
    whole = weight.shape[2] % tiles.QUAD == 0  # so that packed stacks say how many inputs they have
    return probe() is None and whole and can_pack_format(weight.format, weight.shape[2])


def pack(weight: Weight, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A stack from the checkpoint's tensors, by the names that its layer has for them. ValueError names the first."""
    try:
        found = _pack_stack(weight, parts) if can_pack(weight) else attributes(_canonical(weight, parts))
    except ValueError as error:
        done = "quantized" if weight.reader is None else "packed"
        raise ValueError(f"{weight.slices[0].source} cannot be {done}: {error}") from None
    count = weight.stack
    return stack_attributes(weight.name, {name: each.view(count, -1, *each.shape[1:]) for name, each in found.items()})


def stack_packed_bytes(weight: Weight) -> int:
    """Returns the bytes of placed()'s results."""
    return weight.stack * matrix_packed_bytes(weight) if can_pack(weight) else weight.nbytes


def quantizes_floats(weight: Weight) -> bool:
    """True if it holds floats that quantized.pack() rounds to whole numbers; other packed weights go through laid()."""
    return weight.reader is None and weight.format.dtype is None and not weight.format.codebook


def matrix_packed_bytes(weight: Weight) -> int:
    """Returns the bytes of one of its matrices, once packed."""
    shape, fmt = weight.shape[-2:], weight.format
    if quantizes_floats(weight):
        return tiles.packed_bytes(shape, fmt, powers=False)
    found: int = packer_of(fmt).packed_bytes(shape, fmt)
    return found


def _pack_stack(weight: Weight, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    spare = -weight.shape[1] % COLUMNS
    if quantizes_floats(weight):
        wide = functional.pad(weight.local(parts), (0, 0, 0, spare))
        return quantized.pack(wide.reshape(-1, wide.shape[2]), weight.format)
    if blocks.can_pack(weight):
        return blocks.pack(weight, parts)
    found: dict[str, Tensor] = packer_of(weight.format).pack(_canonical(weight, parts, spare))
    return found


def _canonical(weight: Weight, parts: Mapping[str, Tensor], spare: int = 0) -> Matrix:
    """All experts, one under the other, with so many outputs of zeros after each."""
    pieces = blocks.canonicals(weight, parts)
    each = len(pieces) // weight.stack
    whole = (concat_outputs(pieces[first : first + each]) for first in range(0, len(pieces), each))
    return concat_outputs([_pad_outputs(matrix, spare) for matrix in whole])


def _pad_outputs(matrix: Matrix, spare: int) -> Matrix:
    if not spare:
        return matrix
    values, scales, zeros, order, fmt, mins = matrix
    scales, zeros, mins = (None if x is None else _append_zero_rows(x, spare) for x in (scales, zeros, mins))
    return Matrix(_append_zero_rows(values, spare), scales, zeros, order, fmt, mins)


def _append_zero_rows(x: Tensor, spare: int) -> Tensor:
    """Returns the matrix with so many rows of zeros."""
    return torch.cat([x.view(torch.uint8), x.new_zeros(spare, x.shape[1]).view(torch.uint8)]).view(x.dtype)


@functools.cache
def probe() -> str | None:
    """Checks two tokens, each with an expert of its own: one that keeps the numbers, and one that doubles them."""
    if reason := missing("quantized_experts"):
        return reason
    fmt, x = WeightFormat("fp8", 8, 16, dtype=torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    eye, stacks = torch.eye(2), []
    for experts in ([eye.repeat(2, 1)] * 2, [eye, 2 * eye]):
        rows = [Matrix(each.to(fmt.dtype), torch.ones(len(each), 1), format=fmt) for each in experts]
        laid = float8.pack(concat_outputs([_pad_outputs(each, -len(each.values) % COLUMNS) for each in rows]))
        weight, scales = (laid[name].view(2, 1, *laid[name].shape[1:]) for name in ("weight", "scales"))
        stacks.append(Matrix(weight, scales, format=fmt))
    ids = torch.tensor([[0], [1]], dtype=torch.int32)
    got = _experts(x, stacks[0], stacks[1], torch.ones(2, 1), ids, "relu").tolist()
    want = [[1.0, 4.0], [32.0, 128.0]]  # x * x, once or twice
    return None if got == want else f"quantized experts gave {got}, not {want}"


@quantized_experts.provide("native", probe)
def _experts(x: Tensor, gate_up: Matrix, down: Matrix, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    num, inner = len(down.values), _inputs(down)
    if gate_up.values.dim() == 3 or down.values.dim() == 3:
        return run_by_expert(x, weights, ids, num, _one_by_one(gate_up, down, inner, kind))
    if is_missing(kind):
        return run_by_expert(x, weights, ids, num, _all_experts(gate_up, down, inner, kind))
    return run_native(x, (gate_up, down), weights, ids, gate_arguments(kind))


def probe_biased() -> str | None:
    return probe() or missing("EXPERT_BIASES")


@biased_experts.provide("native", probe_biased)
def _biased_experts(
    x: Tensor,
    stacks: tuple[Matrix, Matrix],
    biases: tuple[Tensor, Tensor],
    weights: Tensor,
    ids: Tensor,
    clamp: tuple[float, float],
) -> Tensor:
    """Stacks are both packed, or go to torch."""
    plain = [stack.format.plain for stack in stacks]
    if any(stack.values.dim() == 3 for stack in stacks) or plain[0] != plain[1]:
        other: Tensor = biased_experts.providers["torch"](x, stacks, biases, weights, ids, clamp)
        return other
    return run_native(x, stacks, weights, ids, biased_gate(x, biases, clamp))


def biased_gate(x: Tensor, biases: tuple[Tensor, Tensor], clamp: tuple[float, float]) -> tuple[float, ...]:
    """Returns run_native()'s gate of experts with biases."""
    if any(bias.dtype != x.dtype or not bias.is_contiguous() for bias in biases):
        raise ValueError(f"biases are contiguous and of the type of x, {x.dtype}")
    return (0, *(bias.data_ptr() for bias in biases), *clamp)


def run_native(
    x: Tensor,
    stacks: tuple[Matrix, Matrix],
    weights: Tensor,
    ids: Tensor,
    gate: tuple[float, ...],
    lora: Sequence[int] = (),
) -> Tensor:
    """`gate`: the number of an activation, or biases and their clamp behind it. `lora`: see ops/lora.py."""
    (tokens, hidden), k, num = x.shape, ids.shape[1], len(stacks[1].values)
    if ids.shape != weights.shape or len(ids) != tokens or weights.dtype != torch.float32:
        raise ValueError(f"weights {tuple(weights.shape)} {weights.dtype} and ids {tuple(ids.shape)}: {tokens} tokens")
    plain = stacks[0].format.plain
    inner = native_moe.inner_of(x, *(each.values for each in stacks)) if plain else _inputs(stacks[1])
    x = x if x.stride(1) == 1 and x.stride(0) >= hidden else x.contiguous()
    weights, ids = weights.contiguous(), ids.contiguous()
    out = empty((tokens, hidden), x.dtype)
    first, second = (empty((tokens * k, max(hidden, width)), x.dtype) for width in (inner, 2 * inner))
    numbers = empty((tokens * k * (3 if lora else 1) + 2 * num,), torch.int32)
    serve = extension().experts if plain else extension().quantized_experts
    sizes = zip(stacks, (hidden, inner), strict=True)
    held = [each.values.data_ptr() if plain else _describe(each, width) for each, width in sizes]
    serve(
        kind_of(x.dtype), out.data_ptr(), x.data_ptr(), x.stride(0), *held, weights.data_ptr(), indices(ids),
        first.data_ptr(), second.data_ptr(), numbers.data_ptr(), tokens, num, k, hidden, inner, *gate,
        **({"lora": lora} if lora else {}),
    )  # fmt: skip
    return out


def _inputs(stack: Matrix) -> int:
    """Returns the inputs of its matrices: whole words of them where they are packed, see packs()."""
    if stack.values.dim() == 3:
        return stack.values.shape[2] * 8 // stack.format.bits
    return stack.values.shape[2] * (2 if stack.format.kind == "fp8" else tiles.QUAD)


def _one_by_one(gate_up: Matrix, down: Matrix, inner: int, kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function for a stack that is not packed: runs each expert on its own rows."""
    hidden = _inputs(gate_up)

    def serve(rows: Tensor, counts: Tensor) -> Tensor:
        out, first = rows.new_zeros(rows.shape), 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                both = product_of(rows[first : first + count], expert_matrix(gate_up, expert), 2 * inner)
                served = product_of(gated.reference(both, kind), expert_matrix(down, expert), hidden)
                out[first : first + count] = served
            first += count
        return out

    return serve


def _describe(stack: Matrix, inputs: int) -> list[int]:
    """Describes a stack as csrc/cpu/bindings/bind_moe_quantized.cpp reads it."""
    values, scales, fmt = stack.values, stack.scales, stack.format
    assert scales is not None, "what is quantized has scales"
    beside = [stack.zeros, stack.mins]
    if fmt.dtype is not None:
        head = [1, float8.FORMATS[fmt.dtype], float8.inputs_per_scale(fmt, inputs), 0, 0, 0]
        packed, groups = (-(-inputs // 2), float8.STEP), [fmt.groups(inputs)]
    else:
        known = quantized.product_arguments(fmt, inputs)
        powers = scales.shape[2] > known.rows
        table = 0 if known.table is None else known.table.data_ptr()
        head = [0, known.number, known.groups, known.span, int(powers), table]
        packed, groups = known.packed, [known.rows, known.rows + tiles.POWERS]
    if values.shape[2:] != packed or scales.shape[2] not in groups or not values.is_contiguous():
        raise ValueError(
            f"{inputs} inputs do not fit packed experts {tuple(values.shape)}, scales {tuple(scales.shape)}"
        )
    tensors = [values, scales, *beside]
    places = [0 if each is None else each.data_ptr() for each in tensors]
    return [*head, *places, *(0 if each is None else each[0].nbytes for each in tensors)]


def _all_experts(gate_up: Matrix, down: Matrix, inner: int, kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """For an activation that the extension lacks: every expert on all rows: a step's calls stay the same."""
    hidden = _inputs(gate_up)

    def serve(rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0)
        owners = (torch.arange(len(rows))[:, None] >= ends).sum(-1, keepdim=True)
        out = rows.new_zeros(rows.shape)
        for expert in range(len(counts)):
            both = product_of(rows, expert_matrix(gate_up, expert), 2 * inner)
            out = torch.where(
                owners == expert, product_of(gated.reference(both, kind), expert_matrix(down, expert), hidden), out
            )
        return out

    return serve


def product_of(x: Tensor, weight: Matrix, outputs: int) -> Tensor:
    """The product with one expert's matrix."""
    op, provider = (linear, "torch") if weight.format.plain else (linear.kinds[weight.format.kind], "native")
    product: Tensor = op.providers[provider](x, weight, None, (outputs,))
    return product
