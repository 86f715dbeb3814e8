"""From a model's folder to a quantized one."""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from quintet.common.json_files import read_object
from quintet.quantize import packing, rounding
from quintet.quantize.calibrated import quantize_calibrated, refuse
from quintet.quantize.checkpoint import SourceCheckpoint
from quintet.quantize.config import QuantizeConfig
from quintet.quantize.gguf_presets import PRESETS, Preset
from quintet.quantize.gguf_writer import library, write
from quintet.quantize.schemes import Scheme, scheme
from quintet.quantize.targets import HEAD, LinearTargets, products
from quintet.quantize.writer import CheckpointShards, CheckpointWriter, copy_rest, write_json


@dataclass(frozen=True)
class QuantizeResult:
    """Result of quantizing a model."""

    folder: Path
    scheme: str
    method: str
    products: int  # that were quantized
    left: int  # products that stayed in floats
    bytes_before: int
    bytes_after: int
    seconds: float


@torch.inference_mode()
def quantize(name: str, config: QuantizeConfig, progress: bool = True) -> QuantizeResult:
    """Writes asked.output. ValueError or OSError, before anything is written, says what cannot be done."""
    began = time.monotonic()
    if (preset := PRESETS.get(config.scheme.upper())) is not None:
        return _gguf(name, preset, config, progress)
    how = scheme(config.scheme, config.group_size, PRESETS)
    refuse(how, config)
    with CheckpointWriter(Path(config.output), config.overwrite) as output:
        original = SourceCheckpoint.load(name)
        output.refuse_overlap(original.folder)
        found = products(original.model, config.ignore, how.unit)
        output.check_space(original.num_bytes)
        shards = CheckpointShards(output.folder)
        done: set[str] = set()
        if config.calibration is not None:
            done = quantize_calibrated(original, found, (how, config), shards, progress)
        for tensors in write_rest(original, found, how, progress, done):
            shards.add(tensors)
        shards.finish()
        copy_rest(original.folder, output.folder)
        entries = {"quantization_config": how.config(_ignored(original, found), config.act_order)}
        write_json(output.folder / "config.json", {**read_object(original.folder / "config.json"), **entries})
        folder = output.finish()
    after = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return QuantizeResult(
        folder, how.name, config.method, len(found.chosen), len(found.excluded), original.num_bytes, after,
        time.monotonic() - began,
    )  # fmt: skip


def _gguf(name: str, preset: Preset, asked: QuantizeConfig, progress: bool) -> QuantizeResult:
    """One file, of its own or in a folder."""
    began, place = time.monotonic(), Path(asked.output)
    for field in ("method", "group_size", "ignore", "calibration"):
        if getattr(asked, field) != getattr(QuantizeConfig(output="."), field):
            raise ValueError(f"{field} is not for GGUF files, whose types have groups of their own; leave it out")
    library()
    with CheckpointWriter(place, asked.overwrite) as output:
        original = SourceCheckpoint.load(name)
        output.refuse_overlap(original.folder)
        output.check_space(original.num_bytes)
        title = place.stem if place.suffix == ".gguf" else place.name
        file = output.folder / (place.name if place.suffix == ".gguf" else f"{title}-{preset.name}.gguf")
        count, others = write(original, preset, file, title, progress)
        folder = output.finish(file.name if place.suffix == ".gguf" else None)
    made = folder if folder.is_file() else folder / file.name
    return QuantizeResult(
        folder, preset.name, "search" if "_K" in preset.name else "rtn", count, others,
        original.num_bytes, made.stat().st_size, time.monotonic() - began,
    )  # fmt: skip


def _ignored(original: SourceCheckpoint, found: LinearTargets) -> list[str]:
    """Names of the products that stayed in floats; a head that is tied is one, and no tensor of the file."""
    there = [each for each in found.excluded if f"{each}.weight" in original.entries and "embed" not in each]
    names = {original.file_name(f"{each}.weight").removesuffix(".weight") for each in there}
    return sorted(names if HEAD in found.chosen else {*names, HEAD})


def write_rest(
    original: SourceCheckpoint, found: LinearTargets, how: Scheme, progress: bool, done: Collection[str]
) -> Iterator[dict[str, Tensor]]:
    """Every tensor of the new file but those of `done` ones, rounded to nearest where it is of a product."""
    names = [name for name in original.entries if name not in done]
    for name in tqdm(names, desc="Quantizing", unit="tensor", disable=not progress, mininterval=0.5):
        stored, tensor = original.file_name(name), original.read(name)
        if name in found:
            rounded = rounding.round_to_nearest(tensor, how, original.dtype)
            yield packing.tensors(stored.removesuffix(".weight"), rounded, how, original.dtype)
        else:
            yield {stored: tensor.clone() if original.entries[name].at else tensor}
