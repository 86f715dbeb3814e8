"""Products through torch's libraries are the specification's, on torch's own CPU implementations of the same functions.

They take fewer shapes than that: what torch 2.11 asks of a GPU is checked by a stand-in that refuses as it does.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops.linear import linear
from quintet.ops.moe import experts
from quintet.ops.quantize import quantize
from quintet.platforms.gpu import providers
from quintet.platforms.gpu.fp8_fnuz import FNUZ, as_fnuz
from quintet.platforms.gpu.ops import torch_linear as torch_products
from quintet.platforms.gpu.weight_layout import pack_matrix
from tests.helpers.platforms.triton import needs_triton, randn

DEVICE = needs_triton()
E4M3 = torch.float8_e4m3fn
BLOCKS = WeightFormat("fp8a8", 8, 8, 128, dtype=E4M3, outputs_per_scale=128)
ROWS = WeightFormat("fp8a8", 8, 8, dtype=E4M3)
INTEGERS = WeightFormat("w8a8", 8, 8)


def placed(outputs: int, inputs: int, fmt: WeightFormat) -> Matrix:
    """As place() leaves it."""
    made = quantize(randn(outputs, inputs), fmt)
    there = pack_matrix({"weight": made.values, "scales": made.scales}, fmt)  # type: ignore[dict-item]
    return Matrix(there["weight"].to(DEVICE), there["scales"].to(DEVICE), format=fmt)


@functools.cache
def rows_are_served() -> bool:
    """Whether torch._scaled_mm takes scales of rows here: torch 2.11 has those of whole tensors alone on the host."""
    ones = torch.ones(32, 32, device=DEVICE).to(E4M3)
    scales = torch.ones(32, 1, device=DEVICE)
    try:
        torch._scaled_mm(ones, ones.t(), scales, scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        assert DEVICE.type == "cpu", "what is served is a GPU's"
        return False
    return True


def scaled_mm(mat1: Tensor, mat2: Tensor, scale_a: Tensor, scale_b: Tensor, **how: Any) -> Tensor:
    """torch._scaled_mm with what ScaledBlas.cpp of torch 2.11 refuses on compute capability 9.0, blocks included."""
    (rows, inputs), columns = mat1.shape, mat2.shape[1]
    assert mat1.dtype == mat2.dtype == E4M3 and scale_a.dtype == scale_b.dtype == torch.float32
    assert inputs % 16 == 0 and columns % 16 == 0 and mat1.is_contiguous() and mat2.t().is_contiguous()
    assert set(how) == {"bias", "out_dtype", "use_fast_accum"} and not how["use_fast_accum"]
    groups = -(-inputs // 128)
    if scale_a.shape == (rows, 1) and scale_b.shape == (1, columns):
        assert scale_a.is_contiguous() and scale_b.is_contiguous()
        assert how["bias"] is None or how["bias"].dtype == how["out_dtype"]
        if rows_are_served():
            return torch._scaled_mm(mat1, mat2, scale_a, scale_b, **how)
        one = torch.ones((), device=DEVICE)
        sums = torch._scaled_mm(mat1, mat2, one, one, out_dtype=torch.float32) * scale_a * scale_b
        return (sums if how["bias"] is None else sums + how["bias"].float()).to(how["out_dtype"])
    assert scale_a.shape == (rows, groups) and scale_a.stride() == (1, rows) and rows % 4 == 0
    assert scale_b.t().shape == (columns, groups) and scale_b.t().stride() == (1, columns)
    a, b = (x.float() * s.repeat_interleave(128, 1) for x, s in ((mat1, scale_a), (mat2.t(), scale_b.t())))
    assert how["bias"] is None
    return (a @ b.t()).to(how["out_dtype"])


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts what refuses in torch's place -> what was called."""
    calls: list[str] = []
    torch_products.blocks_refused.cache_clear()  # what another torch would have said
    int_mm, grouped_mm, plain = torch._int_mm, torch._grouped_mm, scaled_mm

    class Strict:
        @staticmethod
        def _scaled_mm(*args: Any, **how: Any) -> Tensor:
            calls.append("_scaled_mm")
            return plain(*args, **how)

        @staticmethod
        def _int_mm(x: Tensor, weight: Tensor) -> Tensor:
            calls.append("_int_mm")
            assert x.shape[0] > 16 and x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0
            return int_mm(x, weight)

        @staticmethod
        def _grouped_mm(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
            calls.append("_grouped_mm")
            assert x.dtype == weight.dtype == torch.bfloat16 and offs.dtype == torch.int32
            assert x.stride(1) == 1 and weight.stride(1) == 1 and x.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
            return grouped_mm(x, weight, offs=offs).index_fill_(0, torch.arange(int(offs[-1]), len(x)), torch.nan)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch_products, "torch", Strict())
    return calls


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.bfloat16 and got.shape == want.shape
    limit = 6 * torch.finfo(torch.bfloat16).eps * max(1.0, float(want.abs().max()))
    assert float((got.float().cpu() - want).abs().max()) <= limit


