"""Reads a checkpoint's tensors by memory map straight to where the platform places them."""

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from quintet.interface.platform import Platform
from quintet.interface.types import MaxShape, ShapeBucket
from quintet.interface.weights import FLOATS, StoredTensor, Weight, WeightFormat
from quintet.layers.attention import kv_scales
from quintet.layers.build import Layer, named_layers
from quintet.layers.decoder import ModelBase
from quintet.model_loader import gguf_weights as gguf_source
from quintet.model_loader import sharded_state as sharded
from quintet.model_loader.constants import constant_digests, place_constants
from quintet.model_loader.external_loaders import PACKAGES, reader
from quintet.model_loader.mmap_release import MappedFiles
from quintet.model_loader.text_names import text_names
from quintet.model_loader.tied_head import WEIGHT, check_stored_head
from quintet.model_loader.weight_files import DTYPES, WeightFiles, format_names, weights_of_folder
from quintet.model_loader.weights_cache import CacheEntry, StoreThread, TensorKind, TensorName, WeightsCache, digest

COUNT_ENTRIES = {  # in the modules' names of tensors -> what the config calls the number of them
    re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d{1,9})\."): ("num_hidden_layers",),
    re.compile(r"\.experts\.(\d{1,9})\."): ("num_local_experts", "num_experts"),
}
LONGEST = 400  # characters of a tensor's name
# Ends of the names of tensors that quantized checkpoints alone hold.
QUANTIZED = (
    *(".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv"),
    *(".SCB", ".absmax", ".W_q", "._weight_qdata"),
)


@dataclass(frozen=True)
class DeclaredWeight:
    """One parameter of one layer of a model."""

    path: str
    layer: Layer
    weight: Weight

    def with_sharing(self, wanted: Mapping[tuple[str, int, WeightFormat], int]) -> "DeclaredWeight":
        """Sets Weight.shared if the same slice of a tensor is wanted more than once in the same format."""
        shared = any(wanted[part.source, part.offset, self.weight.format] > 1 for part in self.weight.slices)
        return replace(self, weight=replace(self.weight, shared=shared)) if shared else self


def declared_weights(model: nn.Module) -> list[DeclaredWeight]:
    """Every parameter that the model wants, in the order of its modules."""
    found = []
    for path, layer in named_layers(model):
        found += [DeclaredWeight(path, layer, weight) for weight in layer.weights(path)]
    wanted = Counter((part.source, part.offset, each.weight.format) for each in found for part in each.weight.slices)
    return [each.with_sharing(wanted) for each in found]


def distinct_parameters(model: nn.Module) -> list[Weight]:
    """The model's parameters; what two layers share (a tied head) once."""
    found: dict[Any, Weight] = {}
    for each in declared_weights(model):
        key = each.weight.format, tuple((part.source, part.offset) for part in each.weight.slices)
        found.setdefault(key, each.weight)
    return list(found.values())


def num_bytes(model: nn.Module, platform: Platform) -> int:
    """Returns the bytes that the model's parameters take on one device."""
    return platform.estimate(model, distinct_parameters(model), MaxShape(ShapeBucket(1, 1, 1, ()), 0, 0)).weights


def load(
    model: ModelBase,
    platform: Platform,
    folder: Path | WeightFiles | None,
    progress: bool = True,
    rank: int = 0,
    cache: CacheEntry | None = None,
) -> StoreThread | None:
    """Fills a rank's model from the folder's weights or a GGUF file; from random numbers where there is none.
    With a `cache`, from what an earlier start kept there, which is kept otherwise; returns the thread
    that does so if the cache is automatic."""
    if isinstance(folder, WeightFiles) and folder.load_format in sharded.FORMATS:
        read = reader(folder.load_format) if folder.load_format in PACKAGES else None
        sharded.fill(model, folder.folder, rank, fingerprint(model, platform, folder.options["placing"]), read)
        return None
    if cache is None or folder is None:
        _fill(model, platform, folder, progress, rank)
        return None
    files = weights_of_folder(folder).files()
    name = digest(_weight_parts(model, platform, cache.layout_key), files)
    kept = WeightsCache(cache.folder / f"{name}.weights", cache.auto, str(files[0].resolve()))
    if kept.load(model, _vector_kinds(model)):
        place_constants(model, platform, rank)
        return None
    _fill(model, platform, folder, progress, rank)
    return kept.store(model)


