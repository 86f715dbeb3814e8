"""Times kernels beside what could take their place: attention of prompts beside cuDNN's, fp8 beside bfloat16.

python scripts/on_gpu/alternatives.py --results FILE [--device cuda]

Each figure is in microseconds, of launches in a graph. A product goes over nine matrices in turn, so that none is found
in the cache of the device.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # the path is set first, so that the script runs by itself

from benchmarks.gpu_profile import clocked
from benchmarks.tpu_step import batch
from quintet.interface.types import AttentionSpec, StepContext
from quintet.interface.weights import WeightFormat
from quintet.ops import Op
from quintet.ops.attention import page_shape
from quintet.ops.quantize import quantize
from quintet.platforms.cuda.cudnn_attention import attended
from quintet.platforms.gpu import providers
from quintet.platforms.gpu.ops import torch_linear as torch_products
from quintet.platforms.gpu.ops.probe import device_here
from quintet.platforms.gpu.ops.quantized import packed_linear
from scripts.on_gpu.jobs import note

LAYER = (32, 8, 128)  # heads, KV heads, head_dim
DECODES = ((1, 512), (16, 1024), (64, 4096), (256, 1024))  # requests, tokens behind each
PROMPTS = (2048, 8192)
WEIGHTS = ((6144, 4096), (28672, 4096), (4096, 14336))  # outputs, inputs: of Llama-3.1-8B
ROWS = (1, 16, 64, 512)
MATRICES = 9
REPEATS = 20
Tell = Callable[..., None]


def microseconds(call: Callable[[], object], device: torch.device, launches: int = 1) -> float | str:
    """Times each launch, in a graph on a GPU; the error's text where the call fails."""
    try:
        call()
        if device.type != "cuda":
            return round(clocked(call, device, 1) * 1e6 / launches, 1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPEATS):
                call()
        return round(clocked(graph.replay, device, 5) * 1e6 / launches / REPEATS, 1)
    except Exception as error:  # one figure less
        return f"{type(error).__name__}: {error}"[:200]


def attention(device: torch.device, small: bool, tell: Tell) -> None:
    """Times our paged attention, and cuDNN's attention of whole prompts over plain tensors."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, kv_heads, dim = (4, 2, 16) if small else LAYER
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, torch.bfloat16, 16)
    ours = Op.registry["paged_attention"].providers["triton"]
    decodes, prompts = (((2, 70),), (40,)) if small else (DECODES, PROMPTS)
    for requests, new, behind in [(each, 1, context) for each, context in decodes] + [(1, each, 0) for each in prompts]:
        host = batch(requests, new, behind)
        there = host.on([torch.from_numpy(each).to(device) for each in host.leaves()])
        step_context = StepContext(there, there.groups[0])
        q = _drawn(device, requests * new, heads, dim)
        kv = _drawn(device, int(step_context.group.block_table.max()) + 1, *page_shape(spec))
        us = {"ours": microseconds(partial(ours, q, kv, step_context, spec, None), device)}
        if not behind:
            query, key, value = (_drawn(device, 1, each, new, dim) for each in (heads, kv_heads, kv_heads))
            backends = [SDPBackend.MATH] if small else [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
            for backend in backends:
                with sdpa_kernel(backend):
                    call = partial(
                        torch.nn.functional.scaled_dot_product_attention, query, key, value, is_causal=True,
                        enable_gqa=True,
                    )  # fmt: skip
                    us[backend.name] = microseconds(call, device)
            us["cuDNN from pages"] = microseconds(partial(attended, q, kv, step_context, spec, new), device)
        print("attention", requests, new, behind, us, flush=True)
        tell(kind="attention", requests=requests, new=new, behind=behind, us=us)


def products(device: torch.device, small: bool, tell: Tell) -> None:
    """Times products in bfloat16, in fp8 by torch with its quantization of activations (both modes of accumulation),
    and in fp8 by our kernel."""
    fmt = WeightFormat("fp8a8", 8, 8, dtype=torch.float8_e4m3fn)
    for outputs, inputs in ((64, 64),) if small else WEIGHTS:
        weights = [_drawn(device, outputs, inputs) * 0.02 for _ in range(MATRICES)]
        matrices = [quantize(each.float(), fmt) for each in weights]
        for rows in (1,) if small else ROWS:
            x = _drawn(device, rows, inputs)
            eight = x.to(torch.float8_e4m3fn), torch.ones(rows, 1, device=device)
            ways: dict[str, list[Callable[[], Any]]] = {
                "bfloat16": [partial(torch.nn.functional.linear, x, each) for each in weights],
                "fp8 by torch": [partial(torch_products.by_float8, x, each, None) for each in matrices],
                "fp8 by ours": [partial(packed_linear, x, each, None, (outputs,)) for each in matrices],
                "fp8 product alone": [partial(_scaled, *eight, each, False) for each in matrices],
                "fp8 product alone, use_fast_accum": [partial(_scaled, *eight, each, True) for each in matrices],
            }
            us = {}
            for way, calls in ways.items():
                us[way] = microseconds(partial(_each, calls), device, MATRICES)
            print("product", outputs, inputs, rows, us, flush=True)
            tell(kind="product", outputs=outputs, inputs=inputs, rows=rows, us=us)
        del weights, matrices


def _each(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _scaled(x: torch.Tensor, own: torch.Tensor, matrix: Any, fast: bool) -> torch.Tensor:
    """The product alone, of values in 8 bits that are there already."""
    scales = matrix.scales.t()
    return torch._scaled_mm(x, matrix.values.t(), own, scales, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _drawn(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--device", default="cuda", help="for the log: the device is torch's own")
    args = parser.parse_args()
    providers.register()
    device = device_here()
    if device is None:
        print("nothing was measured: torch finds no GPU", file=sys.stderr)
        return 1
    for measure in (attention, products):
        measure(device, device.type == "cpu", partial(note, args.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
