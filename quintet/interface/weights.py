"""Plain data about weights: their formats, and which stretch of which checkpoint tensor each rank keeps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightFormat:
    """Weight format: how a matrix is held, and how a product takes its inputs; plain floats by default. Known when a
    model is built: what is compiled is compiled for it.

    What is held stands for (value - zero) * scale + minimum. Providers of products are registered for kinds: plain;
    int8, int4 and fp8; w8a8, w4a8 and fp8a8, with activations in 8 bits too; table4 and table8, with values that are
    indices into a table (nf4, e2m1, ...). Values of 2 and 3 bits are held in 4, those of 5 to 7 in 8.
    """

    kind: str = "plain"
    bits: int = 16  # of a value, as it is held: 4 or 8, 16 if plain
    activations: int = 16  # bits: 16 for as they are, 8 for values of the weight's sort
    group: int = 0  # inputs in a row that share a scale; 0: all of an output's
    zeros: bool = False  # there are zero points, for 4 bits; without them 4 bits stand for -8..7
    act_order: bool = False  # groups are of inputs in another order than they come in
    dtype: torch.dtype | None = None  # of values that are floats; None: whole numbers
    mins: bool = False  # numbers are added to groups: K-quants' minima, zero points that are no whole numbers
    # outputs in a row that share their scales, of floats that are quantized; 0: all of a tensor
    outputs_per_scale: int = 1
    codebook: tuple[float, ...] = ()  # what the values of a table's kind stand for, before they are scaled
    # the published type of blocks that it is of (GGUF's), which a platform may hold more tightly than so
    block_type: str = ""

    @property
    def plain(self) -> bool:
        return self.kind == "plain"

    @property
    def float_activations(self) -> "WeightFormat":
        """The same numbers in products that leave activations as they are."""
        kinds = {"w8a8": "int8", "w4a8": "int4", "fp8a8": "fp8"}
        return replace(self, kind=kinds.get(self.kind, self.kind), activations=16)

    def with_activations(self, activations: int | None) -> "WeightFormat":
        """The same with activations of so many bits, 8 or 16; None: as it says. Floats take them as they are."""
        if activations is None or self.plain or (activations == 8 and self.dtype is not None):
            return self
        kinds = {"int8": "w8a8", "int4": "w4a8"}
        return (
            self.float_activations
            if activations == 16
            else replace(self, kind=kinds.get(self.kind, self.kind), activations=8)
        )

    @property
    def required_kinds(self) -> frozenset[str]:
        """Kinds that a platform must keep (Capabilities.weight_formats) for this format to stay as it is."""
        coarse = self.group > 0 if self.kind == "w8a8" else self.kind == "w4a8" and (self.zeros or not self.group)
        return frozenset([self.kind, *["mins"] * self.mins, *["order"] * self.act_order, *["grouped"] * coarse])

    def groups(self, inputs: int) -> int:
        """Scales of an output. What is left at the end is a group too."""
        return -(-inputs // (self.group or inputs))

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of a canonical matrix [N, K]; not of a plain one, which has the weight's type."""
        outputs, inputs = shape
        scales = outputs * self.groups(inputs) * (4 + self.zeros + 4 * self.mins)
        return outputs * inputs * self.bits // 8 + scales + 4 * inputs * self.act_order


PLAIN = WeightFormat()


class Matrix(NamedTuple):
    """A weight [N, K] as products take it: canonical, as described here, or as place() packed it for their provider.

    A stack of such weights, as experts have them, is [E, N, K] in all of its tensors.

    8 bits: int8, float8_e4m3fn or float8_e5m2 [N, K], of a table uint8. 4 bits: uint8 [N, K / 2], byte i holds the
    inputs 2 i (low bits) and 2 i + 1 (high bits), each 0..15.
    """

    values: Tensor
    scales: Tensor | None = None  # float32 [N, G], one for each group of inputs
    zeros: Tensor | None = None  # [N, G] uint8 or floats; for whole numbers of 4 bits
    input_order: Tensor | None = None  # int32 [K]: column i of the values is of input order[i]
    format: WeightFormat = PLAIN
    mins: Tensor | None = None  # float32 [N, G], of whole numbers: added to what values and scales stand for