def _vector_kinds(model: ModelBase) -> dict[TensorName, TensorKind]:
    """Returns the dtypes and shapes of norms and biases, which every platform keeps as they are."""
    return {
        TensorName(each.path, each.weight.name): TensorKind(each.weight.dtype, each.weight.shape)
        for each in declared_weights(model)
        if each.weight.use == "vector" and each.weight.format.plain and type(each.layer).assign is Layer.assign
    }


def fingerprint(model: ModelBase, platform: Platform, layout_key: str) -> str:
    """Returns a digest of all that a rank's placed weights depend on, except their values."""
    return digest(placement_parts(model, platform, layout_key), ())


def placement_parts(model: ModelBase, platform: Platform, layout_key: str) -> list[Any]:
    """Returns the parts of fingerprint()."""
    return [*_weight_parts(model, platform, layout_key), *constant_digests(model)]


def _weight_parts(model: ModelBase, platform: Platform, layout_key: str) -> list[Any]:
    """Returns what a rank's placed weights depend on, without constants: not the context's length."""
    return [type(model), platform.name, layout_key, declared_weights(model)]


def _fill(model: ModelBase, platform: Platform, folder: Path | WeightFiles | None, progress: bool, rank: int) -> None:
    for each, tensors in ParameterLoad(model, folder).weights(progress):
        each.layer.assign(platform.place(each.weight, tensors))
    place_constants(model, platform, rank)


class ParameterLoad:
    """A folder's weights for a model: once it is made, all are known to be there and to fit."""

    def __init__(self, model: ModelBase, folder: Path | WeightFiles | None) -> None:
        self._wanted = declared_weights(model)
        self._source: Checkpoint | RandomWeights = RandomWeights() if folder is None else Checkpoint(folder, model)
        self._source.check_complete(self._wanted)

    def weights(self, progress: bool = False) -> Iterator[tuple[DeclaredWeight, dict[str, Tensor]]]:
        """Yields each weight with the tensors that it is made of."""
        shelf = TensorIndex(self._source, self._wanted)
        large = sorted(self._wanted, key=_nbytes, reverse=True)  # while one is placed its source is there too
        for each in tqdm(
            large, desc="Loading weights", unit="tensor", disable=not progress, leave=False, mininterval=0.5
        ):
            tensors = shelf.read(each.weight)
            yield each, tensors
            self._source.release_pages(tensors.values())  # its place holds a copy, or reads the file again

    def overwrite(self, platform: Platform) -> None:
        """Writes them into those that the model has."""
        for each, tensors in self.weights():
            platform.place(each.weight, tensors, into=each.layer.assigned_tensors)


def _nbytes(each: DeclaredWeight) -> int:
    return math.prod(each.weight.shape) * each.weight.dtype.itemsize


class TensorIndex:
    """Reads tensors as they are asked for, and keeps those that two layers ask for (a tied head) until the end.

    It also converts them, so that a platform with layers that compute on these very tensors holds them once.
    """

    def __init__(self, source: "Checkpoint | RandomWeights", wanted: list[DeclaredWeight]) -> None:
        self._source = source
        self._remaining_uses = Counter(name for each in wanted for name in each.weight.stored)
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def read(self, weight: Weight) -> dict[str, Tensor]:
        """The checkpoint's tensors that the weight is made of."""
        return {name: self._read(name, each, weight) for name, each in weight.stored.items()}

    def _read(self, name: str, entry: StoredTensor, weight: Weight) -> Tensor:
        if self._remaining_uses[name] == 1 or not (weight.format.plain or weight.shared):
            return self._source.read(name, entry)
        key = name, weight.dtype
        if key not in self._kept:
            tensor = self._source.read(name, entry)
            self._kept[key] = tensor if weight.reader is not None else tensor.to(weight.dtype)
        return self._kept[key]


RANDOM_BLOCK_SIZE = 1_048_573  # numbers of a block; a prime, so that no row of a weight is the row above it


