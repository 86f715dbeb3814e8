"""How much of the tables beside the kernels a family of chips bears, as data. Nothing here was measured on a chip.

The numbers are those with which kernels, compiled ahead, keep most in registers, and all in shared memory.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cut:
    """The most that a program has, whatever a kernel's own table says."""

    stages: int = 5  # of a loop: loads under way
    warps: int = 8  # in attention
    rows: int = 128  # of queries in a prompt's tile
    slots: int = 64  # of context at a time
    single: int = 4  # warps, where a program has the heads of one token: as many, if rows are fewer than 64
    side: int = 128  # tokens, and outputs, of a product's tile
    inputs: int = 256  # bytes of a row that one step of a product of experts takes
    options: tuple[tuple[str, int], ...] = ()  # of the compiler, for kernels that multiply


# By Triton's name of the compiler's target and the lanes of a wave. AMD's loads wait in registers, not in shared
# memory: more than two stages spill. A program of 4 waves of 64 has 512 registers a lane, one of 8 half as many. Waves
# of 32 lanes have 256 in any case, each holds all of a tile's keys, and RDNA 3 holds factors in both halves of a wave:
# 8 waves share what is loaded.
CUTS: Mapping[tuple[str, int], Cut] = {
    ("cuda", 32): Cut(),
    ("hip", 64): Cut(warps=4, stages=2, options=(("matrix_instr_nonkdim", 16),)),
    ("hip", 32): Cut(stages=1, rows=64, slots=16, single=8, side=64, inputs=128),
}
SHARED: Mapping[str, int] = {"gfx950": 160 * 1024}  # bytes of LDS that one program may have; 64 KiB elsewhere


@functools.cache
def cut_for(device: torch.device) -> Cut:
    """Of this process's device; the interpreter's is anyone's."""
    if device.type == "cpu":
        return Cut()
    import triton

    target = triton.runtime.driver.active.get_current_target()
    return CUTS.get((target.backend, target.warp_size), Cut())
