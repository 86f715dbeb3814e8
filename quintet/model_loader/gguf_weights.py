"""The tensors of GGUF files by memory map, under the names and in the order that the modules have for them."""

import functools
import itertools
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quintet.gguf.architectures import names_of
from quintet.gguf.config import encoder_types
from quintet.gguf.cursor import format_name
from quintet.gguf.file import files
from quintet.gguf.mmproj import projector_of
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import PASSED_OVER, Joined, check_head_rows, layer_of
from quintet.model_loader.gguf_tensors import ComputedEntry, GGUFEntry, JoinedEntry, LoadedTensor, StatedEntry

MAX_EXPERTS = 2**12  # of a layer: each is an entry of ours, however small it is
MAX_MATRICES = 2**18  # of experts, and tensors: several times those of the largest models
MAX_CACHED_MODELS = 4  # models with headers that stay in memory: a start asks for one several times


def model_of(path: Path) -> GGUFModel:
    """Reads the GGUF files of a model; `path` is any of them. ValueError or OSError says what is wrong with them."""
    state = path.stat() if path.exists() else None
    return _model(path, state and (state.st_mtime_ns, state.st_size))


@functools.lru_cache(maxsize=MAX_CACHED_MODELS)
def _model(path: Path, state: tuple[int, int] | None) -> GGUFModel:
    return GGUFModel(files(path))


def paths(path: Path) -> list[Path]:
    """Returns all files of the model."""
    return list({file.path: None for file, _ in model_of(path).tensors.values()})


def entries(path: Path) -> Iterator[tuple[str, LoadedTensor]]:
    """Every tensor by the modules' name for it; one that no module has, by its own."""
    model = model_of(path)
    maps: dict[Path, Tensor] = {each: _mapped(each) for each in paths(path)}
    count, later = 0, DeferredTensors(model)
    blocks = encoder_types(model) if model.is_mmproj else {}
    last = model.layers if model.get("nextn_predict_layers") else math.inf  # behind it: layers that draft (MTP)
    for name, (file, stored) in model.tensors.items():
        if name in PASSED_OVER or (layer_of(name)[0] or 0) >= last:
            continue
        entry = GGUFEntry(name, maps[file.path], stored)
        found = {} if later.take(name, entry) else _named(model, name, entry)
        if (count := count + len(found)) > MAX_MATRICES:
            raise ValueError(
                f"{path}: with the experts of {format_name(name)}, {list(stored.shape)}, it has more than "
                f"{MAX_MATRICES} "
                "matrices, and no model has; fetch it again"
            )
        yield from (_in_floats(model, found, blocks) if model.is_mmproj else found).items()
    yield from later.entries().items()
    yield from _stated(model)
    if model.is_mmproj:
        yield from _filled(model).items()


def _stated(model: GGUFModel) -> Iterator[tuple[str, StatedEntry]]:
    """Tensors that the file has as numbers of its metadata. ValueError where they are none."""
    names = names_of(model)
    for target, key in names.stated.items():
        for index, value in enumerate(model.per_layer(key)):
            if not isinstance(value, float) or not math.isfinite(value):
                raise ValueError(f"{model.path}: {key} of layer {index} is {str(value)[:40]!r}, not a number")
            yield names.model_name(target, index), StatedEntry(key, value)


def _in_floats(
    model: GGUFModel, found: Mapping[str, GGUFEntry], blocks: Mapping[str, str]
) -> Mapping[str, LoadedTensor]:
    """Returns an encoder's tensors, without blocks where they are of none of these modules."""
    return {
        name: ComputedEntry(model, "same", (each,))
        if each.quantized and name.removesuffix(".weight") not in blocks
        else each
        for name, each in found.items()
    }


def _filled(model: GGUFModel) -> Mapping[str, LoadedTensor]:
    """Returns tensors of an encoder that its file lacks, since no output depends on them."""
    width = model.required_number("embedding_length")
    return {name: StatedEntry(name, value, shape=(width,)) for name, value in projector_of(model).filled(model).items()}