class RandomWeights:
    """Random weights: small, finite, the same for a name every time. They are one block of numbers again and again,
    from a place on that the name gives: billions would take a minute to draw."""

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, Tensor] = {}

    def check_complete(self, wanted: list[DeclaredWeight]) -> None:
        """Does nothing: no weight can be missing."""

    def release_pages(self, tensors: Iterable[Tensor]) -> None:
        """Does nothing: no file is mapped."""

    def read(self, name: str, entry: StoredTensor) -> Tensor:
        dtype = entry.dtypes[0]
        if entry.shape is None:
            raise ValueError(
                f"{name} cannot be made up: only the checkpoint says how large it is; leave load_format out"
            )
        if dtype.is_floating_point:
            return self._floats(zlib.crc32(name.encode()), math.prod(entry.shape), dtype).view(entry.shape)
        ends, generator = torch.iinfo(dtype), torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randint(ends.min, ends.max, entry.shape, dtype=dtype, generator=generator)

    def _floats(self, seed: int, count: int, dtype: torch.dtype) -> Tensor:
        if dtype not in self._blocks:
            drawn = torch.randn(RANDOM_BLOCK_SIZE, generator=torch.Generator().manual_seed(0)) * 0.02
            self._blocks[dtype] = drawn.to(dtype)
        block, first = self._blocks[dtype], seed * 65_537 % RANDOM_BLOCK_SIZE
        numbers = torch.empty(count, dtype=dtype)
        for start in range(-first, count, RANDOM_BLOCK_SIZE):
            inside = slice(max(0, start), min(count, start + RANDOM_BLOCK_SIZE))
            numbers[inside] = block[inside.start - start : inside.stop - start]
        return numbers


