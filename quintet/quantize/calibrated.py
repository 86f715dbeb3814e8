"""GPTQ, AWQ and scales of activations: products that are rounded with an eye on what they are given."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from quintet.hub.legacy_configs import LEGACY_ADAPTERS
from quintet.hub.max_model_len import model_length
from quintet.quantize import awq, packing, rounding
from quintet.quantize.calibration_run import CalibratedLayer, run_calibration
from quintet.quantize.checkpoint import SourceCheckpoint
from quintet.quantize.config import QuantizeConfig
from quintet.quantize.gptq import gptq
from quintet.quantize.rounding import QuantizedMatrix
from quintet.quantize.samples import sequences
from quintet.quantize.schemes import FLOAT8_MAX, Scheme
from quintet.quantize.statistics import InputStatistics
from quintet.quantize.targets import LinearTargets
from quintet.quantize.writer import CheckpointShards
from quintet.tokenizers.tokenizer import load_tokenizer

CalibrationOptions = tuple[Scheme, QuantizeConfig]


def refuse(how: Scheme, config: QuantizeConfig) -> None:
    """ValueError for what does not go together."""
    if config.method != "rtn" and how.floats:
        raise ValueError(f"method {config.method!r} is for whole numbers, and scheme {how.name} has floats; use rtn")
    if how.activations == "tensor" and config.calibration is None:
        raise ValueError(
            f"scheme {how.name} has one scale for all activations, which calibration finds: give text with one sample "
            "per line (--calibration FILE), or use FP8_DYNAMIC, which needs none"
        )


def quantize_calibrated(
    original: SourceCheckpoint, found: LinearTargets, how: CalibrationOptions, shards: CheckpointShards, progress: bool
) -> set[str]:
    """Writes the tensors of every decoder layer -> their names. ValueError for text that does not do."""
    config = config_of(original)
    asked = how[1]
    length = min(asked.sequence_length, model_length(original.config))
    tokenizer = load_tokenizer(original.folder)
    rows = sequences(Path(asked.calibration or ""), tokenizer, asked.num_samples, length)
    with tqdm(total=config.num_hidden_layers, desc="Calibrating", unit="layer", disable=not progress) as bar:
        work = LayerQuantizer(original, found, how, shards, set())

        def treat(layer: CalibratedLayer) -> None:
            work.quantize_layer(layer)
            bar.update()

        run_calibration(config, original.read, rows, treat)
    return work.done


def config_of(original: SourceCheckpoint) -> Any:
    """transformers' own, of the model that samples go through. ValueError where it has none."""
    from transformers import AutoConfig

    if original.config.model_type in LEGACY_ADAPTERS:
        raise ValueError(
            f"calibration takes samples through transformers' model, and there is none of type "
            f"{original.config.model_type!r}; use --method rtn and a scheme that needs no calibration"
        )
    return AutoConfig.from_pretrained(original.folder).get_text_config()


@dataclass(frozen=True)
class LayerQuantizer:
    """Rounds layers and writes them."""

    original: SourceCheckpoint
    found: LinearTargets
    options: CalibrationOptions
    shards: CheckpointShards
    done: set[str]  # names of tensors that are written

    def quantize_layer(self, layer: CalibratedLayer) -> None:
        """Leaves the layer with what its weights stand for."""
        scheme, asked = self.options
        linears = {name.removeprefix(f"{layer.path}."): each for name, each in layer.linears()}
        chosen = [name for name in linears if f"{layer.path}.{name}.weight" in self.found]
        scaled = awq.scale_layer(layer, chosen, scheme, self.original.dtype) if asked.method == "awq" else {}
        for name in chosen:
            moments, weight = layer.watch.of[name], linears[name].weight
            rounded = self.rounded(weight, moments, scaled.get(name))
            weight.copy_(rounding.floats(rounded, scheme))
            self._write(f"{layer.path}.{name}", rounded, moments)
        for name, tensor in layer.module.named_parameters():
            if name.removesuffix(".weight") not in chosen:
                own = f"{layer.path}.{name}"
                self.shards.add({self.original.file_name(own): tensor.to(self.original.read(own).dtype)})
                self.done.add(own)

    def rounded(self, weight: Tensor, moments: InputStatistics, scaled: Tensor | None) -> QuantizedMatrix:
        scheme, asked = self.options
        dtype = self.original.dtype
        if asked.method == "gptq":
            return gptq(weight, moments.hessian, scheme, dtype, asked.dampening, asked.act_order)
        if asked.method == "rtn":
            return rounding.round_to_nearest(weight, scheme, dtype)
        importance = moments.hessian.diagonal()
        importance = importance if scaled is None else importance / scaled.square()
        return rounding.round_to_grid(weight, rounding.search_grid(weight, scheme, dtype, importance), scheme)

    def _write(self, module: str, rounded: QuantizedMatrix, moments: InputStatistics) -> None:
        scheme, dtype = self.options[0], self.original.dtype
        stored = self.original.file_name(f"{module}.weight").removesuffix(".weight")
        tensors = packing.tensors(stored, rounded, scheme, dtype)
        if scheme.activations == "tensor":
            tensors[f"{stored}.input_scale"] = torch.tensor([moments.peak / FLOAT8_MAX]).to(dtype)
        self.shards.add(tensors)
        self.done.add(f"{module}.weight")
