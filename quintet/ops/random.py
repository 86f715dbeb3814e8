"""Specifications of the random numbers: counter-based, so that a draw depends on (key, position) alone."""

import torch
from torch import Tensor

from quintet.ops.registry import Op

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)  # of threefry2x32: four rounds of the first half, four of the second, ...
PARITY = 0x1BD11BDA  # the key schedule's third word is key[0] ^ key[1] ^ PARITY


def threefry2x32(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Threefry-2x32 with 20 rounds: int32 words that broadcast -> two int32 words; sums wrap around.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    x0, x1 = counter[0] + key[0], counter[1] + key[1]
    for group in range(5):
        for rotation in ROTATIONS[4 * (group % 2) : 4 * (group % 2) + 4]:
            x0 = x0 + x1
            x1 = _rotate(x1, rotation) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + (group + 1)
    return x0, x1


def uniform(bits: Tensor) -> Tensor:
    """The upper 23 bits of int32 words as a float32 in (0, 1): the middles of 2**23 equal intervals."""
    return (_shift_right(bits, 9).to(torch.float32) + 0.5) * 2.0**-23


@Op
def gumbel(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for tokens: keys [R, 2], positions [R], token_ids [R or 1, C], int32 -> [R, C] float32.

    The noise of a token is a function of (key, position, token id): the same in any subset of the vocabulary. Tokens 2i
    and 2i + 1 share the counter (position, i) and take its first and second word.
    """
    key = (keys[:, 0:1], keys[:, 1:2])
    x0, x1 = threefry2x32(key, (positions[:, None], _shift_right(token_ids, 1)))
    words = torch.where((token_ids & 1) == 0, x0, x1)
    return -torch.log(-torch.log(uniform(words)))


def _rotate(x: Tensor, by: int) -> Tensor:
    return (x << by) | _shift_right(x, 32 - by)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """The logical shift of int32, which torch lacks: the sign's copies are masked away."""
    return (x >> by) & ((1 << (32 - by)) - 1)
