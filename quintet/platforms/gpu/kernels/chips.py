"""Limits of a family of chips, as data, and the choices that were measured best on one chip: tables/.

The numbers of families are those with which kernels, compiled ahead, keep most in registers, and all in shared memory.
A table is written by `benchmarks/gpu_sweep.py --table`; where it has nothing, the kernels' own choice stands.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

TABLES = Path(__file__).with_name("tables")
ROWS = ("FEW", "FEW_BLOCKS", "FEW_INTEGERS", "FEW_EACH")  # of torch_linear.py
BLOCKS = ("rows", "slots", "warps", "stages")
TILE = ("tokens", "outputs", "warps", "stages")


@dataclass(frozen=True, eq=False)
class ChipTable:
    """The choices that were measured on one chip."""

    chip: str = ""  # as its driver names it
    measured: Mapping[str, Any] = field(default_factory=dict)  # when, and with which versions: for readers alone
    rows: Mapping[str, int] = field(default_factory=dict)  # of ROWS
    split: int = 0  # slots of context in a split of decode attention, at least; 0: the kernels' own
    # by the layer, as str(Layer) has it: BLOCKS of decode attention but for rows, and of prompts
    decode: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    prompts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    products: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict
    )  # TILE, by "KIND MOST": up to 16, 64 or "more" tokens


NOTHING = ChipTable()


@dataclass(frozen=True)
class ChipLimits:
    """Limits of a program on a chip; they cap what a kernel's own table asks for."""

    stages: int = 5  # of a loop: loads under way
    warps: int = 8  # in attention
    rows: int = 128  # of queries in a prompt's tile
    slots: int = 64  # of context at a time
    single: int = 4  # warps, where a program has the heads of one token: as many, if rows are fewer than 64
    side: int = 128  # tokens, and outputs, of a product's tile
    inputs: int = 256  # bytes of a row that one step of a product of experts takes
    options: tuple[tuple[str, int], ...] = ()  # of the compiler, for kernels that multiply
    apart: bool = False  # no two products of a loop go into one accumulator
    table: ChipTable = NOTHING


# By Triton's name of the compiler's target and the lanes of a wave. AMD's loads wait in registers, not in shared
# memory: more than two stages spill. A program of 4 waves of 64 has 512 registers a lane, one of 8 half as many. Waves
# of 32 lanes have 256 in any case, each holds all of a tile's keys, and RDNA 3 holds factors in both halves of a wave:
# 8 waves share what is loaded.
CHIP_LIMITS: Mapping[tuple[str, int], ChipLimits] = {
    ("cuda", 32): ChipLimits(),
    ("hip", 64): ChipLimits(warps=4, stages=2, options=(("matrix_instr_nonkdim", 16),)),
    ("hip", 32): ChipLimits(stages=1, rows=64, slots=16, single=8, side=64, inputs=128),
    ("xpu", 32): ChipLimits(warps=4, stages=2),  # a guess on the safe side: nothing was compiled ahead for it
}
SHARED: Mapping[str, int] = {"gfx950": 160 * 1024}  # bytes of LDS that one program may have; others have 64 KiB


@functools.cache
def chip_limits_for(device: torch.device) -> ChipLimits:
    """Returns the limits for this process's device; the interpreter has the defaults."""
    if device.type == "cpu":
        return ChipLimits(table=table_of("interpreter"))
    import triton

    target = triton.runtime.driver.active.get_current_target()
    table = table_of(torch.get_device_module(device).get_device_name(device))
    cut = CHIP_LIMITS.get((target.backend, target.warp_size), ChipLimits())
    return replace(cut, apart=_apart(target.backend, target.arch), table=table)


def table_path(chip: str, folder: Path = TABLES) -> Path:
    """The file of a chip's table: its name in small letters, other signs as one "_"."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '_', chip.lower()).strip('_')}.json"


def table_of(chip: str, folder: Path = TABLES) -> ChipTable:
    """The chip's table; an empty one where there is no file."""
    path = table_path(chip, folder)
    if not path.exists():
        return NOTHING
    try:
        return checked(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def checked(found: Mapping[str, Any]) -> ChipTable:
    """A table as its file has it; ValueError that names what is unknown or no such number."""
    known = {each.name for each in fields(ChipTable)}
    _refuse("a table", found, known)
    _refuse("rows", found.get("rows", {}), ROWS)
    for section, names in (("decode", BLOCKS[1:]), ("prompts", BLOCKS), ("products", TILE)):
        for key, values in found.get(section, {}).items():
            _refuse(f"{section}, {key}", values, names)
            for name, value in values.items():
                _check_number(f"{section}, {key}, {name}", value, 1, power=name != "stages")
    for name, value in found.get("rows", {}).items():
        _check_number(f"rows, {name}", value, 0)
    if "split" in found:
        _check_number("split", found["split"], 64, power=True)
    return ChipTable(**found)


def _refuse(what: str, found: Mapping[str, Any], known: Any) -> None:
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(f"{what} has {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _check_number(what: str, value: Any, least: int, power: bool = False) -> None:
    if type(value) is not int or value < least or (power and value & (value - 1)):
        raise ValueError(f"{what} is {value!r}, not {'a power of two' if power else 'a whole number'} from {least} on")


def _apart(backend: str, architecture: int | str) -> bool:
    """True if Triton up to 3.7 computes two products into one accumulator wrong: from 64 rows on, on datacenter
    Blackwell (compute capability 10; triton #10821, mended by #10988)."""
    return backend == "cuda" and 100 <= int(architecture) < 120
