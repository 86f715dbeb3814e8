"""Plain data about weights: their forms, and which stretch of which checkpoint tensor each rank keeps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
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
    ordered: bool = False  # groups are of inputs in another order than they come in
    dtype: torch.dtype | None = None  # of values that are floats; None: whole numbers
    mins: bool = False  # numbers are added to groups: K-quants' minima, zero points that are no whole numbers
    together: int = 1  # outputs in a row that share their scales, of floats that are quantized; 0: all of a tensor
    table: tuple[float, ...] = ()  # what the values of a table's kind stand for, before they are scaled
    blocks: str = (
        ""  # the published type of blocks that it is of (GGUF's), which a platform may hold more tightly than so
    )

    @property
    def plain(self) -> bool:
        return self.kind == "plain"

    @property
    def exact(self) -> "Form":
        """The same numbers in products that leave activations as they are."""
        kinds = {"w8a8": "int8", "w4a8": "int4", "fp8a8": "fp8"}
        return replace(self, kind=kinds.get(self.kind, self.kind), activations=16)

    def taking(self, activations: int | None) -> "Form":
        """The same with activations of so many bits, 8 or 16; None: as it says. Floats take them as they are."""
        if activations is None or self.plain or (activations == 8 and self.dtype is not None):
            return self
        kinds = {"int8": "w8a8", "int4": "w4a8"}
        return self.exact if activations == 16 else replace(self, kind=kinds.get(self.kind, self.kind), activations=8)

    @property
    def needs(self) -> frozenset[str]:
        """Kinds that a platform must keep (Capabilities.quant) for this form to stay as it is."""
        coarse = self.group > 0 if self.kind == "w8a8" else self.kind == "w4a8" and (self.zeros or not self.group)
        return frozenset([self.kind, *["mins"] * self.mins, *["order"] * self.ordered, *["grouped"] * coarse])

    def groups(self, inputs: int) -> int:
        """Scales of an output. What is left at the end is a group too."""
        return -(-inputs // (self.group or inputs))

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of a canonical matrix [N, K]; not of a plain one, which has the weight's type."""
        outputs, inputs = shape
        scales = outputs * self.groups(inputs) * (4 + self.zeros + 4 * self.mins)
        return outputs * inputs * self.bits // 8 + scales + 4 * inputs * self.ordered


PLAIN = Form()


class Matrix(NamedTuple):
    """A weight [N, K] as products take it: canonical, as described here, or as place() packed it for their provider.

    A stack of such weights, as experts have them, is [E, N, K] in all of its tensors.

    8 bits: int8, float8_e4m3fn or float8_e5m2 [N, K], of a table uint8. 4 bits: uint8 [N, K / 2], byte i holds the
    inputs 2 i (low bits) and 2 i + 1 (high bits), each 0..15.
    """

    values: Tensor
    scales: Tensor | None = None  # float32 [N, G], one for each group of inputs
    zeros: Tensor | None = None  # [N, G] uint8 or floats; for whole numbers of 4 bits
    order: Tensor | None = None  # int32 [K]: column i of the values is of input order[i]
    form: Form = PLAIN
    mins: Tensor | None = None  # float32 [N, G], of whole numbers: added to what values and scales stand for


@dataclass(frozen=True)
class Part:
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
    strips: int = (
        0  # equal strips that it is cut in, `total / strips` apart in the tensor, from `offset` on; 0: it is one
    )
    shift: float = 0.0  # added to what the checkpoint holds: a norm's weight that is kept around 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the whole checkpoint tensor in the file, where that holds floats."""
        shape = self.shape if self.total is None else (self.total, *self.shape[1:])
        return shape[::-1] if self.transposed else shape


class OnFile(NamedTuple):
    """A tensor as it stands in a checkpoint."""

    shape: tuple[int, ...] | None  # None: the reader looks at it itself
    dtypes: tuple[torch.dtype, ...]  # that it may have
    also: tuple[tuple[int, ...], ...] = ()  # shapes that mean the same
    name: str = ""  # that the file has for it; "": the modules' name
    read: Callable[[], Tensor] | None = None  # of one that is there


class Rows(NamedTuple):
    """A matrix as a file has it: each row a number of blocks."""

    kind: str  # of the blocks: Form.blocks
    bytes: Tensor  # uint8 [N, B]; a row's bytes are neighbours


FLOATS = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


class Cut(NamedTuple):
    """A rank's share of a part, as first and last + 1."""

    outputs: tuple[int, int]
    inputs: tuple[int, int]
    row: int = 0  # inputs of the whole part; 0: unknown. For scales of runs of numbers that do not end with a row


class Reader(Protocol):
    """Reader of a matrix in a quantized checkpoint: its tensors' names, shapes and bits. Hashable; knows no device."""

    def stored(self, part: Part) -> dict[str, OnFile]:
        """The tensors that the part is in, by name."""

    def form(self, cut: Cut) -> Form:
        """Returns the form of matrix(); plain where the share cuts what cannot be cut, and only floats() works."""

    def matrix(self, part: Part, cut: Cut, tensors: Mapping[str, Tensor]) -> Matrix:
        """The share of it, canonical; nothing else is unpacked."""

    def floats(self, part: Part, cut: Cut, tensors: Mapping[str, Tensor]) -> Tensor:
        """The share of it, dequantized: float32 [N, K]."""


@runtime_checkable
class OfBlocks(Protocol):
    """A reader of matrices in blocks, which a platform may unpack itself."""

    def rows(self, part: Part, cut: Cut, tensors: Mapping[str, Tensor]) -> Rows | None:
        """The share of it; None where that begins or ends within a block."""


