"""The tensors of GGUF files by memory map, under the names and in the order that the modules have for them."""

import functools
import itertools
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quintet.gguf.config import GGUFModel
from quintet.gguf.cursor import format_name
from quintet.gguf.file import GGUFTensor, files
from quintet.gguf.names import ROPE, check_head_rows, unpermuted_rows

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
MAX_EXPERTS = 2**12  # of a layer: each is an entry of ours, however small it is
MAX_MATRICES = 2**18  # of experts, and tensors: several times those of the largest models
MAX_CACHED_MODELS = 4  # models with headers that stay in memory: a start asks for one several times


@dataclass(frozen=True)
class GGUFEntry:
    """Location of a tensor, and the changes that turn it into the tensor of the model's own checkpoint.

    Blocks stay as they are: uint8 [N, bytes of a row].
    """

    name: str  # in the file
    data: Tensor  # uint8, the whole file
    stored: GGUFTensor
    permuted_head_dim: int = 0  # features of a head; its rows are in the order of unturned()
    offset: float = 0.0  # that was added
    transposed: bool = False
    expert: int | None = None  # of a stack
    rows: tuple[int, int] | None = None  # first and last + 1, of what the file has joined
    to_float32: bool = False  # [K], where the model has [1, K]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES.get(self.stored.kind.name, torch.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self._laid if self.expert is None else self._laid[1:]
        if self.rows is not None:
            shape = (self.rows[1] - self.rows[0], *shape[1:])
        return (1, *shape) if self.to_float32 else shape[::-1] if self.transposed else shape

    @property
    def _laid(self) -> tuple[int, ...]:
        """Shape in the file; the last axis of quantized blocks counts bytes."""
        *outer, last = self.stored.shape
        kind = self.stored.kind
        return (*outer, last if kind.name in DTYPES else last // kind.block_size * kind.type_size)

    def tensor(self) -> Tensor:
        raw = self.data[self.stored.start : self.stored.start + self.stored.size]
        aligned = raw.storage_offset() % self.dtype.itemsize == 0
        found = (raw if aligned else raw.clone()).view(self.dtype).view(self._laid)
        if self.expert is not None:
            found = found[self.expert]
        if self.rows is not None:
            found = found[slice(*self.rows)]
        if self.permuted_head_dim:
            found = found[unpermuted_rows(len(found), self.permuted_head_dim)]
        if self.offset:
            found = found.float() - self.offset
        return found[None] if self.to_float32 else found.t() if self.transposed else found


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


def entries(path: Path) -> Iterator[tuple[str, GGUFEntry]]:
    """Every tensor by the modules' name for it; one that no module has, by its own."""
    model = model_of(path)
    maps: dict[Path, Tensor] = {each: _mapped(each) for each in paths(path)}
    count = 0
    for name, (file, stored) in model.tensors.items():
        if name in ROPE:
            continue
        found = _named(model, name, GGUFEntry(name, maps[file.path], stored))
        if (count := count + len(found)) > MAX_MATRICES:
            raise ValueError(
                f"{path}: with the experts of {format_name(name)}, {list(stored.shape)}, it has more than "
                f"{MAX_MATRICES} "
                "matrices, and no model has; fetch it again"
            )
        yield from found.items()


def _mapped(path: Path) -> Tensor:
    """Private, so that nothing written to it gets into the file."""
    with path.open("rb") as stream:
        return torch.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _named(model: GGUFModel, name: str, entry: GGUFEntry) -> Mapping[str, GGUFEntry]:
    base, _, last = name.rpartition(".")
    modules = model.architecture.names.modules(base)
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
    names, (parent, _, own) = model.architecture.names, module.rpartition(".")
    if parent.endswith(".experts"):
        return _of_experts(model, module, last, entry)
    blocks = entry.stored.kind.name not in DTYPES
    if names.permutes_qk and own in ("q_proj", "k_proj"):
        try:
            check_head_rows(entry.shape[0], model.head_dim)
        except ValueError as error:
            raise ValueError(f"{model.path}: {entry.name}: {error}") from None
        entry = replace(entry, permuted_head_dim=model.head_dim)
    if names.offset and own.endswith("norm"):
        entry = replace(entry, offset=names.offset)
    if own in names.transposed and last == "weight" and not blocks:
        entry = replace(entry, transposed=True)
    wide = own == "shared_expert_gate" and len(entry.stored.shape) == 1
    return {f"{module}.{last}": replace(entry, to_float32=wide)}


def _of_experts(model: GGUFModel, module: str, last: str, entry: GGUFEntry) -> Mapping[str, GGUFEntry]:
    parent, _, own = module.rpartition(".")
    if len(entry.stored.shape) != 3:  # a bias of each, say: the loader then says that the model has no place for it
        return {entry.name: entry}
    count = entry.stored.shape[0]
    if count > MAX_EXPERTS:
        raise ValueError(f"{model.path}: {entry.name} is of {count} experts, more than any model has; fetch it again")
    return {f"{parent}.{index}.{own}.{last}": replace(entry, expert=index) for index in range(count)}
