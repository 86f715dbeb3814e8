"""Every form of quantized checkpoints by JAX, on one device and over a mesh, against the specification."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.conformance.cases.linear import away_from_ties
from quintet.conformance.cases.published_formats import FORMS
from quintet.conformance.cases.random_arguments import randn
from quintet.conformance.close import require_close
from quintet.conformance.harness.linear_layers import CanonicalReader
from quintet.interface.weights import CheckpointSlice, Matrix, Weight, WeightFormat
from quintet.layers.quantization.formats.bitsandbytes import NF4
from quintet.layers.quantization.fp4_fp8 import E2M1, E2M3
from quintet.ops.linear import linear
from tests.helpers.platforms import tpu

pytestmark = tpu.needs_jax

OTHERS = {
    "int4 of 16 with minima": WeightFormat("int4", 4, 16, 16, mins=True),
    "int4 of 64, zero points and minima": WeightFormat("int4", 4, 16, 64, zeros=True, mins=True),
    "int4 with one minimum": WeightFormat("int4", 4, 16, 0, mins=True),
    "int4 of 128 with minima": WeightFormat("int4", 4, 16, 128, mins=True),
    "w4a8 with zero points and minima": WeightFormat("w4a8", 4, 8, 16, zeros=True, mins=True),
    "w8a8 of 16 with minima": WeightFormat("w8a8", 8, 8, 16, mins=True),
    "table4 of one": WeightFormat("table4", 4, 16, 0, codebook=NF4),
    "table4 of 16 at 8 bits": WeightFormat("table4", 4, 8, 16, codebook=E2M1),
    "table8 of 16 at 8 bits": WeightFormat("table8", 8, 8, 16, codebook=E2M3),
}
ALL = {what: fmt for what, fmt in {**FORMS, **OTHERS}.items() if not fmt.act_order}


@functools.cache
def opened(devices: int) -> Any:
    """The platform, open on so many devices, and its device."""
    platform = tpu.platform(devices)
    return platform, platform.open(0)


def numbers(fmt: WeightFormat, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Matrix]:
    """Activations, of which none decides by a rounding of its own, and any matrix of the form."""
    matrix, x = CanonicalReader(fmt).random_matrix(outputs, inputs), randn(rows, inputs, dtype=dtype)
    if fmt.activations == 8:
        largest = 127.0 if fmt.dtype is None else torch.finfo(fmt.dtype).max
        kind = fmt.dtype
        rounded = torch.round if kind is None else lambda v: v.to(kind).float()
        x = away_from_ties(x, matrix.format.group, largest, rounded)
    return x, matrix


def placed(matrix: Matrix, devices: int, parts: int, by_inputs: bool) -> Matrix:
    """As a layer of so many products gets it back from place()."""
    outputs, inputs = len(matrix.values), matrix.values.shape[1] * 8 // matrix.format.bits
    by_output = {"": matrix.values, ".scales": matrix.scales, ".zeros": matrix.zeros, ".mins": matrix.mins}
    tensors: dict[str, Tensor] = {}
    for name, each in by_output.items():
        tensors |= {} if each is None else {f"p{part}{name}": piece for part, piece in enumerate(each.chunk(parts))}
    size = inputs if by_inputs else outputs // parts
    known = tuple(CheckpointSlice(f"p{part}", (outputs // parts, inputs), ((0, size),)) for part in range(parts))
    reader = CanonicalReader(matrix.format)
    weight = Weight("weight", known, int(by_inputs), 0, torch.float32, "linear", matrix.format, reader)
    found = opened(devices)[0].place(weight, tensors)
    return Matrix(found["weight"], *map(found.get, ("scales", "zeros")), None, matrix.format, found.get("mins"))


def multiplied(x: Tensor, weight: Matrix, outputs: tuple[int, ...], devices: int = 1) -> Tensor:
    from quintet.platforms.tpu.torchax_bridge import host_array

    _, device = opened(devices)
    (there,) = device.to_device([host_array(x)])
    provider = linear.kinds[weight.format.kind].providers["jax"]
    found: Tensor = device.to_host(provider(there, weight, None, outputs))()
    return found


def assert_right(got: Tensor, x: Tensor, matrix: Matrix) -> None:
    want = linear.reference(x.float(), matrix, None, (len(matrix.values),))
    assert got.dtype == x.dtype
    require_close(matrix.format.kind, got, want, 2**-13)


@pytest.mark.grid(cases=10)
@pytest.mark.parametrize("what", ALL)
def test_a_form_is_multiplied_as_it_is_held(what: str) -> None:
    """Few tokens and many, which are multiplied in other ways."""
    for rows, dtype in ((3, torch.bfloat16), (20, torch.float32), (20, torch.bfloat16)):
        x, matrix = numbers(ALL[what], rows, 24, 256, dtype)
        assert_right(multiplied(x, placed(matrix, 1, 1, False), (24,)), x, matrix)


@pytest.mark.grid(cases=4)
@pytest.mark.parametrize("what", OTHERS)
def test_a_form_over_a_mesh(what: str) -> None:
    """Cut by outputs, two products side by side, and by inputs."""
    for many, by_inputs in ((2, False), (1, True)):
        x, matrix = numbers(OTHERS[what], 3, 32, 256, torch.float32)
        weight = placed(matrix, tpu.DEVICES, many, by_inputs)
        assert len(shards(weight.values)) == tpu.DEVICES, "each device keeps a piece"
        assert_right(multiplied(x, weight, (32 // many,) * many, tpu.DEVICES), x, matrix)


def shards(x: Tensor) -> set[Any]:
    """The stretches of it that devices keep."""
    from quintet.platforms.tpu.torchax_bridge import jax_view

    return {str(each.index) for each in jax_view(x).addressable_shards}


@pytest.mark.parametrize("what", OTHERS)
def test_it_lowers_for_a_tpu(what: str) -> None:
    import jax

    from quintet.platforms.tpu.kernels.quantized import quantized

    x, matrix = numbers(OTHERS[what], 3, 24, 256, torch.float32)
    arrays = matrix._replace(**{name: each.numpy() for name, each in matrix._asdict().items() if torch.is_tensor(each)})
    step = jax.jit(quantized, static_argnums=3)
    lowered = step.trace(x.numpy(), arrays, None, (24,)).lower(lowering_platforms=("tpu",)).as_text()
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    assert products and all("HIGHEST" in line or "xi8>" in line for line in products)


def test_a_table_is_looked_up_by_choices() -> None:
    import jax.numpy as jnp

    from quintet.platforms.tpu.kernels.quantized import looked_up

    for table in (NF4, E2M1, E2M3, (1.0, 2.0, 3.0)):
        places = torch.arange(len(table), dtype=torch.uint8)
        assert looked_up(table, jnp.asarray(places.numpy())).tolist() == torch.tensor(table).tolist()
