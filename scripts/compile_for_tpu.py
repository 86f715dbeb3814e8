"""Compiles a model's steps for a TPU that is not there: whether XLA and Mosaic take them, and what memory they need.

python scripts/compile_for_tpu.py [MODEL] [--topology v5e:2x2] [--devices 1] [--dtype bfloat16] [--tokens 16 2048]

Only config.json is read. Needs libtpu (pip install libtpu, or TPU_LIBRARY_PATH) and no chip.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # the path is set first, so that the script runs by itself
import torch
from torch import nn

from quintet.config import EngineConfig
from quintet.engine.executor.shape_buckets import plan_buckets
from quintet.engine.kv_cache.groups import KVCacheLayout, group_layers
from quintet.hub.resolve import load_model_config, resolve_model
from quintet.interface.platform import SingleRank
from quintet.interface.types import AttentionSpec, ShapeBucket, StateSpec
from quintet.layers.build import BuildContext, Layer, finalize
from quintet.layers.layer_state import LayerMixer
from quintet.model_loader.loader import declared_weights
from quintet.models import model_class
from quintet.ops import bind
from quintet.platforms.tpu import PLATFORM, attention, providers  # noqa: F401  registers the providers
from quintet.platforms.tpu.compile import Program
from quintet.platforms.tpu.device import TPUDevice
from quintet.platforms.tpu.sharding import placements
from quintet.platforms.tpu.states import JaxStates
from quintet.platforms.tpu.torchax_bridge import dtype_of

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """What a step is built for."""

    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16
    max_model_len: int = 2048
    pages: int = 1024
    slots: int = 33  # of states, where layers keep some


def program(hf_config: Any, devices: Sequence[Any], sizes: Sizes) -> tuple[Program, KVCacheLayout]:
    """The model's step on these devices, described, and the groups of its layers: no weight is read and nothing is
    allocated."""
    device = TPUDevice(devices)
    mixings: list[LayerMixer] = []

    def mixing(spec: AttentionSpec | StateSpec) -> LayerMixer:
        stateful = isinstance(spec, StateSpec)
        mixings.append(
            LayerMixer(JaxStates(spec, ops, device.kind) if stateful else attention.mixer(spec, ops, device.mesh))
        )
        return mixings[-1]

    ops = bind(PLATFORM.op_priority)
    build = BuildContext(ops, mixing, SingleRank(), sizes.dtype, sizes.page_size, sizes.max_model_len)
    model = model_class(hf_config)(hf_config, build).eval()
    finalize(model)
    arrangement = group_layers(mixings)
    weights = {}
    for each in declared_weights(model):
        for name, place in placements(each.weight, device.mesh).items():
            weights[f"{each.path}.{name}"] = place.shape
    for path, layer in model.named_modules():
        for name, tensor in layer.constants().items() if isinstance(layer, Layer) else ():
            weights[f"{path}.{name}"] = jax.ShapeDtypeStruct(
                tuple(tensor.shape), dtype_of(tensor.dtype), sharding=device.replicated
            )
    for name in weights:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, nn.Parameter(torch.empty(0), requires_grad=False))
    state = tuple(device.described(layout, sizes.pages) for layout in arrangement.layouts)
    state += tuple(device.described(layout, sizes.slots) for layout in arrangement.states)
    planner = next((each.mixer for each in mixings if isinstance(each.mixer, attention.RaggedAttention)), None)
    return Program(model, weights, state, planner, device.replicated, bool(arrangement.states)), arrangement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--topology", default="v5e:2x2", help="generation:chips, as JAX names them")
    parser.add_argument("--devices", type=int, default=1, help="of the topology, that share the model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tokens", type=int, nargs="*", default=[16, 2048], help="sizes of steps to compile")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    args = parser.parse_args()
    hf_config = load_model_config(
        resolve_model(EngineConfig(model=args.model, load_format="dummy")), {}
    ).get_text_config()
    sizes = Sizes(dtype=getattr(torch, args.dtype), max_model_len=min(2048, hf_config.max_position_embeddings))
    devices = topology(args.topology)[: args.devices]
    with attention.for_described_tpu():
        described, arrangement = program(hf_config, devices, sizes)
        pages = arrangement.table_widths(sizes.max_model_len // sizes.page_size)
        for bucket in plan_buckets(ShapeBucket(max(args.tokens), args.max_num_seqs, args.max_num_seqs, pages)):
            if bucket.tokens in args.tokens:
                print(json.dumps(compiled(described, bucket)))


def topology(name: str) -> list[Any]:
    """The devices of a slice of TPUs, to compile for."""
    from jax.experimental import topologies

    shape = name.partition(":")[2]
    bounds = tuple(int(side) for side in shape.split("x"))
    described = topologies.get_topology_desc(platform="tpu", topology_name=name, chips_per_host_bounds=(*bounds, 1)[:3])
    return list(described.devices)


def compiled(described: Program, bucket: ShapeBucket) -> dict[str, Any]:
    """What the compiler says of one step."""
    start = time.perf_counter()
    executable = described.trace(bucket).lower().compile()
    memory, cost = executable.memory_analysis(), executable.cost_analysis()
    text = executable.as_text()
    return {
        "tokens": bucket.tokens,
        "seconds": round(time.perf_counter() - start, 1),
        "arguments_gib": round(memory.argument_size_in_bytes / GIB, 3),
        "donated_gib": round(memory.alias_size_in_bytes / GIB, 3),
        "workspace_gib": round(memory.temp_size_in_bytes / GIB, 3),
        "tera_flops": round(cost.get("flops", 0) / 1e12, 4),
        "kernels": text.count("tpu_custom_call"),
        "collectives": {name: text.count(f" {name}(") for name in ("all-reduce", "all-gather", "all-to-all")},
    }


if __name__ == "__main__":
    main()
