"""Instructions of quantized products on AVX2, per byte of weight, counted by valgrind: no other process changes them.

A product is counted as the difference between runs of 5 and of 25, on one thread, 1,024 inputs and outputs: with the
call from Python, the preparation of rows, and the scales. Valgrind has no AVX-512, so that the kernels for AVX2 are
chosen, or those for less with --isa. With two extensions (--extension, of an older build) their counts stand side
by side.
"""

import argparse
import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FIRST, CALLS = 5, 20  # what is warmed up in the first is not counted
SIZE = 1024  # inputs and outputs
COLUMNS, LEVEL_INPUTS = 64, 256


@dataclass(frozen=True)
class Kernel:
    scheme: int  # as csrc/cpu/kernels/quantized.h numbers them
    group: int  # inputs that share a scale; 0: all
    quad: int  # bytes of four inputs of a block
    mins: bool = False
    zeros: bool = False
    levels: bool = False  # scales of two levels
    table: bool = False


KERNELS = {
    "int4, Q4_0": Kernel(3, 32, 128),
    "int4 of 128": Kernel(3, 128, 128),
    "AWQ": Kernel(3, 128, 128, zeros=True),
    "Q4_1": Kernel(3, 32, 128, mins=True),
    "Q4_K": Kernel(8, 32, 128, mins=True, levels=True),
    "Q5_K": Kernel(10, 32, 192, mins=True, levels=True),
    "Q6_K": Kernel(10, 16, 192, levels=True),
    "Q8_0": Kernel(4, 32, 256),
    "Q5_0": Kernel(12, 32, 160),
    "int8": Kernel(4, 128, 256),
    "w8a8": Kernel(2, 0, 256),
    "IQ4_NL": Kernel(6, 32, 128, table=True),  # and IQ1_S, IQ2_XXS, IQ3_XXS, IQ3_S
    "IQ2_S": Kernel(6, 16, 128, table=True),  # and IQ1_M, IQ2_XS
    "int4, activation_bits=16": Kernel(1, 32, 128),
    "int8, activation_bits=16": Kernel(0, 128, 256),
    "Q4_K, activation_bits=16": Kernel(7, 32, 128, mins=True, levels=True),
}


def installed() -> str:
    spec = importlib.util.find_spec("quintet._cpu")
    if spec is None or spec.origin is None:
        raise SystemExit("quintet._cpu is not built: run make setup, or give a file with --extension")
    return spec.origin


def load(extension: str) -> Any:
    """quintet._cpu by itself: torch would take valgrind minutes."""
    loader = importlib.machinery.ExtensionFileLoader("_cpu", extension)
    spec = importlib.util.spec_from_loader("_cpu", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def scales_of(kernel: Kernel, random: np.random.Generator) -> np.ndarray:
    blocks, groups = SIZE // COLUMNS, SIZE // (kernel.group or SIZE)
    if not kernel.levels:
        return random.uniform(0.5, 1, (blocks, groups, COLUMNS)).astype(np.float16 if kernel.group else np.float32)
    codes = random.integers(-60, 60, (blocks, groups, COLUMNS)).astype(np.int8)
    units = random.uniform(0.5, 1, (blocks, SIZE // LEVEL_INPUTS, COLUMNS)).astype(np.float16)
    return np.concatenate([codes, units.view(np.int8).reshape(blocks, -1, COLUMNS)], 1)


def multiply(extension: Any, name: str, tokens: int, calls: int) -> int:
    """Runs the product so often. Returns the bytes of its weight, scales and what is beside them."""
    kernel, random = KERNELS[name], np.random.default_rng(1)
    groups = SIZE // (kernel.group or SIZE)
    weight = random.integers(0, 256, (SIZE // COLUMNS, SIZE // 4, kernel.quad), dtype=np.uint8)
    scales, mins = scales_of(kernel, random), scales_of(kernel, random)
    zeros = random.integers(0, 16, (SIZE // COLUMNS, groups, COLUMNS), dtype=np.uint8)
    table, x = random.integers(0, 256, 16, dtype=np.uint8), random.standard_normal((tokens, SIZE)).astype(np.float32)
    out = np.empty((tokens, SIZE), np.float32)
    beside = [(zeros, kernel.zeros), (mins, kernel.mins)]
    addresses = [array.ctypes.data if there else 0 for array, there in (*beside, (table, kernel.table))]
    call = (
        kernel.scheme, 0, out.ctypes.data, x.ctypes.data, SIZE, weight.ctypes.data, scales.ctypes.data, 0, tokens,
        SIZE, SIZE, groups, addresses[0], addresses[1], 0, 0, False, addresses[2],
    )  # fmt: skip
    for _ in range(calls):
        extension.quantized(*call)
    return weight.nbytes + scales.nbytes + sum(array.nbytes for array, there in beside if there)


def instructions(extension: str, isa: str, name: str, tokens: int, calls: int) -> tuple[int, int]:
    """Returns what valgrind counts in a process of so many products, and the weight's bytes."""
    child = [__file__, "--count", name, "--isa", isa, "--tokens", str(tokens), "--calls", str(calls), "--extension"]
    valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run(
        [*valgrind, sys.executable, *child, extension], capture_output=True, text=True, env=environment
    )
    counted = re.search(r"I\s+refs:\s+([\d,]+)", run.stderr)
    if run.returncode or not counted:
        raise SystemExit(f"valgrind counted nothing of {name!r}: {run.stderr[-2000:]}")
    return int(counted[1].replace(",", "")), int(run.stdout)


def measure(extension: str, isa: str, name: str, tokens: int) -> dict[str, float]:
    first, size = instructions(extension, isa, name, tokens, FIRST)
    count = (instructions(extension, isa, name, tokens, FIRST + CALLS)[0] - first) / CALLS
    return {
        "instructions": round(count),
        "per_byte": round(count / size, 3),
        "per_mac": round(count / SIZE**2 / tokens, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extension", nargs="+", help="files of quintet._cpu; default: the installed one")
    parser.add_argument("--isa", default="avx2", choices=["avx2", "baseline"])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--count", choices=list(KERNELS), help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    files = args.extension or [installed()]
    if args.count:
        extension = load(files[0])
        extension.choose_isa(args.isa)
        print(multiply(extension, args.count, args.tokens[0], args.calls))
        return
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name in args.kernels:
        for tokens in args.tokens:
            rows = [measure(file, args.isa, name, tokens) for file in files]
            found.setdefault(name, {})[str(tokens)] = rows
            counts = ", ".join(f"{row['instructions']:9} ({row['per_byte']:.3f} a byte)" for row in rows)
            print(f"{name:26} {tokens:3} rows: {counts}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"isa": args.isa, "products": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
