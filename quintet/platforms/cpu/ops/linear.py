"""Products with packed weights by quintet._cpu: every output in one order, whatever rows stand beside its own."""

import torch
from torch import Tensor

from quintet.interface.weights import Matrix
from quintet.ops.linear import linear
from quintet.platforms.cpu.arena import empty, empty_weight
from quintet.platforms.cpu.ops.extension import KINDS, dense_operands, extension

PAIRS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1}  # neighbouring inputs that stand side by side


def pack(*pieces: Tensor) -> Tensor:
    """Pieces [N, K], one under the other, memory maps or not -> [blocks, depth, lanes], zeros where that is wider.

    Pieces without outputs are skipped: if a tensor's parts go to single ranks, most pieces are empty here.
    """
    pieces = tuple(piece for piece in pieces if len(piece)) or pieces
    dtype, inputs = pieces[0].dtype, pieces[0].shape[-1]
    if dtype not in KINDS:
        raise ValueError(f"weights are packed in {', '.join(map(str, KINDS))}, not in {dtype}")
    if any(piece.dim() != 2 or 0 in piece.shape for piece in pieces):
        raise ValueError(f"a weight has outputs and inputs, and none has shape {tuple(pieces[0].shape)}")
    pair, columns = PAIRS[dtype], extension().LINEAR_COLUMNS
    if any(piece.shape[0] % columns for piece in pieces[:-1]):  # a block would hold rows of two
        pieces = (torch.cat(pieces),)
    blocks = -(-sum(piece.shape[0] for piece in pieces) // columns)
    packed = empty_weight((blocks, -(-inputs // pair), columns * pair), dtype)
    block = 0
    for piece in pieces:
        if piece.stride(1) != 1 or piece.stride(0) < inputs:
            piece = piece.contiguous()
        at = packed[block:].data_ptr()
        extension().pack_linear(KINDS[dtype], at, piece.data_ptr(), piece.shape[0], inputs, piece.stride(0))
        block += piece.shape[0] // columns
    return packed


def packed_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Returns the bytes of pack()'s result for a weight [N, K] of this shape."""
    (outputs, inputs), columns, pair = shape, extension().LINEAR_COLUMNS, PAIRS[dtype]
    return int(-(-outputs // columns) * columns * -(-inputs // pair) * pair * dtype.itemsize)


def scratch_bytes(tokens: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Returns the bytes that a product of so many rows with a weight [N, K] keeps beside its operands."""
    return int(extension().linear_scratch_bytes(KINDS[dtype], tokens, shape[1]))


def unpack(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """[blocks, depth, lanes] -> [outputs, inputs], as it was before pack()."""
    blocks, depth, _ = packed.shape
    pair = PAIRS[packed.dtype]
    columns = packed.reshape(blocks, depth, -1, pair).permute(0, 2, 1, 3).reshape(-1, depth * pair)
    return columns[:outputs, :inputs].contiguous()


def probe() -> str | None:
    """Three inputs, two outputs: numbers that every type holds exactly."""
    try:
        from quintet import _cpu
    except ImportError as error:
        return f"the compiled extension is not there: {error}"
    if not hasattr(_cpu, "linear_scratch_bytes"):
        return "the compiled extension is older than this provider; build it again with `make`"
    for dtype in KINDS:
        x, weight = (
            torch.tensor([[1.0, 2.0, 4.0]], dtype=dtype),
            torch.tensor([[1.0, 1.0, 1.0], [3.0, 2.0, 1.0]], dtype=dtype),
        )
        got = _linear(x, Matrix(pack(weight)), torch.ones(2, dtype=dtype), (2,)).tolist()
        if got != [[8.0, 12.0]]:
            return f"a product in {dtype} gave {got}, not [[8.0, 12.0]]"
    return None


@linear.provide("native", probe)
def _linear(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    """A weight of two dimensions was not packed, and goes to torch."""
    packed = weight.values
    if packed.dim() == 2:
        plain: Tensor = linear.providers["torch"](x, weight, bias, outputs)
        return plain
    count = sum(outputs)
    tokens, inputs = x.shape
    dtype = x.dtype
    pair = PAIRS.get(dtype, 1)
    blocks, depth, lanes = packed.shape
    columns = extension().LINEAR_COLUMNS
    if (
        packed.dtype != dtype
        or depth != (inputs + pair - 1) // pair
        or lanes != columns * pair
        or not (blocks - 1) * columns < count <= blocks * columns
        or not packed.is_contiguous()
    ):
        raise ValueError(
            f"x {tuple(x.shape)} {dtype} and {count} outputs do not fit a packed weight "
            f"{tuple(packed.shape)} {packed.dtype}"
        )
    x, bias = dense_operands(x, bias, count)
    at_bias = 0 if bias is None else bias.data_ptr()
    out = empty((tokens, count), dtype)
    extension().linear(
        KINDS[dtype], out.data_ptr(), x.data_ptr(), x.stride(0), packed.data_ptr(), at_bias, tokens, inputs, count
    )
    return out
