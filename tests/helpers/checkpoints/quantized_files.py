"""Checkpoints that quantization libraries wrote, and readers on tensors without a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from quintet.interface.weights import CheckpointSlice, ShardRange, StoredTensor
from quintet.layers.quantization.checkpoint_config import CheckpointQuantization, read_quantization_config
from quintet.ops.quantized import dequantized
from quintet_tools.checkpoints.tiny import Tiny

DATA = Path(__file__).parents[2] / "data" / "quantized"


def committed(name: str) -> Tiny:
    """The folder, and its configuration; there is no model of another's beside it."""
    config: Any = AutoConfig.from_pretrained(DATA / name)
    return Tiny(DATA / name, config, torch.nn.Module())


def expected(name: str) -> dict[str, Tensor]:
    """What the library that wrote it reads out of it."""
    return load_file(DATA / name / "wanted.safetensors")


def read_out(
    found: CheckpointQuantization,
    module: str,
    shape: tuple[int, int],
    tensors: Mapping[str, Tensor],
    shard: ShardRange | None = None,
) -> Tensor:
    """float32 [N, K] of a module, or a share of it; as floats and as the canonical matrix it stands for the same."""
    shard = shard or ShardRange((0, shape[0]), (0, shape[1]))
    part, reader = CheckpointSlice(f"{module}.weight", shape, ((0, shape[0]),)), found.plan.reader(module)
    assert reader is not None
    for name, entry in reader.stored(part).items():
        fits(name, tensors[name], entry)
    floats = reader.floats(part, shard, tensors)
    if not reader.format(shard).plain:
        matrix = reader.matrix(part, shard, tensors)
        assert (
            matrix.format == reader.format(shard) and matrix.scales is not None and matrix.scales.dtype == torch.float32
        )
        torch.testing.assert_close(dequantized(matrix), floats, rtol=0, atol=0)
    return floats


def fits(name: str, tensor: Tensor, entry: StoredTensor) -> None:
    """As the loader checks it."""
    assert entry.shape is None or tuple(tensor.shape) in (entry.shape, *entry.other_shapes), (
        f"{name} {list(tensor.shape)}"
    )
    assert tensor.dtype in entry.dtypes, f"{name} {tensor.dtype}"


def listed(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """As a checkpoint's files list them."""
    return {name: StoredTensor(tuple(each.shape), (each.dtype,)) for name, each in tensors.items()}


def plan_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CheckpointQuantization:
    found = read_quantization_config(config, lambda: listed(tensors))
    assert found is not None
    return found
