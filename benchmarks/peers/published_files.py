"""A bfloat16 checkpoint in a published quantized format, by the rule of the nearest."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 128  # inputs that share a scale
BLOCK = 128  # outputs and inputs of a block of FP8
PACKED = 8  # numbers of 4 bits in an int32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each four bits of an int32 are of
Tensors = Iterator[tuple[str, Tensor]]


def levels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> whole numbers 0..15 around 8 [N, K] and scales [N, G]."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2, keepdim=True) / 7).clamp_min(1e-8)
    return ((groups / scales).round().clamp(-8, 7) + 8).flatten(1).int(), scales.squeeze(2)


def packed(values: Tensor, order: tuple[int, ...] = tuple(range(PACKED))) -> Tensor:
    """[M, 8 n] of 0..15 -> int32 [M, n]."""
    words = values.unflatten(1, (-1, PACKED))[:, :, list(order)].long() << torch.arange(0, 4 * PACKED, 4)
    return words.sum(2).to(torch.int64).where(words.sum(2) < 2**31, words.sum(2) - 2**32).int().contiguous()


def gptq(name: str, weight: Tensor) -> Tensors:
    values, scales = levels(weight)
    yield f"{name}.qweight", packed(values).t().contiguous()
    yield f"{name}.qzeros", packed(torch.full((scales.shape[1], len(weight)), 7))  # the format stores one less
    yield f"{name}.scales", scales.t().half().contiguous()
    yield f"{name}.g_idx", (torch.arange(weight.shape[1]) // GROUP).int()


def awq(name: str, weight: Tensor) -> Tensors:
    values, scales = levels(weight)
    yield f"{name}.qweight", packed(values.t(), AWQ_ORDER)
    yield f"{name}.qzeros", packed(torch.full((scales.shape[1], len(weight)), 8), AWQ_ORDER)
    yield f"{name}.scales", scales.t().half().contiguous()


def fp8(name: str, weight: Tensor) -> Tensors:
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.float().reshape(rows, BLOCK, columns, BLOCK)
    scales = (blocks.abs().amax((1, 3), keepdim=True) / 448).clamp_min(1e-12)
    yield f"{name}.weight", (blocks / scales).reshape(weight.shape).to(torch.float8_e4m3fn)
    yield f"{name}.weight_scale_inv", scales.reshape(rows, columns)


FORMATS: dict[str, tuple[Callable[[str, Tensor], Tensors], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}),
}


def write(checkpoint: Path, folder: Path, kind: str) -> None:
    """Every projection of a layer; whole or not at all."""
    quantize, said = FORMATS[kind]
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        stays = not name.endswith("_proj.weight")
        tensors.update([(name, tensor)] if stays else quantize(name.removesuffix(".weight"), tensor))
    save_file(tensors, part / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (part / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    for extra in checkpoint.glob("generation_config.json"):
        shutil.copy(extra, part)
    part.rename(folder)