def wanted(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    host = Matrix(*(each.cpu() if isinstance(each, Tensor) else each for each in weight))
    found: Tensor = linear.reference(x.float(), host, None if bias is None else bias.float(), (len(weight.values),))
    return found


@pytest.mark.parametrize("fmt", [ROWS, BLOCKS, INTEGERS], ids=["rows", "blocks", "integers"])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(17, 32, 256), (40, 48, 384)])
def test_products_are_the_specifications(
    fmt: WeightFormat, tokens: int, outputs: int, inputs: int, strict: list[str]
) -> None:
    weight, x = placed(outputs, inputs, fmt), randn(tokens, inputs).bfloat16()
    for bias in (None, randn(outputs).bfloat16()):
        if fmt is BLOCKS and bias is not None:
            continue
        there = None if bias is None else bias.to(DEVICE)
        make: Callable[..., Tensor] = torch_products.by_int8 if fmt is INTEGERS else torch_products.by_float8
        close(make(x.to(DEVICE), weight, there), wanted(x, weight, bias))
    assert set(strict) <= {"_int_mm" if fmt is INTEGERS else "_scaled_mm"}


def test_what_torch_refuses_goes_to_our_kernels(strict: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, other types and widths, a bias beside blocks, inputs in another order."""
    monkeypatch.setattr(torch_products, "FEW_INTEGERS", 16)
    ours: list[tuple[int, ...]] = []

    def product(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
        ours.append(tuple(x.shape))
        return x

    monkeypatch.setattr(torch_products.triton_quantized, "packed_linear", product)
    float8, int8 = (linear.kinds[kind].providers["vendor"] for kind in ("fp8a8", "w8a8"))
    x, bias = randn(20, 256).bfloat16(), randn(32).bfloat16()
    whole, blocks, integers = (placed(32, 256, fmt) for fmt in (ROWS, BLOCKS, INTEGERS))
    for run, args in (
        (float8, (x[:16], blocks, None)), (float8, (x.half(), whole, None)), (float8, (x, blocks, bias)),
        (float8, (x, placed(24, 256, ROWS), None)), (float8, (x[:, :72], placed(32, 72, ROWS), None)),
        (float8, (x, whole._replace(input_order=torch.arange(256, dtype=torch.int32)), None)),
        (int8, (x[:16], integers, None)), (int8, (x, placed(9, 256, INTEGERS), None)),
    ):  # fmt: skip
        run(*(each.to(DEVICE) if isinstance(each, Tensor) else each for each in args), (32,))
    assert len(ours) == 8 and not strict
    assert torch_products.blocks_refused(DEVICE.type, E4M3) is None
    strict.clear()
    float8(x.to(DEVICE), blocks, None, (32,)), int8(x.to(DEVICE), integers, None, (32,))
    float8(x[:1].to(DEVICE), whole, None, (32,))
    assert len(ours) == 8 and (DEVICE.type != "cpu" or strict == ["_scaled_mm", "_int_mm", "_scaled_mm"])


def test_int8_never_goes_to_torch_with_as_few_rows_as_it_refuses(
    strict: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_products, "FEW_INTEGERS", 0)
    ours: list[int] = []
    monkeypatch.setattr(torch_products.triton_quantized, "packed_linear", lambda x, *rest: ours.append(len(x)))
    weight, int8 = placed(32, 256, INTEGERS), linear.kinds["w8a8"].providers["vendor"]
    for tokens in (16, 17):
        int8(randn(tokens, 256).bfloat16().to(DEVICE), weight, None, (32,))
    assert ours == [16] and (DEVICE.type != "cpu" or strict == ["_int_mm"])


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_fp8_of_few_rows_is_the_specifications(tokens: int, strict: list[str]) -> None:
    """From the first row on; scales of blocks are padded to a multiple of 4 rows, as cuBLASLt wants them."""
    for fmt in (ROWS, BLOCKS):
        weight, x = placed(32, 256, fmt), randn(tokens, 256).bfloat16()
        got = torch_products.by_float8(x.to(DEVICE), weight, None)
        assert got.shape == (tokens, 32)
        close(got, wanted(x, weight, None))


def test_long_sums_of_one_sign_keep_their_size(strict: list[str]) -> None:
    """With use_fast_accum they are a fifth less on an H100."""
    x, weight = randn(32, 16_384).abs().bfloat16(), placed(64, 16_384, ROWS)
    weight = weight._replace(values=weight.values.float().abs().to(E4M3))
    got, want = (
        torch_products.by_float8(x.to(DEVICE), weight, None).float().cpu(),
        wanted(x, weight, None).float().cpu(),
    )
    assert float(((got - want) / want).abs().max()) < 0.02


def test_experts_are_the_specifications(strict: list[str]) -> None:
    """Some entries are nobody's, one expert has none; rows that no group computes hold anything."""
    tokens, hidden, inner, num, k = 50, 16, 24, 4, 2
    gate_up, down = randn(num, 2 * inner, hidden).bfloat16(), randn(num, hidden, inner).bfloat16()
    x, weights = randn(tokens, hidden).bfloat16(), randn(tokens, k).abs()
    ids = torch.randint(-1, num + 1, (tokens, k), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    ids = torch.where(ids == 2, 3, ids)
    want = experts.reference(x.float(), gate_up.float(), down.float(), weights, ids, "silu")
    given = (each.to(DEVICE) for each in (x, gate_up, down, weights, ids))
    got = torch_products.by_groups(*given, "silu")
    limit = 12 * torch.finfo(torch.bfloat16).eps * float(want.abs().max())  # gated() is rounded in between
    assert float((got.float().cpu() - want).abs().max()) <= limit and got.dtype == torch.bfloat16
    assert DEVICE.type != "cpu" or strict == ["_grouped_mm"] * 2


def test_fp8_of_gfx942_reaches_the_library(strict: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chip multiplies e4m3fnuz alone, which its weights are in."""
    if DEVICE.type != "cpu":
        pytest.skip("the chip here has a type of its own")
    torch_products.blocks_refused.cache_clear()
    taken: list[torch.dtype] = []

    class HIP:
        @staticmethod
        def _scaled_mm(mat1: Tensor, mat2: Tensor, scale_a: Tensor, scale_b: Tensor, **how: Any) -> Tensor:
            if {mat1.dtype, mat2.dtype} != {FNUZ} or scale_a.shape[1] > 1:
                raise RuntimeError("float8_e4m3fn is of other chips, and scales are of rows\nmore")
            taken.append(mat1.dtype)
            return (mat1.float() @ mat2.float() * scale_a * scale_b).to(how["out_dtype"])

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(torch_products, "torch", HIP())
    assert torch_products._check_float8(DEVICE) is None
    assert "scales are of rows" in str(torch_products.blocks_refused(DEVICE.type, FNUZ))
    made = quantize(randn(32, 256), ROWS)
    there = as_fnuz(pack_matrix({"weight": made.values, "scales": made.scales}, ROWS))  # type: ignore[dict-item]
    weight, x = Matrix(there["weight"], there["scales"], format=ROWS), randn(20, 256).bfloat16()
    assert torch_products.float8_fits(x, weight, None)
    assert not torch_products.float8_fits(x, weight._replace(format=BLOCKS), None)
    taken.clear()
    got, want = linear.kinds["fp8a8"].providers["vendor"](x, weight, None, (32,)), wanted(x, weight, None)
    assert len(taken) == 1 and float((got.float() - want).norm() / want.norm()) < 1 / 64
    torch_products.blocks_refused.cache_clear()


def test_where_blocks_are_refused_rows_serve(strict: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on compute capability 10.0."""
    torch_products.blocks_refused.cache_clear()
    whole = torch_products.by_float8

    def refuses(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        if weight.format.group:
            raise NotImplementedError("DeepSeek style scaling is for SM90")
        return whole(x, weight, bias)

    monkeypatch.setattr(torch_products, "by_float8", refuses)
    assert torch_products._check_float8(DEVICE) is None
    assert "for SM90" in str(torch_products.blocks_refused(DEVICE.type, E4M3))
    x = randn(20, 256).bfloat16().to(DEVICE)
    fits = [torch_products.float8_fits(x, placed(32, 256, fmt), None) for fmt in (ROWS, BLOCKS)]
    torch_products.blocks_refused.cache_clear()
    assert fits == [True, False]


def test_probes_try_what_will_run_and_say_why_not(strict: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_products._check_float8(DEVICE) is None and torch_products._check_int8(DEVICE) is None
    if DEVICE.type == "cpu":
        assert linear.kinds["fp8a8"].probes["vendor"]() == "the host's own products are no GPU's"
        assert experts.probes["vendor"]() == "the host's own products are no GPU's"
        for capability, said in (((9, 0), None), ((8, 9), "wait for the host on compute capability 8.9")):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
            reason = torch_products._check_experts(DEVICE)
            assert reason is None if said is None else said in str(reason)
        with monkeypatch.context() as under_hip:  # an MI250 says that it has capability 9.0
            under_hip.setattr(torch.version, "hip", "7.0")
            under_hip.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
            assert "under HIP" in str(torch_products._check_experts(DEVICE))
        monkeypatch.setattr(torch_products, "by_float8", lambda x, weight, bias: x[:, :32] * 0)
        assert "torch._scaled_mm gave 0.0, not 2048.0" in str(torch_products._check_float8(DEVICE))
        assert torch_products.blocks_refused(DEVICE.type, E4M3) is None
    for name in ("linear:fp8a8", "linear:w8a8", "experts"):
        assert tuple(providers.PRIORITY[name]) == ("vendor", "triton"), name
