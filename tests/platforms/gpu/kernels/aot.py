"""Compiles every GPU kernel for three architectures, without a GPU; prints a line of JSON for each compilation.

A kernel's first variant is compiled for all three, its others for one each, in turn; those for float16 that have a
twin for bfloat16, and rare ones, not at all. With --every, all for all; with --spread, each kernel once.

    python tests/platforms/gpu/kernels/aot.py [--cache FOLDER] [--jobs N] [--only PART OF A NAME] [--every | --spread]

In a process of its own: where Triton interprets kernels it compiles none. TRITON_CACHE_DIR is set to the cache.
"""

import argparse
import functools
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

KERNELS = "quintet.platforms.gpu.kernels"
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes of shared memory that a program may have
NATIVE_E4M3 = 89  # the first architecture on which Triton knows the type
CACHE = Path(__file__).parents[4] / "build" / "triton"
Result = dict[str, Any]


def complaint(result: Result) -> str | None:
    """What is wrong with one line of output."""
    what = f"{result['kernel']} for cuda:{result['target']}"
    if "error" in result:
        return f"{what} does not compile: {result['error']}"
    if result["spills"] > result["max_spills"]:
        return f"{what} spills {result['spills']} registers, {result['max_spills']} allowed"
    if result.get("copied", 0) > result.get("aligned", 16):
        return f"{what} copies {result['copied']} bytes at a time of rows aligned to {result['aligned']}"
    if result["shared"] > SHARED[result["target"]]:
        return f"{what} takes {result['shared']} bytes of shared memory of {SHARED[result['target']]}"
    return None


@functools.cache
def found() -> list[tuple[str, Any]]:
    """(module, variant) of every module that has variants()."""
    names = [module.name for module in pkgutil.iter_modules(importlib.import_module(KERNELS).__path__)]
    kernels = {name: importlib.import_module(f"{KERNELS}.{name}") for name in names}
    return [(name, v) for name, module in kernels.items() if hasattr(module, "variants") for v in module.variants()]


def jobs(only: str, every: bool, spread: bool = False) -> list[tuple[int, int]]:
    """(index of a variant, target), those that take long first as far as their names tell."""
    named = [(index, f"{module}: {variant.name}", variant) for index, (module, variant) in enumerate(found())]
    names = [name for _, name, _ in named]
    assert len(set(names)) == len(names), f"two variants have one name: {sorted(names)}"
    # float16 differs from bfloat16 by the names of instructions
    wanted = [each for each in named if only in each[1] and (every or _usual(each, set(names)))]
    wanted.sort(key=lambda each: ("attend" not in each[1], each[1]))
    seen: Counter[Any] = Counter()
    found_jobs = []
    for index, _, variant in wanted:
        targets = [target for target in SHARED if target >= _least(variant)]
        if spread and seen[variant.kernel]:
            continue
        turn = (len(seen) if spread else seen[variant.kernel]) % len(targets)
        chosen = targets if not spread and (every or not seen[variant.kernel]) else targets[turn : turn + 1]
        found_jobs += [(index, target) for target in chosen]
        seen[variant.kernel] += 1
    return found_jobs


def _usual(named: tuple[int, str, Any], names: set[str]) -> bool:
    return not (named[2].rare or _twin(named[1], names))


def _twin(name: str, names: set[str]) -> bool:
    return "fp16" in name and name.replace("fp16", "bf16") in names


def _least(variant: Any) -> int:
    return NATIVE_E4M3 if "*fp8e4nv" in variant.signature.values() else 0


def examine(job: tuple[int, int]) -> Result:
    """Compiles one variant for one target."""
    index, target = job
    module, variant = found()[index]
    result: Result = {"kernel": f"{module}: {variant.name}", "target": target, "max_spills": variant.max_spills}
    try:
        compiled = _compiled(variant, target)
    except Exception as error:  # whatever a compiler says is the result
        lines = [line for line in str(error).splitlines() if line.strip()]
        return result | {"error": f"{type(error).__name__}: {' / '.join(lines[-3:])[-600:]}"}
    registers, stack = _usage(compiled.asm["cubin"])
    result |= {"copied": _copied(compiled.asm["ptx"]), "aligned": _aligned(variant)}
    return result | {"registers": registers, "spills": stack // 4, "shared": compiled.metadata.shared}


def _copied(ptx: str) -> int:
    """The most bytes that one asynchronous copy to shared memory takes."""
    return max((int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global .*?\], (\w+)", ptx)), default=0)


def _aligned(variant: Any) -> int:
    """Bytes that rows of a paged cache are aligned to, where a kernel reads one: 16 at most."""
    nbytes = {"*i8": 1, "*u8": 1, "*fp8e4nv": 1, "*fp32": 4}.get(variant.signature.get("kv", ""), 2)
    row = int(variant.constexprs.get("WIDTH", 16)) * nbytes if "kv" in variant.signature else 16
    return min(16, row & -row)


def _compiled(variant: Any, target: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(source(variant), target=GPUTarget("cuda", target, 32), options=options)


def source(variant: Any) -> Any:
    """As a launch would: pointers are to allocations of torch, so multiples of 16 bytes; "i32:16" is such a number."""
    from triton.compiler import ASTSource

    names, given = variant.kernel.arg_names, variant.signature
    unknown = (set(given) | set(variant.constexprs)) - set(names)
    if unknown:
        raise ValueError(f"it has no parameters {', '.join(sorted(unknown))}")
    types = {name: given.get(name, "constexpr").split(":")[0] for name in names}
    missing = [n for n in names if types[n] == "constexpr" and n not in variant.constexprs]
    if missing:
        raise ValueError(f"nothing is said of {', '.join(missing)}")
    even = [n for n in names if given.get(n, "").startswith("*") or given.get(n, "").endswith(":16")]
    return ASTSource(
        fn=variant.kernel,
        signature=types,
        constexprs=dict(variant.constexprs),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: Triton's kernels have one for spilled registers alone."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout)
    if usage is None:
        raise ValueError(f"cuobjdump says nothing of registers: {said.stdout} {said.stderr}")
    return int(usage[1]), int(usage[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", default=str(CACHE), help="folder that keeps what was compiled")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument("--every", action="store_true", help="every variant for every architecture")
    parser.add_argument("--spread", action="store_true", help="each kernel's first variant for one architecture")
    args = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = args.cache
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what launches have by default; silences a warning
    if os.environ.pop("TRITON_INTERPRET", None):
        raise SystemExit("TRITON_INTERPRET is set: kernels are interpreted, and nothing would be compiled; unset it")
    work = jobs(args.only, args.every, args.spread)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
        for result in pool.map(examine, work):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