@dataclass(frozen=True)
class CheckpointSlice:
    """A slice of one checkpoint tensor, and which stretch of it each rank keeps.

    `ranges[rank]` counts from `offset` along the weight's shard axis. A range may run past the end of the
    tensor: the rest is zeros (a padded vocabulary).
    """

    source: str  # the tensor's name in the checkpoint
    shape: tuple[int, ...]  # of this part, whole, as the layer sees it (after a transposition)
    ranges: tuple[tuple[int, int], ...]
    offset: int = 0
    transposed: bool = False  # stored [in, out]
    total: int | None = None  # the checkpoint tensor's size along the shard axis; None: the part is all of it
    # equal strips that it is cut in, `total / strips` apart in the tensor, from `offset` on; 0: it is one
    num_strips: int = 0
    shift: float = 0.0  # added to what the checkpoint holds: a norm's weight that is kept around 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the whole checkpoint tensor in the file, where that holds floats."""
        shape = self.shape if self.total is None else (self.total, *self.shape[1:])
        return shape[::-1] if self.transposed else shape


class StoredTensor(NamedTuple):
    """A tensor as it stands in a checkpoint."""

    shape: tuple[int, ...] | None  # None: the reader looks at it itself
    dtypes: tuple[torch.dtype, ...]  # that it may have
    other_shapes: tuple[tuple[int, ...], ...] = ()  # shapes that mean the same
    name: str = ""  # that the file has for it; "": the modules' name
    read: Callable[[], Tensor] | None = None  # of one that is there


class BlockRows(NamedTuple):
    """A matrix as a file has it: each row a number of blocks."""

    kind: str  # of the blocks: Format.blocks
    bytes: Tensor  # uint8 [N, B]; a row's bytes are neighbours


FLOATS = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)  # of tables of whole numbers, whose Weight has the dtype int32


class ShardRange(NamedTuple):
    """A rank's share of a part, as first and last + 1."""

    outputs: tuple[int, int]
    inputs: tuple[int, int]
    row: int = 0  # inputs of the whole part; 0: unknown. For scales of runs of numbers that do not end with a row


class WeightReader(Protocol):
    """Reader of a matrix in a quantized checkpoint: its tensors' names, shapes and bits. Hashable; knows no device."""

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        """The tensors that the part is in, by name."""

    def format(self, shard: ShardRange) -> WeightFormat:
        """Returns the format of matrix(); plain where the share cuts what cannot be cut, and only floats() works."""

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        """The share of it, canonical; nothing else is unpacked."""

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        """The share of it, dequantized: float32 [N, K]."""