class DeferredTensors:
    """Tensors of the file that make one of the model together with others: collected until all were seen."""

    def __init__(self, model: GGUFModel) -> None:
        self._model, self._names = model, names_of(model)
        self._joined: dict[str, dict[str, GGUFEntry]] = {}  # by the module's tensor: by the source's name
        self._rules: dict[str, Joined] = {}
        self._sources: dict[str, GGUFEntry] = {}  # by their names

    def take(self, name: str, entry: GGUFEntry) -> bool:
        """Keeps a tensor, and returns True, if the model has it with others or computed alone."""
        if self._names.computed_tensors(name):
            self._sources[name] = entry
            return True
        base, _, last = name.rpartition(".")
        found = self._names.joined_module(base)
        if found is None:
            return False
        module, rule = found
        target = f"{module}.{last}"
        self._rules[target] = rule
        self._joined.setdefault(target, {})[layer_of(base)[1]] = entry
        return True

    def entries(self) -> Mapping[str, LoadedTensor]:
        """Returns the tensors of the model; sources that lack others have their own names."""
        found: dict[str, LoadedTensor] = {}
        for target, parts in self._joined.items():
            rule = self._rules[target]
            if len(parts) < len(rule.sources):
                found |= {each.name: each for each in parts.values()}
            else:
                found |= self._joined_entries(target, [parts[each] for each in rule.sources], rule.order)
        used: set[str] = set()
        for name in self._sources:
            for target in self._names.computed_tensors(name):
                found |= self._computed_entry(target, name, used)
        return found | {name: entry for name, entry in self._sources.items() if name not in used}

    def _joined_entries(self, target: str, parts: Sequence[GGUFEntry], order: str) -> Mapping[str, LoadedTensor]:
        parent, _, last = target.rpartition(".")
        parts = [_unpermuted(self._model, each) for each in parts]
        own = parent.rpartition(".")[2]
        floats = not all(each.quantized for each in parts) and last == "weight"
        entry = JoinedEntry(
            self._model, tuple(parts), order, transposed=floats and parent.endswith(self._names.transposed)
        )
        if not parent.rpartition(".")[0].endswith(".experts"):
            return {target: entry}
        count = _expert_count(self._model, parts[0])
        stack = parent.rpartition(".")[0]
        return {f"{stack}.{index}.{own}.{last}": entry.of_expert(index) for index in range(count)}

    def _computed_entry(self, target: str, source: str, used: set[str]) -> Mapping[str, LoadedTensor]:
        layer = layer_of(source)[0]
        key = next(each for each in self._names.computed if self._names.model_name(each, layer) == target)
        rule = self._names.computed[key]
        prefix = "" if key.startswith("/") else f"blk.{layer}."
        parts = [self._sources.get(f"{prefix}{each}") for each in rule.sources]
        if any(each is None for each in parts):
            return {}
        used.update(each.name for each in parts if each is not None)
        return {target: ComputedEntry(self._model, rule.function, tuple(each for each in parts if each is not None))}


def _unpermuted(model: GGUFModel, entry: GGUFEntry) -> GGUFEntry:
    """Returns the entry with the rows of q and k put back, where the file has them permuted."""
    own = layer_of(entry.name)[1].partition(".")[0]
    if not names_of(model).permutes_qk or own not in ("attn_q", "attn_k"):
        return entry
    check_permuted(model, entry)
    return replace(entry, permuted_head_dim=model.head_dim)


def check_permuted(model: GGUFModel, entry: GGUFEntry) -> None:
    """ValueError where the rows of q or k are no heads."""
    try:
        check_head_rows(entry.shape[0], model.head_dim)
    except ValueError as error:
        raise ValueError(f"{model.path}: {entry.name}: {error}") from None


def _mapped(path: Path) -> Tensor:
    """Private, so that nothing written to it gets into the file."""
    with path.open("rb") as stream:
        return torch.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _named(model: GGUFModel, name: str, entry: GGUFEntry) -> Mapping[str, GGUFEntry]:
    base, _, last = name.rpartition(".")
    modules = names_of(model).modules(base)
    if not modules:
        return {name: entry}
    if len(modules) == 1:
        return _of_module(model, modules[0], last, entry)
    found: dict[str, GGUFEntry] = {}
    for module, rows in zip(modules, _split_fused(model, name, entry, len(modules)), strict=True):
        found |= _of_module(model, module, last, replace(entry, rows=rows))
    return found


def _split_fused(model: GGUFModel, name: str, entry: GGUFEntry, count: int) -> list[tuple[int, int]]:
    """The rows of queries, keys and values, or of gate and up of each expert. ValueError where there are others."""
    shape = entry.stored.shape
    rows = shape[0] if len(shape) < 3 else shape[1]
    sizes = [each * model.head_dim for each in (model.heads, model.kv_heads, model.kv_heads)]
    sizes = sizes if count == 3 else [rows // 2] * 2
    if sum(sizes) != rows:
        raise ValueError(f"{model.path}: {name} has {rows} rows, not {' + '.join(map(str, sizes))}; fetch it again")
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def _of_module(model: GGUFModel, module: str, last: str, entry: GGUFEntry) -> Mapping[str, GGUFEntry]:
    names, (parent, _, own) = names_of(model), module.rpartition(".")
    if parent.endswith(".experts"):
        return _of_experts(model, module, last, entry)
    if names.permutes_qk and own in ("q_proj", "k_proj"):
        check_permuted(model, entry)
        entry = replace(entry, permuted_head_dim=model.head_dim)
    if names.offset and own.endswith("norm") and last == "weight":
        entry = replace(entry, offset=names.offset)
    if module.endswith(names.transposed) and last == "weight" and not entry.quantized:
        entry = replace(entry, transposed=True)
    wide = own == "shared_expert_gate" and len(entry.stored.shape) == 1
    return {f"{module}.{last}": replace(entry, to_float32=wide)}


def _of_experts(model: GGUFModel, module: str, last: str, entry: GGUFEntry) -> Mapping[str, GGUFEntry]:
    names, (parent, _, own) = names_of(model), module.rpartition(".")
    if len(entry.stored.shape) != (2 if last == "bias" and names.biased_experts else 3):
        return {entry.name: entry}  # the loader then says that the model has no place for it
    floats = last == "weight" and not entry.quantized
    entry = replace(entry, transposed=floats and module.endswith(names.transposed))
    count = _expert_count(model, entry)
    return {f"{parent}.{index}.{own}.{last}": replace(entry, expert=index) for index in range(count)}


def _expert_count(model: GGUFModel, entry: GGUFEntry) -> int:
    count = entry.stored.shape[0]
    if count > MAX_EXPERTS:
        raise ValueError(f"{model.path}: {entry.name} is of {count} experts, more than any model has; fetch it again")
    return count
