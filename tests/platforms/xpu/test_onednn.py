"""oneDNN's products are the specification's: torch's own _int_mm, and a stand-in under the four bits' real schema."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import quintet.platforms.gpu.ops.quantized  # noqa: F401  registers its providers
from quintet.config import EngineConfig
from quintet.interface.weights import CheckpointSlice, Matrix, Weight, WeightFormat
from quintet.ops import bind
from quintet.ops.linear import linear
from quintet.ops.quantize import quantize
from quintet.ops.registry import Op
from quintet.platforms.xpu import PLATFORM, onednn
from tests.helpers.platforms.triton import needs_triton, randn
from tests.platforms.xpu.fake_xpu import fake_class

DEVICE = needs_triton()
INT4, W8A8 = WeightFormat("int4", 4, 16, 32), WeightFormat("w8a8", 8, 8)


def fours(self: Tensor, mat2: Tensor, qGroupSize: int, qScale: Tensor, qZeros: Tensor) -> Tensor:
    """What torch's _weight_int4pack_mm_xpu checks and computes (ATen/native/mkldnn/xpu/Blas.cpp, torch 2.8 to 2.13)."""
    assert self.dim() == 2 and self.is_contiguous() and mat2.dtype == torch.int32 and mat2.dim() == 2
    assert qZeros.dtype == torch.int8 and qGroupSize % 32 == 0 and qScale.dtype == self.dtype
    outputs, inputs = mat2.shape[0], self.shape[1]
    assert qScale.shape == qZeros.shape == (inputs // qGroupSize, outputs) and qScale.is_contiguous()
    values = torch.stack([(mat2 >> 4 * place) & 15 for place in range(8)], -1).reshape(outputs, inputs).float()
    zeros, scales = (each.float().t().repeat_interleave(qGroupSize, 1) for each in (qZeros, qScale))
    return (self.float() @ ((values - zeros) * scales).t()).to(self.dtype)


@pytest.fixture
def library() -> Iterator[None]:
    """The op for host tensors, under torch's own schema."""
    made = torch.library.Library("aten", "IMPL")
    made.impl(onednn.NAME, fours, "CPU")
    onednn.probe_int4.cache_clear()
    yield
    onednn.probe_int4.cache_clear()
    made._destroy()


def test_the_op_of_four_bits_has_the_recorded_signature() -> None:
    schema = str(torch.ops.aten._weight_int4pack_mm_with_scales_and_zeros.default._schema)
    assert (
        schema.partition("(")[2] == "Tensor self, Tensor mat2, int qGroupSize, Tensor qScale, Tensor qZeros) -> Tensor"
    )
    assert schema.startswith(f"aten::{onednn.NAME}(")


def products(fmt: WeightFormat) -> tuple[Tensor, Matrix]:
    """Scales as place() leaves them: in the type of activations where they are of four bits."""
    matrix = quantize(randn(24, 128), fmt)
    assert matrix.scales is not None
    scales = matrix.scales.half() if fmt.bits == 4 else matrix.scales
    return randn(5, 128, dtype=torch.float16), matrix._replace(scales=scales)


def close(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype and torch.allclose(got.float(), want.float(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bits(library: None, group: int) -> None:
    x, matrix = products(replace(INT4, group=group))
    bias = randn(24, dtype=torch.float16)
    for given in (None, bias):
        assert close(onednn.int4(x, matrix, given, (24,)), linear.reference(x, matrix, given, (24,)))


def test_four_bits_with_zero_points(library: None) -> None:
    zeros = torch.randint(0, 16, (24, 4), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    x, matrix = products(INT4)
    matrix = matrix._replace(zeros=zeros, format=replace(INT4, zeros=True), scales=matrix.scales.abs() / 8)
    assert close(onednn.int4(x, matrix, None, (24,)), linear.reference(x, matrix, None, (24,)))


def test_eight_bits_are_the_specifications_sums(library: None) -> None:
    x, matrix = products(W8A8)
    got, want = (product(x, matrix, None, (24,)) for product in (onednn.w8a8, linear.reference))
    assert close(got, want)


def test_other_forms_go_to_the_next_provider(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def other(x: Tensor, weight: Matrix, bias: Any, outputs: Any) -> Tensor:
        asked.append(weight.format.kind)
        return x

    for kind in ("int4", "w8a8"):
        monkeypatch.setitem(Op.registry[f"linear:{kind}"].providers, "triton", other)
        monkeypatch.setitem(Op.registry[f"linear:{kind}"].probes, "triton", lambda: None)
    x, matrix = products(replace(INT4, group=16))
    onednn.int4(x, matrix, None, (24,))
    x, matrix = products(replace(W8A8, group=64))
    onednn.w8a8(x, matrix, None, (24,))
    assert asked == ["int4", "w8a8"]
    monkeypatch.setitem(Op.registry["linear:w8a8"].probes, "triton", lambda: "not here")
    assert torch.equal(onednn.w8a8(x, matrix, None, (24,)), linear.reference(x, matrix, None, (24,)))


def test_a_library_that_multiplies_otherwise_does_not_serve(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert onednn.probe_int4() is None and onednn.probe_w8a8.__wrapped__() is None
    onednn.register()
    order = {"linear:int4": ("onednn", "triton")}
    assert bind(order).choice("linear:int4").provider == "onednn"
    right = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda x, y: right(x, y) * (2 if x.shape[0] == 1 else 1))
    assert "a product of 1 tokens is off by" in str(onednn.probe_w8a8.__wrapped__())


def test_without_the_op_it_does_not_serve_and_says_so() -> None:
    onednn.probe_int4.cache_clear()
    if DEVICE.type == "cpu":
        assert "its kernel fails on cpu: NotImplementedError" in str(onednn.probe_int4())
    onednn.probe_int4.cache_clear()


def weight(fmt: WeightFormat) -> Weight:
    return Weight("weight", (CheckpointSlice("w", (64, 128), ((0, 64),)),), 0, 0, torch.bfloat16, "linear", format=fmt)


def test_four_bits_lie_as_whoever_multiplies_reads_them(library: None) -> None:
    """oneDNN: as the specification has them, scales in the model's type and group by group; else in halves."""
    platform = type("Fake", (fake_class(),), {"op_priority": PLATFORM.op_priority})(EngineConfig())
    platform.open(0)
    floats = randn(64, 128)
    placed = platform.place(weight(INT4), {"w": floats})
    assert placed["weight"].shape == (64, 64) and placed["scales"].dtype == torch.bfloat16
    assert placed["scales"].shape == (64, 4) and placed["scales"].t().is_contiguous()
    x = randn(3, 128, dtype=torch.bfloat16)
    there = Matrix(placed["weight"], placed["scales"], format=INT4)
    want = linear.reference(x, there, None, (64,))
    got = bind(platform.op_priority).choice("linear:int4").provider, onednn.int4(x, there, None, (64,))
    assert got[0] == "onednn" and torch.allclose(got[1].float(), want.float(), rtol=0.02, atol=0.05)
    halves = platform.place(weight(replace(INT4, group=16)), {"w": floats})
    assert halves["weight"].dim() == 3, "Triton's kernels take what oneDNN does not"
