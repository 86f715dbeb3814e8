"""float8_e4m3fn read as float8_e4m3fnuz, and a cache of it: torch's own types say what each of the 256 bytes means."""

import pytest
import torch

from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops import Op
from quintet.ops.attention import from_cache_rows, to_cache_rows
from quintet.ops.quantize import attributes, quantize
from quintet.platforms.gpu.fp8_fnuz import FN, FNUZ, as_fnuz
from tests.helpers.platforms.triton import needs_triton, triton_op

BYTES = torch.arange(256, dtype=torch.uint8).reshape(2, 128)


def test_every_byte_keeps_its_value() -> None:
    before = BYTES.clone().view(FN)
    want = before.float()
    got = as_fnuz({"weight": before.clone(), "scales": torch.tensor([[1.0], [3.0]])})
    assert got["weight"].dtype == FNUZ and got["scales"].tolist() == [[2.0], [6.0]]
    values = got["weight"].float() * got["scales"] / torch.tensor([[1.0], [3.0]])
    same = (values == want) | (values.isnan() & want.isnan())
    assert bool(same.all()), BYTES[~same].tolist()
    assert int(want.isnan().sum()) == int(values.isnan().sum()) == 2


def test_the_same_bits_without_doubling_would_be_half() -> None:
    """Why scales double: what would be served if only the type's name changed."""
    numbers = BYTES[0, 1:127]
    assert torch.equal(numbers.view(FNUZ).float() * 2, numbers.view(FN).float())
    assert bool(torch.tensor([0x80], dtype=torch.uint8).view(FNUZ).float().isnan().all())


@pytest.mark.parametrize("fmt", [WeightFormat("fp8", 8, 16, dtype=FN), WeightFormat("fp8", 8, 16, 64, dtype=FN),
                                  WeightFormat("fp8a8", 8, 8, dtype=FN)], ids=str)  # fmt: skip
def test_products_are_the_same(fmt: WeightFormat) -> None:
    """To the bit where the weight alone has 8 bits; activations are rounded to the weight's type."""
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(24, 128, generator=generator), torch.randn(5, 128, generator=generator)
    weight[0, :3] = torch.tensor([-0.0, 0.0, 1e-9])
    placed = attributes(quantize(weight, fmt))
    want = Op.registry["linear"](x, Matrix(placed["weight"], placed["scales"], format=fmt), None, (24,))
    found = as_fnuz({name: each.clone() for name, each in placed.items()})
    got = Op.registry["linear"](x, Matrix(found["weight"], found["scales"], format=fmt), None, (24,))
    if fmt.activations == 16:
        assert torch.equal(got, want)
    else:  # 240 is reached where 448 was, so that other numbers are between two steps: half a step is 1 / 16
        assert float((got - want).norm() / want.norm()) < 1 / 16


def test_rows_of_a_cache_are_torchs_rounding_and_back() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, 239.0, 260.0, -1e6, 3e-4, 0.001, float("inf")])
    rows = to_cache_rows(x, FNUZ)
    assert rows.dtype == FNUZ
    assert from_cache_rows(rows, 9).tolist() == [0.0, 0.0, 1.0, 240.0, 240.0, -240.0, 0.0, 0.0009765625, 240.0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # NumPy's, of masked lanes
def test_triton_writes_what_torch_rounds_to() -> None:
    """Every byte's own number, halves of steps between, what is past the largest, and what is no number."""
    from quintet.platforms.gpu.ops import attention as triton_attention

    assert FNUZ in triton_attention.QUANTIZED
    device = needs_triton()
    of = spec(1, 1, 16, dtype=torch.float32, kv_dtype=FNUZ)
    numbers = BYTES.view(FNUZ).float().flatten()
    between = (numbers[:126] + numbers[1:127]) / 2
    k = torch.cat([numbers, between, torch.tensor([241.0, 1e9, float("inf"), float("-inf"), -1e-9, 3e-4])])
    k = torch.nn.functional.pad(k, (0, -len(k) % 16)).reshape(-1, 1, 16)
    cache = RandomKVCache(of, [len(k)])
    _, context = cache.batch({0: AttentionRequest(0, len(k))})
    empty = torch.zeros_like(cache.kv.view(torch.uint8)).view(FNUZ)
    want = Op.registry["write_kv"].reference(empty.clone(), k, -k, context)
    got = triton_op("write_kv", device)(empty, k, -k, context)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_triton_attends_over_such_a_cache(dtype: torch.dtype) -> None:
    """One token beside a prompt: both kernels."""
    device = needs_triton()
    of = spec(4, 2, 16, dtype=dtype, kv_dtype=FNUZ)
    cache = RandomKVCache(of, [71, 31])
    q, context = cache.batch({0: AttentionRequest(70, 1), 1: AttentionRequest(11, 20)})
    want = Op.registry["paged_attention"].reference(q.float(), cache.kv, context, of, None)
    got = triton_op("paged_attention", device)(q, cache.kv, context, of, None)
    limit = 20 * torch.finfo(dtype).eps * max(1.0, float(want.abs().max()))
    assert got.dtype == dtype and float((got.float() - want).abs().max()) <= limit
