"""What other choices than ours would give on a GPU: splits of decode attention, warps and stages of its kernel.

python benchmarks/gpu_sweep.py [--device cuda] [--results FILE]

Each choice is a name in a kernel's module that another value takes the place of, in this process alone. A choice that
does not compile, or whose result is not ours, is a line that says so.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # the path is set first, so that the script runs by itself

from benchmarks.gpu_profile import clocked
from benchmarks.tpu_step import batch
from quintet.ops import Op
from quintet.ops.attention import page_shape
from quintet.platforms.gpu import triton_attention  # noqa: F401  registers what is measured
from quintet.platforms.gpu.triton_probe import device_here
from quintet.types import AttentionSpec, Books
from scripts.on_gpu.jobs import note

SPLITS = (64, 128, 256, 512, 1024)
WARPS, STAGES = (2, 4, 8), (2, 3, 4, 5)
LAYERS = {"llama-3.1-8b": (32, 8, 128), "llama-3.2-1b": (32, 8, 64), "mqa": (48, 1, 128)}  # heads, KV heads, dim
CONTEXTS = ((1, 512), (8, 512), (64, 512), (64, 4096), (1, 32768))  # requests, tokens behind each
TOLERANCE = 2e-2  # between results of one step in bfloat16


@contextlib.contextmanager
def given(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """The module has another value under this name meanwhile; AttributeError if it has none."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def attended(layer: tuple[int, int, int], requests: int, context: int, device: torch.device) -> Callable[[], Any]:
    """Decode attention over random pages, by Triton."""
    heads, kv_heads, dim = layer
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, torch.bfloat16, 16)
    host = batch(requests, 1, context - 1)
    there = host.on([torch.from_numpy(each).to(device) for each in host.leaves()])
    shape = (int(host.groups[0].table.max()) + 1, *page_shape(spec))
    kv = torch.randn(shape, dtype=torch.bfloat16, device=device)
    q = torch.randn(requests, heads, dim, dtype=torch.bfloat16, device=device)
    books = Books(there, there.groups[0])
    return partial(Op.registry["paged_attention"].providers["triton"], q, kv, books, spec, None)


def choices() -> Iterator[tuple[dict[str, Any], ModuleType, str, Any]]:
    """(what is chosen, the module, its name there, the value)."""
    from quintet.platforms.gpu.kernels import attention_split

    for split in SPLITS:
        yield {"split": split}, attention_split, "SPLIT", split
    blocks = attention_split.split_blocks
    for warps in WARPS:
        for stages in STAGES:
            other = partial(_other, blocks, warps, stages)
            yield {"warps": warps, "stages": stages}, attention_split, "split_blocks", other


def _other(blocks: Callable[..., Any], warps: int, stages: int, *args: Any) -> Any:
    return replace(blocks(*args), warps=warps, stages=stages)


def measure(device: torch.device, small: bool, tell: Callable[..., None]) -> int:
    """-> choices that failed."""
    failed = 0
    layers = {"tiny": (4, 2, 16)} if small else LAYERS
    for name, layer in layers.items():
        for requests, context in ((2, 70),) if small else CONTEXTS:
            call = attended(layer, requests, context, device)
            want, rounds = call().float(), 1 if small else 50
            ours = clocked(call, device, rounds)
            about = {"layer": name, "requests": requests, "context": context}
            tell(kind="ours", **about, us=round(ours * 1e6, 2))
            print(f"{name} {requests} x {context}: {ours * 1e6:.1f} us", flush=True)
            for chosen, module, attribute, value in choices():
                try:
                    with given(module, attribute, value):
                        off = float((call().float() - want).abs().max())
                        us = round(clocked(call, device, rounds) * 1e6, 2)
                except Exception as error:  # too much shared memory, say
                    failed += 1
                    tell(kind="failed", **about, **chosen, why=f"{type(error).__name__}: {error}"[:300])
                    continue
                print(f"  {chosen}: {us} us{'' if off <= TOLERANCE else f', off by {off:.2g}'}", flush=True)
                tell(kind="sweep", **about, **chosen, us=us, off=off)
    return failed


def main() -> int:
    """0, also where some choices cannot be: that is a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="for the log: the device is torch's own")
    parser.add_argument("--results", type=Path, help="a file that gets a line for each figure")
    args = parser.parse_args()
    device = device_here()
    if device is None:
        print("nothing was measured: torch finds no GPU", file=sys.stderr)
        return 1
    tell = partial(note, args.results) if args.results else lambda **values: None
    print(f"{measure(device, device.type == 'cpu', tell)} choices could not be measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
