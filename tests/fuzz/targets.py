"""What is done with a spoilt file: all that a start does before and while it reads the weights."""

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.fuzz.gguf_files import gguf
from tests.fuzz.mutations import changed, safetensors, spoilt

DATA = Path(__file__).parents[1] / "data/quantized"
PLACED = 6  # of so many weights, one is dequantized and packed
Refusal = (ValueError, OSError)  # what a reader may say; anything else is a finding


@dataclass(frozen=True)
class Target:
    """A kind of file: one is made of random numbers, and read."""

    make: Callable[[random.Random, Path], Path]  # writes it, or several, into a folder -> the one that is read
    read: Callable[[Path], None]
    header: Callable[[Path], None]  # the part whose memory is measured: it makes nothing of the tensors


def gguf_target() -> Target:
    from transformers import CONFIG_MAPPING

    from quintet.gguf.defaults import templates
    from quintet.gguf.file import read
    from quintet.gguf.tokenizer import backend
    from quintet.gguf.vocabulary import read_vocabulary
    from quintet.hub.resolve import load_generation_config, load_model_config
    from quintet.models import model_class
    from quintet.platforms.cpu import PLATFORM

    platform, models = PLATFORM(), dict[Any, Any]()
    CONFIG_MAPPING["llama"]()  # imports what takes seconds

    def make(draw: random.Random, folder: Path) -> Path:
        file = folder / f"model-0000{draw.choice((1, 1, 1, 2))}-of-00002.gguf"
        file.write_bytes(gguf(draw))
        return file

    def tokenize(metadata: Mapping[str, Any]) -> None:
        made = backend(read_vocabulary(metadata))
        made.decode(made.encode("ab <|im_end|>\n1234 é\u2581").ids)

    def whole(path: Path) -> None:
        metadata = read(path).metadata
        each: Callable[[], Any]
        for each in (lambda: templates(metadata), lambda: tokenize(metadata), lambda: load_generation_config(path)):
            allowed(each)
        config = load_model_config(path)
        models.clear()
        it = Model(config, model_class(config, platform.models), config.quantization_config)
        load_some(path, it, platform, models)

    return Target(make, whole, lambda path: _none(read(path)))


def _none(found: object) -> None:
    """Nothing is kept."""


def allowed(what: Callable[[], Any]) -> str | None:
    """Why it was refused; None if it was not."""
    try:
        what()
    except Refusal as error:
        return one_line(error)
    return None


def one_line(error: BaseException) -> str:
    said = str(error)
    assert said and "\n" not in said and len(said) < 4000, f"not one line: {said[:200]!r}"
    return said


@dataclass(frozen=True)
class Model:
    """Who reads a checkpoint, and what it says of its quantization."""

    config: Any
    family: Any
    quantization: Any


@dataclass(frozen=True)
class Written:
    """A checkpoint that a quantization library wrote."""

    model: Model
    header: dict[str, Any]
    data: bytes


def written(platform: Any) -> dict[str, Written]:
    from transformers import AutoConfig

    from quintet.models import model_class

    found = {}
    for folder in sorted(each.parent for each in DATA.glob("*/model.safetensors")):
        raw = (folder / "model.safetensors").read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        said = json.loads((folder / "config.json").read_text())["quantization_config"]
        config: Any = AutoConfig.from_pretrained(folder)
        model = Model(config, model_class(config, platform.models), said)
        found[folder.name] = Written(model, json.loads(raw[8 : 8 + size]), raw[8 + size :])
    return found


def safetensors_target() -> Target:
    from quintet.model_loader.loader import tensors_of
    from quintet.platforms.cpu import PLATFORM

    platform = PLATFORM()
    there, models = written(platform), dict[Any, Any]()

    def make(draw: random.Random, folder: Path) -> Path:
        name = draw.choice(list(there))
        it, quantization = there[name], there[name].model.quantization
        if draw.random() < 0.3:
            quantization = changed({"it": quantization}, draw).get("it", quantization)
        (folder / "model.safetensors").write_bytes(safetensors(it.header, it.data, draw))
        (folder / "said.json").write_text(json.dumps([name, quantization]))
        return folder

    def headers(folder: Path) -> None:
        name, _ = json.loads((folder / "said.json").read_text())
        tensors_of(folder, there[name].model.family)

    def whole(folder: Path) -> None:
        name, quantization = json.loads((folder / "said.json").read_text())
        load_some(folder, replace(there[name].model, quantization=quantization), platform, models)

    return Target(make, whole, headers)


def torch_target() -> Target:
    import torch

    from quintet.model_loader.torch_checkpoint import TorchFile

    made = io.BytesIO()
    torch.save({"a": torch.arange(12.0).reshape(3, 4), "b": torch.nn.Parameter(torch.ones(2).half())}, made)
    with zipfile.ZipFile(made) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}

    def make(draw: random.Random, folder: Path) -> Path:
        file = folder / "pytorch_model.bin"
        if draw.random() < 0.3:
            file.write_bytes(spoilt(made.getvalue(), draw))
            return file
        with zipfile.ZipFile(file, "w") as archive:  # whole as a zip: the pickle is spoilt
            for name, content in entries.items():
                archive.writestr(name, spoilt(content, draw) if name.endswith("data.pkl") else content)
        return file

    def whole(path: Path) -> None:
        file = TorchFile(path)
        for name in file.keys():
            file.get_tensor(name).sum()

    return Target(make, whole, lambda path: _none(TorchFile(path)))


def load_some(path: Path, it: Model, platform: Any, models: dict[Any, Any]) -> None:
    """As a start does, but that most weights are not dequantized: they are like others."""
    import torch

    from quintet.engine.executor.model_part import ModelSizes
    from quintet.engine.executor.worker import Worker
    from quintet.layers.quantization import QuantizationPlan
    from quintet.layers.quantization.checkpoint_config import read_quantization_config
    from quintet.model_loader.loader import ParameterLoad, check_counts, tensors_of

    found = read_quantization_config(it.quantization, lambda: tensors_of(path, it.family))
    check_counts(path, it.family, it.config)
    key = it.config.model_type, repr(found)  # a plan is all that the tensors say of a model
    if key not in models:
        forms = QuantizationPlan(None, found, platform.probe().weight_formats)
        models[key] = Worker(platform, it.config, ModelSizes(torch.float32, 16, 64, forms)).model
    model = models[key]
    file = path if path.is_file() else path / "model.safetensors"
    kept = file.stat().st_size % PLACED
    for index, (each, tensors) in enumerate(ParameterLoad(model, path).weights()):
        if index % PLACED == kept:
            platform.place(each.weight, tensors)


TARGETS: Mapping[str, Callable[[], Target]] = {
    "gguf": gguf_target,
    "safetensors": safetensors_target,
    "torch": torch_target,
}
