"""Quantized checkpoints by their formats' published rules, and the model that holds what they stand for."""

import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from quintet_tools.checkpoints.tiny import Tiny

Quantize = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]  # name, weight -> tensors, what they stand for


def awq(tiny: Tiny, group: int, ignored: Sequence[str] = ()) -> Tiny:
    """As AutoAWQ 0.2.9 writes it (WQLinear_GEMM): 4 bits, asymmetric, each group of inputs by itself."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        size = inputs if group == -1 else group
        groups = weight.reshape(outputs, -1, size)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round().clamp(0, 15)
        values = (groups / scales + zeros).round().clamp(0, 15)
        tensors = {
            f"{name}.qweight": packed(values.reshape(outputs, inputs).t().int()),
            f"{name}.qzeros": packed(zeros[..., 0].t().int()),
            f"{name}.scales": scales[..., 0].t().half().contiguous(),
        }
        return tensors, ((values - zeros) * scales).reshape(outputs, inputs)

    said = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return written(tiny, quantize, {**said, "modules_to_not_convert": list(ignored) or None}, [*ignored, "lm_head"])


def packed(values: Tensor) -> Tensor:
    """[M, N] -> int32 [M, N / 8], a number at a time: its i-th four bits, from the lowest, are of output ORDER[i]."""
    rows = []
    for row in values.tolist():
        words = []
        for first in range(0, len(row), 8):
            word = sum(row[first + place] << 4 * i for i, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
            words.append(word - (1 << 32) if word >> 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def fp8(tiny: Tiny, block: tuple[int, int] = (128, 128), ignored: Sequence[str] = ()) -> Tiny:
    """As DeepSeek-V3 and Qwen3 publish it: e4m3, one scale for each block, those at the ends being smaller."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        blocks = [[each.abs().max() / 448 for each in rows.split(block[1], 1)] for rows in weight.split(block[0])]
        scales = torch.tensor(blocks)
        wide = scales.repeat_interleave(block[0], 0)[: len(weight)].repeat_interleave(block[1], 1)[:, : weight.shape[1]]
        values = (weight / wide).to(torch.float8_e4m3fn)
        return {f"{name}.weight": values, f"{name}.weight_scale_inv": scales}, values.float() * wide

    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return written(tiny, quantize, {**said, "modules_to_not_convert": list(ignored)}, [*ignored, "lm_head"])


EXPERT = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
GATES, UPS = ("w1", "gate_proj"), ("w3", "up_proj")


@torch.no_grad()
def written(tiny: Tiny, quantize: Quantize, said: dict[str, Any], ignored: Sequence[str]) -> Tiny:
    """The checkpoint with every product but what is ignored quantized, weights [in, out] and experts' too."""
    folder, model = Path(tempfile.mkdtemp(dir=tiny.folder.parent)), copy.deepcopy(tiny.reference)
    tensors = load_file(tiny.folder / "model.safetensors")
    for name, weight in places(model, tensors).items():
        if any(each in name for each in ignored):
            continue
        made, known = quantize(name, weight.float())
        del tensors[f"{name}.weight"]
        weight.copy_(known)
        tensors |= made
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((tiny.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return Tiny(folder, tiny.config, model)


def places(model: Any, tensors: Iterable[str]) -> dict[str, Tensor]:
    """The products that the tensors are of, by the files' names, and where transformers' model has each: [N, K]."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            found[name] = module.weight.t() if isinstance(module, Conv1D) else module.weight
    for named in filter(None, map(EXPERT.fullmatch, tensors)):
        held, expert = model.get_submodule(f"{named[1]}.mlp.experts"), int(named[2])
        gate, up = held.gate_up_proj[expert].chunk(2)
        place = gate if named[3] in GATES else up if named[3] in UPS else held.down_proj[expert]
        found[named[0].removesuffix(".weight")] = place
    return found
