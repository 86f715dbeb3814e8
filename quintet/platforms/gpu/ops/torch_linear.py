"""Products of 8 bits and of experts by the libraries that own the tensor cores, through torch.

What torch 2.11 asks for (aten/src/ATen/native/cuda: ScaledBlas.cpp, Blas.cpp, GroupedBlas.cpp): `_scaled_mm` inputs and
outputs in multiples of 16, any number of rows, and scales per row or, on compute capability 9.0, per 128 inputs of a
row, those of a group side by side and of a multiple of 4 rows; `_int_mm` more than 16 rows, and multiples of 8;
`_grouped_mm` bfloat16 on 9.0 and 10.0, or it waits for the device. Whatever is outside of that, and steps in which they
are slower, go to Triton's kernels.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops.linear import linear
from quintet.ops.moe import experts
from quintet.platforms.gpu.ops import moe as triton_moe
from quintet.platforms.gpu.ops import quantized as triton_quantized
from quintet.platforms.gpu.ops.probe import probing

# Rows up to which our kernels serve, unless the chip's table (kernels/chips.py) has other numbers.
FEW = 0  # of fp8 with scales of rows. On an H100 three weights of Llama-3.1-8B take 129 us together at 1 row, ours 147
FEW_BLOCKS = 16  # of fp8 with scales of blocks. A guess
MIN_INTEGERS = 16  # of int8, as torch._int_mm has it
FEW_INTEGERS = 512  # of int8: their sums go through memory once more, which only many rows pay for. A guess
FEW_EACH = 64  # of one expert, on average: from there on our kernels compute, too
BLOCK = 128  # inputs that share a scale
EVEN_ROWS = 4  # cuBLASLt: where scales are of blocks
GROUPED = ((9, 0), (10, 0))  # compute capabilities with grouped products that ask the host nothing
TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)  # a chip multiplies one of them: gfx942 the second
E4M3 = WeightFormat("fp8a8", 8, 8, dtype=torch.float8_e4m3fn)


def _check_float8(device: torch.device) -> str | None:
    """By rows, in the type that the chip multiplies, which weights have then; blocks are tried as well, and go to our
    kernels where they fail."""
    wrong = []
    for kind in TYPES:
        if (why := _refused(device, 0, kind)) is None:
            blocks_refused(device.type, kind)
            return None
        wrong.append(f"{str(kind).removeprefix('torch.')}: {why}")
    return "; ".join(wrong)


@functools.cache
def blocks_refused(device: str, kind: torch.dtype) -> str | None:
    """Why scales of blocks do not serve on devices of this type: they are for compute capability 9.0 alone. Tried once,
    by the probe, and not in a step."""
    return _refused(torch.device(device), BLOCK, kind)


def _refused(device: torch.device, group: int, kind: torch.dtype) -> str | None:
    """Why the product does not serve, or None."""
    try:
        return _trial_failure(device, group, kind)
    except Exception as error:  # whatever a library says is the reason
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _trial_failure(device: torch.device, group: int, kind: torch.dtype) -> str | None:
    """One row and 17 of ones, four times as heavy in the first half of their inputs where there are groups."""
    values = torch.full((32, 2 * BLOCK), 2.0, device=device).to(kind)
    scales = torch.ones(2 if group else 1, 32, device=device)
    scales[0] = 4.0
    matrix = Matrix(values, scales.t(), format=WeightFormat("fp8a8", 8, 8, group, dtype=kind))
    for rows in (1, 17):
        x = torch.ones(rows, 2 * BLOCK, dtype=torch.bfloat16, device=device)
        got, want = by_float8(x, matrix, None), 2.0 * BLOCK * (4 + 1 if group else 8)
        if not bool((got.float() == want).all()):
            return f"torch._scaled_mm gave {float(got.float().mean())}, not {want}, with groups of {group}"
    return None


def _check_int8(device: torch.device) -> str | None:
    x = torch.ones(MIN_INTEGERS + 1, 64, dtype=torch.bfloat16, device=device)
    values = torch.full((32, 64), 3, dtype=torch.int8, device=device)
    fmt = WeightFormat("w8a8", 8, 8)
    got = by_int8(x, Matrix(values, torch.full((32, 1), 0.5, device=device), format=fmt), None)
    good = bool((got.float() == 96.0).all())
    return None if good else f"torch._int_mm gave {float(got.float().mean())}, not 96"


def _check_experts(device: torch.device) -> str | None:
    """Checks two experts, which double or halve what is squared; one entry has no expert."""
    if torch.version.hip is not None:  # and an MI250 says that it has capability 9.0
        return "torch's grouped products wait for the host under HIP"
    capability = torch.cuda.get_device_capability(device)
    if capability not in GROUPED:
        return f"torch's grouped products wait for the host on compute capability {capability[0]}.{capability[1]}"
    x = torch.full((8, 16), 2.0, dtype=torch.bfloat16, device=device)
    eye = torch.eye(16, dtype=torch.bfloat16, device=device)
    ids = torch.tensor([[0], [1], [1], [2], [0], [1], [0], [0]], dtype=torch.int32, device=device)
    down = torch.stack([2 * eye, eye / 2])
    got = by_groups(x, eye.repeat(2, 2, 1), down, torch.ones(8, 1, device=device), ids, "relu")[:, 0].tolist()
    want = [8.0, 2.0, 2.0, 0.0, 8.0, 2.0, 8.0, 8.0]
    return None if got == want else f"torch._grouped_mm gave {got}, not {want}"


def _beside(fmt: WeightFormat, check: Callable[[torch.device], str | None]) -> Callable[[], str | None]:
    """A probe: of the kernels that serve where torch does not, too."""

    def checked(device: torch.device) -> str | None:
        if device.type == "cpu":
            return "the host's own products are no GPU's"
        return check(device)

    own, theirs = probing(triton_quantized.check(fmt)), probing(checked)
    return lambda: own() or theirs()


def _probe_experts() -> str | None:
    def checked(device: torch.device) -> str | None:
        return "the host's own products are no GPU's" if device.type == "cpu" else _check_experts(device)

    return probing(triton_moe.check_experts)() or probing(checked)()


@linear.provide("vendor", _beside(E4M3, _check_float8), kinds=("fp8a8",))
def _float8(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    few = _few("FEW_BLOCKS" if weight.format.group else "FEW", x.device)
    if len(x) > few and float8_fits(x, weight, bias):
        return by_float8(x, weight, bias)
    return triton_quantized.packed_linear(x, weight, bias, outputs)


@linear.provide("vendor", _beside(WeightFormat("w8a8", 8, 8), _check_int8), kinds=("w8a8",))
def _int8(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    if len(x) > max(MIN_INTEGERS, _few("FEW_INTEGERS", x.device)) and int8_fits(x, weight):
        return by_int8(x, weight, bias)
    return triton_quantized.packed_linear(x, weight, bias, outputs)


@experts.provide("vendor", _probe_experts)
def _experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    if ids.numel() > _few("FEW_EACH", x.device) * len(down) and groups_fit(x, gate_up, down, kind):
        return by_groups(x, gate_up, down, weights, ids, kind)
    return triton_moe.mixed_experts(x, gate_up, down, weights, ids, kind)


def _few(name: str, device: torch.device) -> int:
    """Returns the number under this name in the chip's table, or in this module."""
    from quintet.platforms.gpu.kernels.chips import chip_limits_for

    found: int = chip_limits_for(device).table.rows.get(name, globals()[name])
    return found


