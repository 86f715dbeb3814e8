"""Compiles every GPU kernel for AMD's architectures, without a GPU; prints a line of JSON for each compilation.

    python tests/platforms/rocm/aot_hip.py [--targets gfx942,gfx1100] [--only PART OF A NAME] [--spread] [--jobs N]

Each with the numbers that launches take there (kernels/chips.py). --spread: a few kernels for each, in turn; else all
but those for float16 that have a twin for bfloat16. In a process of its own: where Triton interprets kernels it
compiles none.
"""

import argparse
import functools
import json
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from quintet.platforms.gpu.kernels.chips import CHIP_LIMITS, SHARED, ChipLimits
from tests.platforms.gpu.kernels import aot

TARGETS = {"gfx90a": 64, "gfx942": 64, "gfx950": 64, "gfx1100": 32, "gfx1200": 32}  # lanes of a wave
LDS = 64 * 1024
HEAVY = ("attention: attend_tiles", "attention_split: attend_splits", "quantized: product", "moe: experts'")
# Registers that go to memory where no tile is small enough. A wave of 32 lanes has 256: of heads of 256 numbers, 16
# rows of results in float32 take 128 of them, and 16 of queries another 128 on RDNA 3, which holds factors twice (RDNA
# 4 does not, and keeps them); MLA's results of 512 numbers take all 256.
WIDE = {("gfx1100", "x256 "): 64, ("gfx1100", "x576 "): 640, ("gfx1200", "x576 "): 192}
Result = dict[str, Any]


def complaint(result: Result) -> str | None:
    """What is wrong with one line of output."""
    what, target = f"{result['kernel']} for {result['target']}", result["target"]
    if "error" in result:
        return f"{what} does not compile: {result['error']}"
    allowed = spills(result["kernel"], target)
    if result["spills"] > allowed or (not allowed and result["stack"]):
        return f"{what} spills {result['spills']} registers, {result['stack']} bytes a lane; {allowed} allowed"
    if result["shared"] > lds(target):
        return f"{what} takes {result['shared']} bytes of LDS of {lds(target)}"
    return None


def spills(kernel: str, target: str) -> int:
    """Registers that may go to memory."""
    return next((most for (chip, heads), most in WIDE.items() if chip == target and f"{heads}cache" in kernel), 0)


def lds(target: str) -> int:
    return SHARED.get(target, LDS)


@functools.cache
def found(target: str) -> list[tuple[str, Any]]:
    """aot.found() as launches are on that architecture."""
    from quintet.platforms.gpu.kernels import attention, attention_split, moe, quantized
    from quintet.platforms.gpu.kernels.attention_layer import DeviceLimits

    here = cut(target)
    limits = DeviceLimits(lds(target), e4m3=True, cut=here)
    own = {"attention": attention.variants(limits), "attention_split": attention_split.variants(limits)}
    own |= {"moe": moe.variants(here), "quantized": quantized.variants(here)}
    others = [(module, variant) for module, variant in aot.found() if module not in own]
    fewer = [(module, replace(each, num_stages=min(each.num_stages, here.stages))) for module, each in others]
    named = [*((module, each) for module, all_of in own.items() for each in all_of), *fewer]
    names = {f"{module}: {each.name}" for module, each in named}
    usual = [(module, each) for module, each in named if not each.rare]  # rare layers were not looked at here
    return [(module, each) for module, each in usual if not aot._twin(f"{module}: {each.name}", names)]


def cut(target: str) -> ChipLimits:
    return CHIP_LIMITS["hip", TARGETS[target]]


def jobs(targets: list[str], only: str, spread: bool) -> list[tuple[int, str]]:
    """(index of a variant, target)"""
    chosen = []
    for turn, target in enumerate(targets):
        named = [(index, f"{module}: {variant.name}") for index, (module, variant) in enumerate(found(target))]
        wanted = [each for each in named if only in each[1]]
        if spread:  # of each heavy kernel another variant for each target
            of_each = [[index for index, name in wanted if name.startswith(kernel)] for kernel in HEAVY]
            chosen += [(some[turn * len(some) // len(targets)], target) for some in of_each if some]
        else:
            chosen += [(index, target) for index, _ in wanted]
    return chosen


def examine(job: tuple[int, str]) -> Result:
    """Compiles one variant for one target."""
    index, target = job
    module, variant = found(target)[index]
    result: Result = {"kernel": f"{module}: {variant.name}", "target": target}
    try:
        compiled = _compiled(variant, target)
    except Exception as error:  # whatever a compiler says is the result
        lines = [line for line in str(error).splitlines() if line.strip()]
        return result | {"error": f"{type(error).__name__}: {' / '.join(lines[-3:])[-600:]}"}
    return result | usage(compiled.asm["amdgcn"]) | {"shared": compiled.metadata.shared}


def _compiled(variant: Any, target: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    multiplies = "product" in variant.name or "experts'" in variant.name or "attend" in variant.name
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    options |= dict(cut(target).options) if multiplies else {}
    return triton.compile(aot.source(variant), target=GPUTarget("hip", target, TARGETS[target]), options=options)


def usage(assembly: str) -> Result:
    """What LLVM's metadata of a kernel says (AMDGPUUsage, code object V5): vector registers of a lane, those that went
    to memory, scalar ones that went to lanes of vector registers, and bytes of a lane's stack."""
    names = {
        "registers": "vgpr_count",
        "spills": "vgpr_spill_count",
        "scalar": "sgpr_spill_count",
        "stack": "private_segment_fixed_size",
    }
    found = {name: re.search(rf"\.{field}:\s*(\d+)", assembly) for name, field in names.items()}
    if missing := [name for name, match in found.items() if match is None]:
        raise ValueError(f"the metadata says nothing of {', '.join(missing)}")
    return {name: int(match[1]) for name, match in found.items() if match is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", default=str(aot.CACHE), help="folder that keeps what was compiled")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument("--targets", default=",".join(TARGETS), help="architectures, by comma")
    parser.add_argument("--spread", action="store_true", help="one variant of each heavy kernel per architecture")
    args = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = args.cache
    if os.environ.pop("TRITON_INTERPRET", None):
        raise SystemExit("TRITON_INTERPRET is set: kernels are interpreted, and nothing would be compiled; unset it")
    work = jobs(args.targets.split(","), args.only, args.spread)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
        for result in pool.map(examine, work):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