@dataclass(frozen=True)
class Weight:
    """One parameter of a layer: parts of checkpoint tensors, sliced by rank and joined along the shard axis.

    With `stack`, of so many matrices of equal shape, [stack, ...]: each has as many of the parts, in order.
    """

    name: str  # the attribute of the layer that it becomes
    parts: tuple[Part, ...]
    axis: int  # the shard axis, of each matrix of a stack; an SPMD platform shards along it and ignores the ranges
    rank: int
    dtype: torch.dtype
    # what place() may repack it for: "linear", "experts", "biased experts", "heads", "turned heads", "embedding",
    # "channels" (a few numbers for each, in the channels' own order), "vector"
    use: str
    form: Form = PLAIN  # what place() makes of it
    reader: Reader | None = None  # of a quantized checkpoint; None: it holds floats
    shared: bool = False  # another layer wants the same tensors in this form: a tied head. Set by the loader
    stack: int = 0  # matrices, one per expert; 0: it is no stack
    elsewhere: tuple[Part, ...] = ()  # other ranks keep them whole, and this one nothing of them

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what this rank keeps."""
        shape, each = list(self.parts[0].shape), self.parts[: len(self.parts) // (self.stack or 1)]
        shape[self.axis] = sum(stop - start for start, stop in (part.ranges[self.rank] for part in each))
        return (self.stack, *shape) if self.stack else tuple(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of what this rank keeps, in its form."""
        if self.form.plain:
            return math.prod(self.shape) * self.dtype.itemsize
        return (self.stack or 1) * self.form.num_bytes(self.shape[-2:])

    @property
    def stored(self) -> dict[str, OnFile]:
        """The checkpoint tensors that it is made of, by name."""
        return self._stored(self.parts)

    @property
    def everywhere(self) -> dict[str, OnFile]:
        """The same of all ranks."""
        return self._stored((*self.parts, *self.elsewhere))

    def _stored(self, parts: Sequence[Part]) -> dict[str, OnFile]:
        if self.reader is None:
            return {part.source: OnFile(part.stored_shape, FLOATS) for part in parts}
        return {name: each for part in parts for name, each in self.reader.stored(part).items()}

    def local(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's floats, in the checkpoint's type where it holds floats; a view where that is possible."""
        slices = self.pieces(tensors)
        if not self.stack:
            return slices[0] if len(slices) == 1 else torch.cat(slices, self.axis)
        stacked, count = slices[0].new_empty(self.shape), len(slices) // self.stack
        for index, matrix in enumerate(stacked):
            torch.cat(slices[index * count : (index + 1) * count], self.axis, out=matrix)
        return stacked

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's slice of each part, in order, in floats."""
        if self.reader is not None:
            return [self._padded(part, self.reader.floats(part, self._held(part), tensors)) for part in self.parts]
        return [self._slice(part, tensors[part.source]) for part in self.parts]

    def matrices(self, tensors: Mapping[str, Tensor]) -> list[Matrix]:
        """This rank's slice of each part of a quantized checkpoint, canonical, in order."""
        assert self.reader is not None, "floats are quantized by ops.quantize.canonical()"
        assert not self.padded, "what has padding is held in floats"
        matrices = [self.reader.matrix(part, self.cut(part), tensors) for part in self.parts]
        return matrices if self.form.plain else [each._replace(form=self.form) for each in matrices]

    def rows(self, tensors: Mapping[str, Tensor]) -> list[Rows] | None:
        """The same as the file has it, if that is in blocks."""
        if self.padded or not isinstance(self.reader, OfBlocks):
            return None
        found = [self.reader.rows(part, self.cut(part), tensors) for part in self.parts]
        return None if None in found else [each for each in found if each is not None]

    def cut(self, part: Part) -> Cut:
        """This rank's share of the part, within the tensor that it is stored in."""
        start, stop = (part.offset + each for each in part.ranges[self.rank])
        outputs, inputs = part.shape
        return Cut((0, outputs), (start, stop), inputs) if self.axis else Cut((start, stop), (0, inputs), inputs)

    @property
    def padded(self) -> bool:
        """True if a share runs past the end of its tensor."""
        return any(part.ranges[self.rank][1] > part.shape[self.axis] for part in self.parts)

    def _held(self, part: Part) -> Cut:
        """cut() without what is past the tensor's end."""
        cut, end = self.cut(part), part.offset + part.shape[self.axis]
        start, stop = (min(each, end) for each in (cut.inputs if self.axis else cut.outputs))
        return cut._replace(inputs=(start, stop)) if self.axis else cut._replace(outputs=(start, stop))

    def _padded(self, part: Part, known: Tensor) -> Tensor:
        """With zeros for what is past the tensor's end."""
        start, stop = part.ranges[self.rank]
        missing = stop - start - known.shape[self.axis]
        wide = torch.nn.functional.pad(known, (0, missing) if self.axis else (0, 0, 0, missing)) if missing else known
        return wide.to(self.dtype)

    def _slice(self, part: Part, tensor: Tensor) -> Tensor:
        if part.transposed:
            tensor = tensor.t()
        start, stop = part.ranges[self.rank]
        end, offset = part.shape[self.axis], part.offset
        if part.strips:
            apart = tensor.unflatten(self.axis, (part.strips, -1))
            strip = apart.narrow(self.axis + 1, offset, end // part.strips)
            tensor, offset = strip.flatten(self.axis, self.axis + 1), 0
        kept = tensor.narrow(self.axis, offset + min(start, end), max(0, min(stop, end) - start))
        kept = kept + part.shift if part.shift else kept
        if stop <= end:
            return kept
        shape = list(kept.shape)
        shape[self.axis] = stop - max(start, min(start, end)) - kept.shape[self.axis]
        return torch.cat([kept, kept.new_zeros(shape)], self.axis)