def float8_fits(x: Tensor, weight: Matrix, bias: Tensor | None) -> bool:
    """True if torch._scaled_mm takes them: bfloat16, to which every version rounds results, and e4m3 of the chip."""
    fmt, (outputs, inputs), kind = weight.format, weight.values.shape, weight.values.dtype
    blocks = fmt.group == BLOCK and inputs % BLOCK == 0 and bias is None
    blocks = blocks and blocks_refused(x.device.type, kind) is None
    plain = weight.input_order is None and weight.mins is None and kind in TYPES
    even = inputs % 16 == 0 and outputs % 16 == 0 and weight.values.is_contiguous()
    return plain and even and (blocks or fmt.group == 0) and x.dtype == torch.bfloat16


def by_float8(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    """x [T, K] to e4m3, each row or each block of it by itself, then one product, rounded once.

    Without use_fast_accum: 16,384 products of one sign added up to a fifth less on an H100: its tensor cores keep
    some 14 bits of a sum.
    """
    from quintet.platforms.gpu.kernels.rows import quantized

    kind, scales, tokens = weight.values.dtype, weight.scales, len(x)
    assert scales is not None, "what is quantized has scales"
    x = x if x.stride(-1) == 1 else x.contiguous()
    if weight.format.group and tokens % EVEN_ROWS:
        x = torch.nn.functional.pad(x, (0, 0, 0, -tokens % EVEN_ROWS))
    values, own = quantized(x, weight.format.group or x.shape[1], kind, together=scales.shape[1] > 1)
    scales = scales.t().contiguous()  # as place() leaves them: a copy of nothing
    product: Tensor = torch._scaled_mm(
        values.view(kind), weight.values.t(), own, scales, bias=bias, out_dtype=x.dtype, use_fast_accum=False
    )
    return product[:tokens]


def int8_fits(x: Tensor, weight: Matrix) -> bool:
    outputs, inputs = weight.values.shape
    plain = weight.input_order is None and weight.zeros is None and weight.mins is None and weight.format.group == 0
    return plain and weight.values.is_contiguous() and inputs % 8 == 0 and outputs % 8 == 0


def by_int8(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    """x [T, K] to int8, row by row; sums in int32, which then get both scales and the bias."""
    from quintet.platforms.gpu.kernels.matmul import added
    from quintet.platforms.gpu.kernels.rows import quantized

    assert weight.scales is not None, "what is quantized has scales"
    values, own = quantized(x if x.stride(-1) == 1 else x.contiguous(), x.shape[1], torch.int8)
    sums = torch._int_mm(values, weight.values.t())
    out = torch.empty_like(sums, dtype=x.dtype)
    return added(out, sums[None], own, weight.scales, None if bias is None else bias.contiguous())


def groups_fit(x: Tensor, gate_up: Tensor, down: Tensor, kind: str) -> bool:
    """bfloat16, rows of whole 16 bytes."""
    from quintet.platforms.gpu.kernels.activation import KINDS

    even = x.shape[1] % 8 == 0 and down.shape[2] % 8 == 0 and gate_up.is_contiguous() and down.is_contiguous()
    return even and x.dtype == gate_up.dtype == down.dtype == torch.bfloat16 and kind in KINDS


def by_groups(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    """Entries by expert, two products in groups, and each token's sum. Rows without an expert are skipped."""
    from quintet.platforms.gpu.kernels.activation import gated
    from quintet.platforms.gpu.kernels.moe import combined
    from quintet.platforms.gpu.kernels.routing import ordered

    order, counts = ordered(ids.contiguous(), len(down))
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = torch.index_select(x, 0, order // ids.shape[1])
    inner = gated(torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends), kind)
    outer = torch._grouped_mm(inner, down.transpose(1, 2), offs=ends)
    each = torch.empty_like(outer).index_copy_(0, order.long(), outer)
    return combined(each, weights.float().contiguous(), ids.contiguous(), len(down))