@runtime_checkable
class BlockReader(Protocol):
    """A reader of matrices in blocks, which a platform may unpack itself."""

    def blocks(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> BlockRows | None:
        """The share of it; None where that begins or ends within a block."""


@dataclass(frozen=True)
class Weight:
    """One parameter of a layer: parts of checkpoint tensors, sliced by rank and joined along the shard axis.

    With `stack`, of so many matrices of equal shape, [stack, ...]: each has as many of the parts, in order.
    """

    name: str  # the attribute of the layer that it becomes
    slices: tuple[CheckpointSlice, ...]
    axis: int  # the shard axis, of each matrix of a stack; an SPMD platform shards along it and ignores the ranges
    rank: int
    dtype: torch.dtype
    # what place() may repack it for: "linear", "experts", "biased experts", "heads", "transposed heads", "embedding",
    # "channels" (a few numbers for each, in the channels' own order), "vector"
    use: str
    format: WeightFormat = PLAIN  # what place() makes of it
    reader: WeightReader | None = None  # of a quantized checkpoint; None: it holds floats
    shared: bool = False  # another layer wants the same tensors in this format: a tied head. Set by the loader
    stack: int = 0  # matrices, one per expert; 0: it is no stack
    remote_slices: tuple[CheckpointSlice, ...] = ()  # other ranks keep them whole, and this one nothing of them
    # (first, count) of the rows of what is there that place(into=) writes; None: all. Where Capabilities.lora is set
    rows: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what this rank keeps."""
        shape, each = list(self.slices[0].shape), self.slices[: len(self.slices) // (self.stack or 1)]
        shape[self.axis] = sum(stop - start for start, stop in (part.ranges[self.rank] for part in each))
        return (self.stack, *shape) if self.stack else tuple(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of what this rank keeps, in its format."""
        if self.format.plain:
            return math.prod(self.shape) * self.dtype.itemsize
        return (self.stack or 1) * self.format.num_bytes(self.shape[-2:])

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """The checkpoint tensors that it is made of, by name."""
        return self._stored(self.slices)

    @property
    def stored_on_all_ranks(self) -> dict[str, StoredTensor]:
        """The same of all ranks."""
        return self._stored((*self.slices, *self.remote_slices))

    def _stored(self, parts: Sequence[CheckpointSlice]) -> dict[str, StoredTensor]:
        if self.reader is None:
            types = FLOATS if self.dtype.is_floating_point else INTEGERS
            return {part.source: StoredTensor(part.stored_shape, types) for part in parts}
        return {name: each for part in parts for name, each in self.reader.stored(part).items()}

    def local(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's floats, in the checkpoint's type where it holds floats; a view where that is possible."""
        slices = self.local_slices(tensors)
        if not self.stack:
            return slices[0] if len(slices) == 1 else torch.cat(slices, self.axis)
        stacked, count = slices[0].new_empty(self.shape), len(slices) // self.stack
        for index, matrix in enumerate(stacked):
            torch.cat(slices[index * count : (index + 1) * count], self.axis, out=matrix)
        return stacked

    def local_slices(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's slice of each part, in order, in floats."""
        if self.reader is not None:
            return [self._padded(part, self.reader.floats(part, self._held(part), tensors)) for part in self.slices]
        return [self._slice(part, tensors[part.source]) for part in self.slices]

    def local_matrices(self, tensors: Mapping[str, Tensor]) -> list[Matrix]:
        """This rank's slice of each part of a quantized checkpoint, canonical, in order."""
        assert self.reader is not None, "floats are quantized by ops.quantize.canonical()"
        assert not self.padded, "what has padding is held in floats"
        matrices = [self.reader.matrix(part, self.shard(part), tensors) for part in self.slices]
        return matrices if self.format.plain else [each._replace(format=self.format) for each in matrices]

    def local_blocks(self, tensors: Mapping[str, Tensor]) -> list[BlockRows] | None:
        """The same as the file has it, if that is in blocks."""
        if self.padded or not isinstance(self.reader, BlockReader):
            return None
        found = [self.reader.blocks(part, self.shard(part), tensors) for part in self.slices]
        return None if None in found else [each for each in found if each is not None]

    def shard(self, part: CheckpointSlice) -> ShardRange:
        """This rank's share of the part, within the tensor that it is stored in."""
        start, stop = (part.offset + each for each in part.ranges[self.rank])
        outputs, inputs = part.shape
        return (
            ShardRange((0, outputs), (start, stop), inputs)
            if self.axis
            else ShardRange((start, stop), (0, inputs), inputs)
        )

    @property
    def padded(self) -> bool:
        """True if a share runs past the end of its tensor."""
        return any(part.ranges[self.rank][1] > part.shape[self.axis] for part in self.slices)

    def _held(self, part: CheckpointSlice) -> ShardRange:
        """shard() without what is past the tensor's end."""
        shard, end = self.shard(part), part.offset + part.shape[self.axis]
        start, stop = (min(each, end) for each in (shard.inputs if self.axis else shard.outputs))
        return shard._replace(inputs=(start, stop)) if self.axis else shard._replace(outputs=(start, stop))

    def _padded(self, part: CheckpointSlice, known: Tensor) -> Tensor:
        """With zeros for what is past the tensor's end."""
        start, stop = part.ranges[self.rank]
        missing = stop - start - known.shape[self.axis]
        wide = torch.nn.functional.pad(known, (0, missing) if self.axis else (0, 0, 0, missing)) if missing else known
        return wide.to(self.dtype)

    def _slice(self, part: CheckpointSlice, tensor: Tensor) -> Tensor:
        if part.transposed:
            tensor = tensor.t()
        start, stop = part.ranges[self.rank]
        end, offset = part.shape[self.axis], part.offset
        if part.num_strips:
            apart = tensor.unflatten(self.axis, (part.num_strips, -1))
            strip = apart.narrow(self.axis + 1, offset, end // part.num_strips)
            tensor, offset = strip.flatten(self.axis, self.axis + 1), 0
        kept = tensor.narrow(self.axis, offset + min(start, end), max(0, min(stop, end) - start))
        kept = kept + part.shift if part.shift else kept
        if stop <= end:
            return kept
        shape = list(kept.shape)
        shape[self.axis] = stop - max(start, min(start, end)) - kept.shape[self.axis]
        return torch.cat([kept, kept.new_zeros(shape)], self.axis)


def copied_into(
    placed: Mapping[str, Tensor], into: Mapping[str, Tensor], rows: tuple[int, int] | None = None
) -> Mapping[str, Tensor]:
    """Copies what place() made into the tensors that are there, or into `rows` of them (Weight.rows), where torch can
    write to them."""
    for name, tensor in placed.items():
        there = into[name] if rows is None else into[name].data.narrow(0, *rows)
        assert there.shape == tensor.shape and there.dtype == tensor.dtype, f"{name} was placed in another shape"
        if there.data_ptr() != tensor.data_ptr():
            there.data.copy_(tensor)
    return {name: into[name] for name in placed}
