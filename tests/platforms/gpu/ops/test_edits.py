"""Edits of logits by Triton equal the specification, and are made in place."""

import pytest
import torch
from torch import Tensor

import quintet.platforms.gpu.ops.logits_edits  # noqa: F401  registers its providers
from quintet.ops.registry import Op
from tests.helpers.platforms.sampling import bits_of
from tests.helpers.platforms.triton import needs_triton, randn, triton_op

DEVICE = needs_triton()


def places(rng: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    rows, ids = torch.nonzero(torch.rand(shape, generator=rng) < 0.3).int().unbind(1)
    return rows, ids


@pytest.mark.parametrize("seed", range(3))
def test_edits_equal_the_specification_though_places_are_repeated(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, 333, generator=rng) * 4
    rows, ids = places(rng, 8, 333)
    again = torch.cat([torch.arange(len(rows)), torch.full((300,), len(rows) - 1), torch.arange(50)])
    counts, values = torch.randint(0, 4, rows.shape, generator=rng).int(), torch.randn(len(rows), generator=rng)
    penalties = torch.rand(8, 3, generator=rng) + 0.5
    for name, columns, rest in (
        ("penalize", (counts,), (penalties,)),
        ("bias_tokens", (values,), ()),
        ("ban_tokens", (), ()),
    ):
        want = Op.registry[name](logits.clone(), rows, ids, *columns, *rest)
        given = [x[again] for x in (rows, ids, *columns)]
        torch.testing.assert_close(triton_op(name, DEVICE)(logits, *given, *rest), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab", [1, 31, 32, 100, 3000])
def test_kept_tokens_equal_the_specification(vocab: int) -> None:
    logits, rng = randn(5, vocab), torch.Generator().manual_seed(vocab)
    bits = bits_of(torch.rand(5, vocab, generator=rng) < 0.5)
    bits[1] = -1
    assert torch.equal(triton_op("keep_tokens", DEVICE)(logits, bits), Op.registry["keep_tokens"](logits, bits))


def test_edits_overwrite_rows_of_a_wider_tensor_and_nothing_else() -> None:
    wide = randn(4, 50).to(DEVICE)
    before, logits = wide.cpu(), wide[:3, :40]
    row, token = (torch.tensor([i], dtype=torch.int32, device=DEVICE) for i in (2, 39))
    got = Op.registry["ban_tokens"].providers["triton"](logits, row, token)
    assert got.data_ptr() == wide.data_ptr()
    before[2, 39] = float("-inf")
    assert torch.equal(wide.cpu(), before)
    words = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
    Op.registry["keep_tokens"].providers["triton"](logits, words)
    before[:3, :40] = float("-inf")
    assert torch.equal(wide.cpu(), before)


def test_no_places_change_nothing() -> None:
    logits, none = randn(2, 9), torch.empty(0, dtype=torch.int32)
    assert torch.equal(triton_op("ban_tokens", DEVICE)(logits, none, none), logits)
    assert torch.equal(triton_op("penalize", DEVICE)(logits, none, none, none, torch.ones(2, 3)), logits)


def test_what_does_not_fit_is_refused() -> None:
    none = torch.empty(0, dtype=torch.int32)
    with pytest.raises(ValueError, match="float32"):
        triton_op("ban_tokens", DEVICE)(randn(2, 9).half(), none, none)
    with pytest.raises(ValueError, match="do not fit"):
        triton_op("keep_tokens", DEVICE)(randn(2, 33), torch.ones(2, 1, dtype=torch.int32))
