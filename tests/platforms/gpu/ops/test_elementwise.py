"""Gates, the soft cap and the look-up of rows by Triton equal the specification."""

import itertools

import pytest
import torch

import quintet.platforms.gpu.ops.elementwise  # noqa: F401  registers its providers
from quintet.ops.activation import KINDS, gated
from quintet.ops.elementwise import softcap
from quintet.ops.embedding import embedding, place_tokens
from quintet.ops.registry import Op
from quintet.platforms.gpu.kernels import activation
from tests.helpers.platforms.triton import DTYPES, assert_rounded, needs_triton, randn, triton_op

DEVICE = needs_triton()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # NumPy's, of overflow


def test_every_activation_has_a_kernel() -> None:
    assert set(activation.KINDS) == set(KINDS)


def test_an_activation_without_a_kernel_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "relu3", lambda x: x.relu().pow(3))
    assert gated.probes["triton"]() is None
    x = randn(3, 74, dtype=torch.float32)
    assert torch.equal(triton_op("gated", DEVICE)(x, "relu3"), gated(x, "relu3"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gates_equal_the_specification(kind: str, dtype: torch.dtype) -> None:
    wide = randn(3, 700, dtype=dtype, scale=3.0)
    for x in (
        randn(1, 2, dtype=dtype),
        randn(3, 74, dtype=dtype, scale=8.0),
        randn(2, 4444, dtype=dtype),
        wide[:, 90:],
    ):
        got, want = triton_op("gated", DEVICE)(x, kind), gated(x.double(), kind)
        product = x.double().chunk(2, -1)[0] * x.double().chunk(2, -1)[1]  # in tails, 1 + tanh cancels
        limit = 3 * torch.finfo(dtype).eps * torch.maximum(product.abs(), want.abs()).clamp(min=0.1)
        assert got.dtype == dtype and bool(((got.double() - want).abs() <= limit).all())


def test_gates_round_the_activation_first() -> None:
    for kind in KINDS:
        x = randn(5, 600, dtype=torch.float16, scale=3.0)
        got, want = triton_op("gated", DEVICE)(x, kind), gated(x, kind)
        inside = want.abs() > 0.01  # in tails, 1 + tanh cancels
        assert float((got != want)[inside].float().mean()) < 0.01, kind  # a step of float32 may move a rounding


def test_numbers_that_are_none_stay_so() -> None:
    x = torch.tensor([[float("nan"), float("inf"), -1e30, 1.0, 1.0, 1.0]])
    for kind in KINDS:
        got = triton_op("gated", DEVICE)(x, kind)[0]
        assert got[0].isnan() and got[1] == float("inf") and got[2] == 0, kind


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_cap_equals_the_specification_for_small_numbers_too(dtype: torch.dtype) -> None:
    for scale, cap in itertools.product((1e-3, 1.0, 40.0, 1000.0), (30.0, 50.0)):
        x = randn(3, 700, dtype=dtype, scale=scale)
        want = cap * (x.double() / cap).tanh()
        got = triton_op("softcap", DEVICE)(x, cap)
        off = ((got.double() - want).abs() / want.abs().clamp(min=1e-6)).max()
        assert float(off) <= 6 * torch.finfo(dtype).eps  # an H100's exp2 gives 5.1
        assert_rounded(got, softcap(x, cap), dtype)


def test_soft_cap_overwrites() -> None:
    x = randn(3, 5).to(DEVICE)
    assert Op.registry["softcap"].providers["triton"](x, 3.0).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_looked_up_bit_for_bit(dtype: torch.dtype) -> None:
    for width in (1, 33, 2100):
        table = randn(50, 2 * width, dtype=dtype)[:, width:]
        ids = (torch.arange(31, dtype=torch.int32) * 17) % 50
        assert torch.equal(triton_op("embedding", DEVICE)(ids, table, 5, False), table[ids.long()])
        for first in (0, 10, 45, 90, -3):
            want = embedding(ids, table[:20], first, True)
            assert torch.equal(triton_op("embedding", DEVICE)(ids, table[:20], first, True), want)
    assert triton_op("embedding", DEVICE)(ids[:0], table, 0, False).shape == (0, width)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 700])
def test_sampled_tokens_come_where_they_belong(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    ids, rows = (torch.randint(-1, 9, (count,), generator=generator, dtype=torch.int32) for _ in range(2))
    sampled = torch.randint(-1, 50_000, (9,), generator=generator, dtype=torch.int32)
    got = triton_op("place_tokens", DEVICE)(ids, sampled, rows)
    assert got.dtype == torch.int32 and torch.equal(got, place_tokens(ids, sampled, rows))