class TensorEntry(NamedTuple):
    """Location of a tensor: its file, its name there, and the index in that tensor if it is a stack of several."""

    file: Any
    name: str
    at: tuple[Any, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor().shape) if self.at else tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> torch.dtype | str:
        """torch's, or the file's own name for what torch does not have."""
        name = self.file.get_slice(self.name).get_dtype()
        return name if isinstance(name, torch.dtype) else DTYPES.get(name, str(name))

    def tensor(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor[self.at] if self.at else tensor


class Checkpoint:
    """A folder of weights, or a GGUF file, opened once and read tensor by tensor without copies."""

    def __init__(self, folder: Path | WeightFiles, model: ModelBase) -> None:
        self._folder, self._ignored = folder, [re.compile(pattern) for pattern in model.ignored_tensors]
        self._ignored_suffixes, self._other_stage_tensors = model.ignored_suffixes, model.other_stage_tensors
        self._where: dict[str, TensorEntry] = {}
        self._has_head = hasattr(model, "lm_head")
        for name, place in _index(folder, model):
            if name in self._where:
                raise ValueError(f"{folder} holds {name} twice; remove the files that are not the model's")
            self._where[name] = place
        self._where = dict(model.gathered(self._where))
        self._mapped = MappedFiles(weights_of_folder(folder).files())

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor, by the modules' name."""
        return self._where

    def check_complete(self, wanted: list[DeclaredWeight]) -> None:
        """Missing, misshapen and unexpected tensors are errors that name them."""
        needed = {name: want for each in wanted for name, want in each.weight.stored_on_all_ranks.items()}
        missing, surplus = (
            sorted(set(needed) - set(self._where)),
            sorted(set(self._where) - set(needed) - self._other_stage_tensors),
        )
        self._check_quantized(missing, surplus)
        if self._has_head and WEIGHT in surplus:
            check_stored_head(self._folder, {name: _stored(entry) for name, entry in self._where.items()})
        if missing:
            raise ValueError(
                f"{self._folder} lacks {format_names(missing)}, which the model's config.json asks for; "
                "the files may be incomplete, or the config another model's"
            )
        wrong = [message for name, want in needed.items() if (message := self._shape_error(name, want))]
        if wrong:
            raise ValueError(
                f"{self._folder} does not fit its config.json: {format_names(wrong)}; fetch the model anew, or its "
                "original if it was quantized"
            )
        extra = [name for name in surplus if not self._is_ignored(name)]
        if extra:
            raise ValueError(
                f"{self._folder} holds {format_names(extra)}, which this model has no place for; "
                "quintet would compute something else than the checkpoint means"
            )

    def _check_quantized(self, missing: list[str], surplus: list[str]) -> None:
        """ValueError where config.json says that weights are quantized and they are not, or the other way round."""
        quantized = [name for name in surplus if name.endswith(QUANTIZED) and not name.endswith(self._ignored_suffixes)]
        if quantized:
            raise ValueError(
                f"{self._folder} holds {format_names(quantized)}, as quantized checkpoints do, and the "
                "quantization_config "
                "of its config.json does not say so of them; fetch config.json again, or use the model's original"
            )
        for name in missing:
            plain = f"{name.rpartition('.')[0]}.weight"
            if name.endswith(QUANTIZED) and plain in self._where and self._where[plain].dtype in FLOATS:
                raise ValueError(
                    f"{self._folder} holds {plain} in floats, and the quantization_config of its config.json says "
                    "otherwise; fetch the model anew, or set that to null with hf_overrides"
                )

    def _is_ignored(self, name: str) -> bool:
        silent = name.endswith(self._ignored_suffixes) or kv_scales.is_ignored_scale(name)
        if silent or any(pattern.fullmatch(name) for pattern in self._ignored):
            return True
        return name.endswith(".bias") and not self._where[name].tensor().any()  # AutoGPTQ gives one to every product

    def read(self, name: str, entry: StoredTensor) -> Tensor:
        return self._where[name].tensor()

    def release_pages(self, tensors: Iterable[Tensor]) -> None:
        """Lets go of the pages that these were read through."""
        for tensor in tensors:
            self._mapped.release_pages(tensor)

    def _shape_error(self, name: str, want: StoredTensor) -> str | None:
        there = self._where[name]
        if want.shape is not None and there.shape not in (want.shape, *want.other_shapes):
            return f"{name} is {list(there.shape)}, not {list(want.shape)}"
        if there.dtype in want.dtypes:
            return None
        wanted = "floats" if want.dtypes == FLOATS else " or ".join(str(each) for each in want.dtypes)
        return f"{name} is of {there.dtype}, not of {wanted}"


def tensors_of(folder: Path | WeightFiles, family: type[ModelBase]) -> dict[str, StoredTensor]:
    """The tensors of a folder's files by the modules' names; types that torch lacks have none."""
    return {name: _stored(entry) for name, entry in _index(folder, family)}


def _stored(entry: Any) -> StoredTensor:
    dtypes = (entry.dtype,) if isinstance(entry.dtype, torch.dtype) else ()
    return StoredTensor(entry.shape, dtypes, name=entry.name, read=entry.tensor)


def check_counts(folder: Path | WeightFiles, family: type[ModelBase], config: Any) -> None:
    """ValueError if config.json has more layers or experts than the files; checked before the model is built."""
    if not getattr(family, "config_counts_layers", True):
        return
    ignored = [re.compile(pattern) for pattern in family.ignored_tensors]
    names = [name for name, _ in _index(folder, family) if not any(each.fullmatch(name) for each in ignored)]
    for pattern, keys in COUNT_ENTRIES.items():
        there = max((int(found[1]) + 1 for name in names if (found := pattern.search(name))), default=0)
        key = next((each for each in keys if getattr(config, each, None)), None)
        if key is not None and 0 < there < getattr(config, key):
            raise ValueError(
                f"{weights_of_folder(folder).folder / 'config.json'}: {key} is {getattr(config, key)}, and the "
                "weights there are of "
                f"{there}; fetch the rest of the model, or correct it"
            )


def _index(folder: Path | WeightFiles, model: ModelBase | type[ModelBase]) -> Iterator[tuple[str, Any]]:
    """Every tensor, by the name that the modules use for it."""
    weights = weights_of_folder(folder)
    if weights.folder.is_file():
        yield from gguf_source.entries(weights.folder)
        return
    opened = list(weights.open_files())
    text_name = text_names(name for _, handle in opened for name in handle.keys())
    for file, handle in opened:
        for name in handle.keys():  # a handle is no mapping
            if not name.isprintable() or len(name) > LONGEST:
                raise ValueError(f"{file} holds a tensor called {name[:64]!r}, which no model has; fetch it again")
            known = text_name(name)
            if (known is None) is not model.reads_towers:
                continue
            if known is None:
                yield name, TensorEntry(handle, name)
                continue
            own = model.canonical(weights.module_name(known))
            several = model.unstacked(own, handle.get_slice(name).get_shape())
            if several:
                yield from ((each, TensorEntry(handle, name, at)) for each, at in several.items())
            else:
                yield own, TensorEntry(handle, name)
