"""The random numbers: published answers, and their independence of everything but key, position and token."""

import pytest
import torch

from quintet.ops.random import gumbel, threefry2x32, uniform


def word(value: int) -> torch.Tensor:
    return torch.tensor([value - 2**32 if value >= 2**31 else value], dtype=torch.int32)


@pytest.mark.parametrize(
    "counter, key, answer",
    [  # Random123, tests/kat_vectors: threefry2x32 20
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_answers(counter, key, answer):
    x0, x1 = threefry2x32((word(key[0]), word(key[1])), (word(counter[0]), word(counter[1])))
    assert (int(x0) & 0xFFFFFFFF, int(x1) & 0xFFFFFFFF) == answer


def test_uniform_is_inside_the_open_interval():
    bits = torch.tensor([0, 511, 512, -1, -(2**31), 2**31 - 1], dtype=torch.int32)
    u = uniform(bits)
    assert u.dtype == torch.float32
    assert u.tolist() == [2.0**-24, 2.0**-24, 3 * 2.0**-24, 1 - 2.0**-24, 0.5 + 2.0**-24, 0.5 - 2.0**-24]
    assert float((-torch.log(-torch.log(u))).max()) < 16.6356  # as kernels rely on


def draw_noise(positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    keys = torch.tensor([[1, -2], [3, 4], [-(2**31), 2**31 - 1]], dtype=torch.int32)[: len(positions)]
    return gumbel(keys, positions, ids)


def test_noise_of_a_subset_equals_that_of_the_vocabulary():
    positions = torch.tensor([5, 0, 123456], dtype=torch.int32)
    whole = draw_noise(positions, torch.arange(9001, dtype=torch.int32)[None])
    ids = torch.tensor([0, 1, 2, 17, 4095, 4096, 8999, 9000], dtype=torch.int32)
    assert torch.equal(draw_noise(positions, ids[None]), whole[:, ids.long()])
    assert torch.equal(draw_noise(positions[:1], ids[None]), whole[:1, ids.long()])


def test_noise_follows_the_gumbel_distribution():
    ids = torch.arange(200_000, dtype=torch.int32)[None]
    noise = draw_noise(torch.tensor([9], dtype=torch.int32), ids)[0].double()
    assert abs(noise.mean() - 0.577216) < 0.01  # Euler's constant; the standard error is 0.003
    assert abs(noise.var() - 1.644934) < 0.03  # pi squared / 6
    order = torch.sort(torch.exp(-torch.exp(-noise))).values  # uniform: Kolmogorov and Smirnov
    distance = (order - (torch.arange(len(order)) + 0.5) / len(order)).abs().max()
    assert distance < 1.63 / len(order) ** 0.5  # 1%


def test_neighbouring_keys_and_positions_are_unrelated():
    ids = torch.arange(50_000, dtype=torch.int32)[None]
    keys = torch.tensor([[0, 0], [0, 1], [1, 0], [0, 0]], dtype=torch.int32)
    noise = gumbel(keys, torch.tensor([0, 0, 0, 1], dtype=torch.int32), ids)
    together = torch.cat([noise, noise[:1].roll(1, 1)])
    off_diagonal = torch.corrcoef(together) - torch.eye(5)
    assert float(off_diagonal.abs().max()) < 0.02
