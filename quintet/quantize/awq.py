"""AWQ (Lin et al. 2023): inputs that are large are scaled down and their weights up, so that rounding spares them.

The scales go into what stands before: a norm's weights, or the outputs of the product before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quintet.quantize.calibration_run import CalibratedLayer
from quintet.quantize.rounding import floats, round_to_nearest
from quintet.quantize.schemes import Scheme

STEPS = 20  # powers of the magnitudes that are tried
LIMIT = 1e-3  # of the output's largest number: what folding may change by rounding of floats
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "qkv_proj"), ("gate_proj", "up_proj", "gate_up_proj")


def scale_layer(layer: CalibratedLayer, chosen: Sequence[str], scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
    """Scales the layer's weights in place -> what the inputs of its products were divided by, by the products' names in
    the layer. ValueError if the layer then computes something else."""
    before, scaled = layer.output(), {}
    for moments in layer.watch.groups:
        members = [layer.module.get_submodule(name) for name in moments.names]
        source = _source(layer.module, moments.names[0].rpartition(".")[2])
        rounded = [_weight(layer.module.get_submodule(name)) for name in moments.names if name in chosen]
        heads = None if source is None else _heads(layer.module, source, len(moments.magnitudes))
        if source is None or heads is None or not rounded:
            continue
        magnitudes = _shared(moments.magnitudes, heads).mean(1, keepdim=True).expand(heads).reshape(-1)
        scales = best_scales(rounded, moments.sample, magnitudes, (scheme, dtype))
        for each in members:
            _weight(each).mul_(scales)
        _divide(source, _shared(scales, heads)[:, 0].reshape(-1))
        scaled.update(dict.fromkeys(moments.names, scales))
    _refuse_changed(before, layer.output(), layer.path)
    return scaled


def best_scales(
    weights: Sequence[Tensor], sample: Tensor, magnitudes: Tensor, how: tuple[Scheme, torch.dtype]
) -> Tensor:
    """[K]: the scales of the least error of these products of sample [T, K], of those that are powers of the inputs'
    mean magnitudes."""
    magnitudes = magnitudes.clamp(min=1e-6)
    least, found = float("inf"), torch.ones_like(magnitudes)
    for step in range(STEPS):
        scales = magnitudes ** (step / STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = 0.0
        for weight in weights:
            off = floats(round_to_nearest(weight * scales, *how), how[0]) / scales - weight
            error += (sample @ off.t()).square().sum().item()
        if error < least:
            least, found = error, scales
    return found


def _source(layer: nn.Module, name: str) -> nn.Module | None:
    """Returns the module that a product's inputs come from by multiplication alone, each by itself; None if unknown."""
    before = "input_layernorm" if hasattr(layer, "input_layernorm") else None
    behind = "post_attention_layernorm" if before else None
    behind = "pre_feedforward_layernorm" if hasattr(layer, "pre_feedforward_layernorm") else behind
    known = {
        **dict.fromkeys(ATTENTION, before),
        **dict.fromkeys(MLP, behind),
        "o_proj": "self_attn.v_proj",
        "down_proj": "mlp.up_proj",
    }
    path = known.get(name)
    try:
        return layer.get_submodule(path) if path else None
    except AttributeError:
        return None


def _heads(layer: nn.Module, source: nn.Module, inputs: int) -> tuple[int, int, int] | None:
    """(heads of the source, inputs that share each, width): query heads share the values of theirs. None if unknown."""
    outputs = len(_weight(source))
    if outputs == inputs:
        return 1, 1, inputs
    width = getattr(getattr(layer, "self_attn", None), "head_dim", 0)
    if not width or inputs % outputs or outputs % width:
        return None
    return outputs // width, inputs // outputs, width


def _shared(x: Tensor, heads: tuple[int, int, int]) -> Tensor:
    return x.reshape(heads)


def _divide(source: nn.Module, scales: Tensor) -> None:
    offset = 1.0 if "Gemma" in type(source).__name__ else 0.0  # its norms' weights are kept around 0
    weight = _weight(source)
    own = scales[:, None] if isinstance(source, nn.Linear) else scales
    weight.copy_((weight + offset) / own - offset)
    bias = getattr(source, "bias", None)
    if isinstance(bias, Tensor):
        bias.div_(scales)


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor), "linear modules and norms have one"
    return weight


def _refuse_changed(before: Tensor, after: Tensor, path: str) -> None:
    off = ((after - before).abs().max() / before.abs().max()).item()
    if not off < LIMIT:
        raise ValueError(f"{path} computes something else once it is scaled (off by {off:.2g}); use gptq or rtn")
