"""Calibration: transformers' model, a layer at a time, over all samples at once.

transformers' model and not ours: its layers are plain modules with weights that can be read and replaced, where ours
hold what a platform packed. Its tensors have the checkpoint's names. Weights are on the meta device but for the current
layer; one forward pass takes all samples from layer to layer.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quintet.quantize.statistics import InputWatcher

AT_ONCE = 4096  # tokens that a layer is given at a time
QuantizeLayer = Callable[["CalibratedLayer"], None]
Read = Callable[[str], Tensor]


class CalibratedLayer:
    """A decoder layer with its weights, and what its products were given."""

    def __init__(self, path: str, module: nn.Module, watch: InputWatcher, run: Callable[[], Tensor]) -> None:
        self.path, self.module, self.watch = path, module, watch
        self.output = run  # of the first samples, with the weights as they are now

    def linears(self) -> Iterator[tuple[str, nn.Linear]]:
        """By their names in the model."""
        for name, each in self.module.named_modules():
            if isinstance(each, nn.Linear):
                yield f"{self.path}.{name}", each


class CalibrationStage(nn.Module):
    """Stands where a layer stood: reads its weights, has it treated, and gives what it then computes."""

    def __init__(self, path: str, layer: nn.Module, read: Read, treat: QuantizeLayer) -> None:
        super().__init__()
        self._path, self._layer, self._read, self._treat = path, layer, read, treat

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute that the model reads from the layer, such as its kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_layer"), name)

    def forward(self, x: Tensor, *args: Any, **settings: Any) -> Any:
        """x [S, T, H]."""
        fill(self._layer, self._path, self._read)
        size = max(1, AT_ONCE // x.shape[1])
        parts = [_part((x, args, settings), first, size, len(x)) for first in range(0, len(x), size)]
        with InputWatcher(self._layer) as watch:
            for part in parts:
                _run(self._layer, part)
        self._treat(CalibratedLayer(self._path, self._layer, watch, lambda: _run(self._layer, parts[0])))
        out = torch.cat([_run(self._layer, part) for part in parts])
        self._layer.to("meta")
        return out


def run_calibration(config: Any, read: Read, rows: Sequence[Sequence[int]], quantize_layer: QuantizeLayer) -> None:
    """Hands every layer of the model of transformers' `config` to `treat`, in order, as the layers before it were left.

    `read` gives a tensor of the checkpoint by its name; `rows` are sequences of one length. ValueError for a model
    that is not built so.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    trunk = model.base_model
    trunk = getattr(trunk, "decoder", trunk)  # opt's
    layers = getattr(trunk, "layers", None)
    if not isinstance(layers, nn.ModuleList) or any(".experts" in name for name, _ in model.named_modules()):
        raise ValueError(f"{config.model_type} is not calibrated here: dense models with a list of layers are; use rtn")
    names = {module: name for name, module in model.named_modules()}
    own = [names[each] for each in layers]
    trunk.layers = nn.ModuleList()
    fill(trunk, names[trunk], read)
    _compute_buffers(model)
    trunk.layers = nn.ModuleList(
        CalibrationStage(path, layer, read, quantize_layer) for path, layer in zip(own, layers, strict=True)
    )
    trunk(torch.tensor(rows), use_cache=False)


def fill(module: nn.Module, path: str, read: Read) -> None:
    """The module's weights, from the checkpoint, in float32."""
    state = {name: read(f"{path}.{name}").float() for name, _ in module.named_parameters()}
    module.load_state_dict(state, strict=False, assign=True)


def _compute_buffers(model: nn.Module) -> None:
    """Those that no file holds: rotary frequencies, scales. transformers computes them where it makes weights."""
    for module in model.modules():
        if any(each.is_meta for each in module.buffers(recurse=False)):
            kept = dict(module.named_parameters(recurse=False))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty_like(buffer, device=torch.get_default_device()))
            model._init_weights(module)  # type: ignore[operator]  # transformers' own hook for a module's numbers
            for name, each in kept.items():
                setattr(module, name, each)


def _run(layer: nn.Module, part: tuple[Any, ...]) -> Tensor:
    x, args, settings = part
    out = layer(x, *args, **settings)
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


def _part(value: Any, first: int, size: int, whole: int) -> Any:
    """The same with some of the samples, where a tensor has one row for each."""
    if isinstance(value, Tensor):
        return value[first : first + size] if value.dim() and len(value) == whole else value
    if isinstance(value, tuple | list):
        return type(value)(_part(each, first, size, whole) for each in value)
    if isinstance(value, dict):
        return {name: _part(each, first, size, whole) for name, each in value.items()}
    return value
