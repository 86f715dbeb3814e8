"""Holds folders that `quintet quantize` wrote against transformers with compressed-tensors, where these are.

    python scripts/check_quantized.py FOLDER ...        # needs torch, transformers, compressed-tensors; not quintet

For each: every weight that compressed-tensors unpacks, against the format's rule written out here; and the
logits of the model that transformers loads, against those of a float model with these weights.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

IDS = torch.arange(1, 97).reshape(2, 48)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def dequantized(folder: Path) -> dict[str, Tensor]:
    """Every weight of the folder in float32: (value - zero point) * scale, a group, row or block at a time."""
    held = tensors_of(folder)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    numbers = config["config_groups"]["group_0"]["weights"]
    bits, found = numbers["num_bits"], {}
    for name in [name for name in held if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        scales, zeros = held.pop(name).float(), held.pop(f"{module}.weight_zero_point", None)
        packed = held.pop(f"{module}.weight_packed", None)
        if packed is None:
            values = held.pop(f"{module}.weight").float()
        else:
            shape = held.pop(f"{module}.weight_shape").tolist()
            values = unpacked(packed, bits)[:, : shape[1]]
        if zeros is not None:
            zeros = unpacked(zeros.t().contiguous(), bits).t()[: len(values)]
        found[f"{module}.weight"] = (values - wide(zeros, values, numbers)) * wide(scales, values, numbers)
    return found | {name: each.float() for name, each in held.items() if not name.endswith("_scale")}


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [N, M] -> [N, 32 M / bits], from the lowest bits on, less half of what they reach."""
    values = [(words >> shift) & (2**bits - 1) for shift in range(0, 32, bits)]
    return torch.stack(values, -1).reshape(len(words), -1).float() - 2 ** (bits - 1)


def wide(x: Tensor | None, values: Tensor, numbers: dict) -> Tensor:
    """A number for each value."""
    if x is None:
        return torch.zeros(1)
    if numbers["strategy"] == "block":
        rows, columns = numbers["block_structure"]
        return x.repeat_interleave(rows, 0)[: len(values)].repeat_interleave(columns, 1)[:, : values.shape[1]]
    return x.repeat_interleave(values.shape[1] // x.shape[1], 1) if x.dim() == 2 else x


def round_inputs(model: torch.nn.Module, config: dict) -> None:
    """Inputs of what is quantized, as the file says: a token or a group of it at a time, or all alike."""
    numbers = config["config_groups"]["group_0"]["input_activations"]
    if numbers is None:
        return
    whole = numbers["type"] == "int"

    def hook(module: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        x = inputs[0]
        groups = x.reshape(*x.shape[:-1], -1, numbers["group_size"] or x.shape[-1])
        scales = module.input_scale if hasattr(module, "input_scale") else None
        if scales is None:
            scales = groups.abs().amax(-1, keepdim=True) / (127.5 if whole else 448)
        values = groups / scales
        values = values.round().clamp(-128, 127) if whole else values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        return ((values * scales).reshape(x.shape),)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in config["ignore"]:
            module.register_forward_pre_hook(hook)


@torch.no_grad()
def check(folder: Path) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

    known = dequantized(folder)
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    left = plain.load_state_dict(known, strict=False)
    assert not left.unexpected_keys and not [n for n in left.missing_keys if not n.startswith("lm_head")], left
    plain.tie_weights()
    round_inputs(plain, json.loads((folder / "config.json").read_text())["quantization_config"])
    settings = CompressedTensorsConfig(run_compressed=False)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.float32).eval()
    weights = dict(theirs.named_parameters())
    off = max((weights[n].float() - known[n]).abs().max().item() for n in known if n in weights)
    want, got = plain(IDS % config.vocab_size).logits, theirs(IDS % config.vocab_size).logits
    return (
        f"{folder.name}: weights off by {off:.3g}, logits by {(got - want).abs().max() / want.std():.3g} of their std"
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    for argument in sys.argv[1:]:
        print(check(Path(argument)), flush=True)
