"""Tensors of GGUF files as the modules want them: one of the file, rows of several, or computed in floats."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from quintet.gguf.model import GGUFModel
from quintet.gguf.names import unpermuted_rows
from quintet.gguf.tensor_types import GGUFTensor
from quintet.layers.quantization.formats.gguf import dequantize

WIDE = ("log_of_negative", "first_less_second")  # ends of the names of functions whose results are float32
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


class LoadedTensor(Protocol):
    """A tensor that the loader may read."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def tensor(self) -> Tensor:
        """Reads it; of quantized blocks, uint8 [N, bytes of a row]."""


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
    def quantized(self) -> bool:
        """True if it is of blocks."""
        return self.stored.kind.name not in DTYPES

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
    def float_shape(self) -> tuple[int, ...]:
        """Shape of floats()."""
        size = self.stored.kind.block_size if self.quantized else 1
        *outer, last = self.shape
        return (*outer, last // self.stored.kind.type_size * size) if self.quantized else self.shape

    @property
    def _laid(self) -> tuple[int, ...]:
        """Shape in the file; the last axis of quantized blocks counts bytes."""
        *outer, last = self.stored.shape
        kind = self.stored.kind
        return (*outer, last // kind.block_size * kind.type_size if self.quantized else last)

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

    def floats(self) -> Tensor:
        """Reads it, dequantized to float32 where it is of blocks."""
        return dequantize(self.stored.kind.name, self.tensor()) if self.quantized else self.tensor()


@dataclass(frozen=True)
class JoinedEntry:
    """Rows of several matrices, in another order. Blocks stay as they are if all are of one type."""

    model: GGUFModel
    parts: tuple[GGUFEntry, ...]
    order: str = ""  # of ROW_ORDERS
    transposed: bool = False

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype if self._alike else torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        _, *inner = first.shape if self._alike else first.float_shape
        shape = (sum(each.shape[0] for each in self.parts), *inner)
        return shape[::-1] if self.transposed else shape

    @property
    def _alike(self) -> bool:
        return len({each.stored.kind.name for each in self.parts}) == 1

    def tensor(self) -> Tensor:
        found = torch.cat([each.tensor() if self._alike else each.floats().float() for each in self.parts])
        if self.order:
            found = found[ROW_ORDERS[self.order](self.model, len(found))]
        return found.t() if self.transposed else found

    def of_expert(self, index: int) -> "JoinedEntry":
        """Returns the rows of one expert of stacks."""
        return replace(self, parts=tuple(replace(each, expert=index) for each in self.parts))


def _grouped_rows(model: GGUFModel, count: int) -> list[int]:
    """Rows of q, k and v, each of all heads -> queries, key and value of each KV head, one after the other."""
    heads, kv_heads = model.heads, model.kv_heads
    size = count // (heads + 2 * kv_heads)
    if not size or size * (heads + 2 * kv_heads) != count or heads % kv_heads:
        raise ValueError(f"{model.path}: {count} rows are no heads, {heads} of q and {kv_heads} of k and v")
    queries, found = heads // kv_heads, []
    for group in range(kv_heads):
        places = [*range(group * queries, (group + 1) * queries), heads + group, heads + kv_heads + group]
        found += [place * size + row for place in places for row in range(size)]
    return found


def _interleaved_rows(model: GGUFModel, count: int) -> list[int]:
    """Rows of two matrices, one of each in turns."""
    return [row // 2 + (count // 2 if row % 2 else 0) for row in range(count)]


def _tiled_rows(model: GGUFModel, count: int) -> list[int]:
    """Rows of value heads, the first of each key head before the second ones -> those of a key head together."""
    heads, keys = model.required_number("ssm.time_step_rank"), model.required_number("ssm.group_count")
    size, times = count // heads, heads // keys
    if size * heads != count or times * keys != heads:
        raise ValueError(f"{model.path}: {count} rows are not of {heads} value heads for {keys} key heads")
    return [(head % times * keys + head // times) * size + row for head in range(heads) for row in range(size)]


def _tiled_rows_after_keys(model: GGUFModel, count: int) -> list[int]:
    """The same behind the rows of queries and keys."""
    first = 2 * model.required_number("ssm.group_count") * model.required_number("ssm.state_size")
    if first >= count:
        raise ValueError(f"{model.path}: {count} rows are not {first} of queries and keys, and those of values")
    return [*range(first), *(first + row for row in _tiled_rows(model, count - first))]


ROW_ORDERS: Mapping[str, Callable[[GGUFModel, int], list[int]]] = {
    "grouped": _grouped_rows,
    "interleaved": _interleaved_rows,
    "tiled": _tiled_rows,
    "tiled after keys": _tiled_rows_after_keys,
}


@dataclass(frozen=True)
class ComputedEntry:
    """A tensor that is computed in floats from some of the file."""

    model: GGUFModel
    function: str  # of FUNCTIONS
    parts: tuple[GGUFEntry, ...]

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def dtype(self) -> torch.dtype:
        first = self.parts[0]
        return torch.float32 if first.quantized or self.function.endswith(WIDE) else first.dtype

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._compute([torch.empty(each.float_shape, device="meta") for each in self.parts]).shape)

    def tensor(self) -> Tensor:
        return self._compute([each.floats() for each in self.parts]).to(self.dtype)

    def _compute(self, tensors: Sequence[Tensor]) -> Tensor:
        try:
            return FUNCTIONS[self.function](self.model, *tensors)
        except (RuntimeError, ValueError, IndexError) as error:  # shapes that do not fit
            shapes = ", ".join(f"{each.name} {list(each.float_shape)}" for each in self.parts)
            raise ValueError(f"{self.model.path}: {shapes} do not fit: {str(error)[:200]}; fetch it again") from None


@dataclass(frozen=True)
class StatedEntry:
    """A tensor of one number: of a layer, which the file has in its metadata, or one that no output depends on."""

    name: str  # the key, or the tensor
    value: float
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (1,)

    def tensor(self) -> Tensor:
        return torch.full(self.shape, self.value)


def _same(model: GGUFModel, x: Tensor) -> Tensor:
    return x


def _flat(model: GGUFModel, x: Tensor) -> Tensor:
    return x.reshape(-1)


def _first_less_second(model: GGUFModel, x: Tensor) -> Tensor:
    """[2, D] of the logits of two tokens -> [1, D], of their difference."""
    first, second = x.float().split(1)
    return first - second


def _one_channel(model: GGUFModel, x: Tensor) -> Tensor:
    """[D, K] of a convolution of single channels -> [D, 1, K]."""
    return x.reshape(-1, 1, x.shape[-1])


def _log_of_negative(model: GGUFModel, x: Tensor) -> Tensor:
    """-exp(A_log), [H, 1] of Mamba 2 or [D, N] of Mamba -> A_log [H] or [D, N]."""
    found = torch.log(-x.float())
    return found.reshape(-1) if found.shape[-1] == 1 else found


def _latent_kv(model: GGUFModel, k: Tensor, v: Tensor) -> Tensor:
    """[H, R, N] of keys and [H, V, R] of values -> [H (N + V), R], each head's keys over its values (kv_b_proj)."""
    return torch.cat([k.transpose(1, 2), v], 1).flatten(0, 1)


def _less(model: GGUFModel, x: Tensor, amount: float) -> Tensor:
    return x.float() - amount


def _by_head(model: GGUFModel, x: Tensor) -> Tensor:
    """[H D] of RWKV-7 -> [H, D]."""
    return x.reshape(-1, model.required_number("wkv.head_size"))


def _rows(model: GGUFModel, *parts: Tensor) -> Tensor:
    """Rows of several matrices, or biases, one after the other."""
    return torch.cat(parts)


def _frames(model: GGUFModel, *parts: Tensor) -> Tensor:
    """[out, in, height, width] of each frame of a patch -> [out, in, frames, height, width]."""
    return torch.stack(parts, 2)


def _one_batch(model: GGUFModel, x: Tensor) -> Tensor:
    """[D] or [N, D] -> [1, N, D]."""
    return x.reshape(1, -1, x.shape[-1])


def _part(model: GGUFModel, x: Tensor, index: int) -> Tensor:
    """One of a stack."""
    return x[index]


def _tiled(model: GGUFModel, x: Tensor) -> Tensor:
    return x[_tiled_rows(model, len(x))]


def _tiled_columns(model: GGUFModel, x: Tensor) -> Tensor:
    return x[:, _tiled_rows(model, x.shape[1])]


def _tiled_log_of_negative(model: GGUFModel, x: Tensor) -> Tensor:
    return _tiled(model, _log_of_negative(model, x))


def _tiled_channels(model: GGUFModel, x: Tensor) -> Tensor:
    return _one_channel(model, x[_tiled_rows_after_keys(model, len(x))])


def _rates(model: GGUFModel, x: Tensor, index: int) -> Tensor:
    """[2 H, K], of each key head the first rates of its value heads, then the second ones -> the first or second of all
    heads [H, K]."""
    return x.unflatten(0, (model.required_number("ssm.group_count"), 2, -1))[:, index].flatten(0, 1)


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "same": _same,
    "flat": _flat,
    "first_less_second": _first_less_second,
    "one_channel": _one_channel,
    "log_of_negative": _log_of_negative,
    "latent_kv": _latent_kv,
    **{f"part {index}": functools.partial(_part, index=index) for index in range(6)},
    **{f"rates_{name}": functools.partial(_rates, index=index) for index, name in enumerate("ba")},
    "less_one": functools.partial(_less, amount=1.0),
    "less_fifth": functools.partial(_less, amount=1 / 5),
    "less_root_of_fifths": functools.partial(_less, amount=1 / 5**1.5),
    "by_head": _by_head,
    "rows": _rows,
    "frames": _frames,
    "one_batch": _one_batch,
    "tiled": _tiled,
    "tiled_columns": _tiled_columns,
    "tiled_channels": _tiled_channels,
    "tiled_log_of_negative": _tiled_log_of_negative,
}
