"""Matrix products with weights, sharded by columns (outputs) or by rows (inputs)."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from quintet.interface.weights import PLAIN, CheckpointSlice, Matrix, ShardRange, Weight, WeightFormat, WeightReader
from quintet.layers.build import BuildContext, Layer, Shards, even_shards, padded_shards, replicated
from quintet.layers.lora_step import LORA_POOL, LoRAStep
from quintet.ops.registry import of_kind


@dataclass(frozen=True)
class CheckpointLayout:
    """Layout of a linear layer in a checkpoint, where that is not one [out, in] tensor per output."""

    fused: str | None = None  # all outputs stand one after the other in this one
    transposed: bool = False  # [in, out]
    num_strips: int = 1  # of the fused one: that many times a share of each output, one after the other
    order: tuple[int, ...] = ()  # in which the outputs stand in the fused one; (): as they are named


class ColumnParallelLinear(Layer):
    """y = x W' + b. `outputs` maps checkpoint names, relative to the parent module ("/": absolute), to their splits.

    The weight is shared out along its outputs (axis 0), or along its inputs (axis 1) with `by_inputs`.
    """

    by_inputs = False

    def __init__(
        self,
        build: BuildContext,
        inputs: Shards,
        outputs: Mapping[str, Shards],
        bias: bool = False,
        stored: CheckpointLayout | None = None,
    ) -> None:
        super().__init__(build)
        self.format: WeightFormat = PLAIN  # of the weight, once settled
        self._reader: WeightReader | None = None
        self._build, self._inputs, self._outputs = build, inputs, dict(outputs)
        self._has_bias, self._stored = bias, stored or CheckpointLayout()
        self._offset, self._total = 0, sum(split.total for split in self._outputs.values())
        self._reduce = (
            self.by_inputs and build.size > 1 and inputs.ranges != replicated(inputs.total, build.size).ranges
        )
        self._shares: tuple[Shards, Shards] | None = None  # of inputs and outputs, where both come together from ranks
        self._pieces: list[SubLinear] = []
        self._apart = False  # each strip is a part of its own
        self._widths = tuple(split.local(build.rank) for split in self._outputs.values())
        self.weight: Tensor  # as place() packed it, with scales, zeros and order where its format has them
        self.bias: Tensor | None = None
        self._lora: LoRAStep | None = None  # where there is a pool of adapters beside the product

    def finalize(self, path: str) -> None:
        """The format, and the provider for it: steps ask for neither. Where outputs are held in different formats they
        become products of their own, side by side."""
        self._apart = self._stored.num_strips > 1 and self._packed(path)
        weight = self._weight(path)
        held = [
            self._settled(part.source.removesuffix(".weight"), weight, weight.shard(part)) for part in weight.slices
        ]
        if self._apart and len(set(held)) > 1:  # cuts fall within blocks of some
            held = [(PLAIN, held[0][1])]
        if any(fmt.act_order for fmt, _ in held[1:]) or len(set(held)) > 1:
            self._split(path, held)
            return
        self.format, self._reader = held[0]
        op = of_kind("linear", self.format.kind)
        self._multiply = getattr(self.ops.take(op), op)

    def _packed(self, path: str) -> bool:
        """True if the checkpoint holds it quantized."""
        sources = {part.source.removesuffix(".weight") for part in self._weight(path).slices}
        return any(self._build.quantization.reader(each) is not None for each in sources)

    def _settled(self, module: str, weight: Weight, shard: ShardRange) -> tuple[WeightFormat, WeightReader | None]:
        fmt, reader = self._build.quantization.format_for(module, shard)
        if fmt.act_order and self._apart:
            raise ValueError(
                f"{module} is quantized with its inputs in another order (desc_act), and shares of its outputs take "
                "turns in it: quintet reads one or the other; use a checkpoint without desc_act, or the model's "
                "original, with quantization= if it is to be quantized"
            )
        return (PLAIN, reader) if weight.padded and reader is not None else (fmt, reader)

    def _split(self, path: str, held: Sequence[tuple[WeightFormat, WeightReader | None]]) -> None:
        """Neighbours of one format stay together."""
        named, first = list(self._outputs.items()), 0
        while first < len(held):
            last = first + 1
            while last < len(held) and held[last] == held[first] and not held[last][0].act_order:
                last += 1
            piece = SubLinear(self._build, self._inputs, dict(named[first:last]), self._has_bias, self._stored)
            piece.set_parent(path, self._outputs, first)
            self.add_module(f"piece{len(self._pieces)}", piece)
            self._pieces.append(piece)
            first = last
        self.ops.take("beside")

    def weights(self, path: str) -> list[Weight]:
        if self._pieces:
            return []
        build, weight = self._build, self._weight(path)
        found = [replace(weight, format=self.format, reader=self._reader)]
        if self._has_bias:
            splits = [Shards(part.shape[0], part.ranges) for part in weight.slices] if self._apart else self._splits
            biases = tuple(self._bias(part, split) for part, split in zip(weight.slices, splits, strict=True))
            found.append(Weight("bias", biases, 0, build.rank, build.dtype, "vector"))
        return found

    @property
    def _splits(self) -> list[Shards]:
        return list(self._outputs.values())

    def _weight(self, path: str) -> Weight:
        """In floats; its parts, one per output."""
        parent, stored, parts = path.rpartition(".")[0], self._stored, []
        fused, total = stored.fused, self._total
        for (source, split), offset in zip(self._outputs.items(), self._offsets(), strict=True):
            part = CheckpointSlice(
                source=_checkpoint_name(parent, fused or source),
                shape=(split.total, self._inputs.total),
                ranges=self._inputs.ranges if self.by_inputs else split.ranges,
                offset=offset if fused else 0,
                transposed=stored.transposed,
                total=total if fused else None,
                num_strips=stored.num_strips if fused and stored.num_strips > 1 else 0,
            )
            parts += self._strip_slices(part) if self._apart else [part]
        build = self._build
        return Weight("weight", tuple(parts), int(self.by_inputs), build.rank, build.dtype, "linear")

    def _strip_slices(self, part: CheckpointSlice) -> list[CheckpointSlice]:
        """Those that this rank keeps some of, in order: what is quantized is cut in one stretch at a time."""
        share, found = part.shape[0] // part.num_strips, []
        for strip in range(part.num_strips):
            ranges = tuple(_intersect(each, strip * share, share) for each in part.ranges)
            if ranges[self._build.rank] != (0, 0):
                offset = part.offset + strip * (self._total // part.num_strips)
                shape = (share, *part.shape[1:])
                found.append(replace(part, shape=shape, ranges=ranges, offset=offset, num_strips=0))
        return found

    def _offsets(self) -> list[int]:
        """Returns where each output begins in the fused tensor, or in each of its strips."""
        shares = [split.total // self._stored.num_strips for split in self._outputs.values()]
        found, offset = [0] * len(shares), self._offset
        for index in self._stored.order or range(len(shares)):
            found[index], offset = offset, offset + shares[index]
        return found

    def _bias(self, weight: CheckpointSlice, split: Shards) -> CheckpointSlice:
        """Beside a part of the weight. A sum over ranks adds it once: all but one keep what is past its end, zeros."""
        ranges = split.ranges
        if self._reduce:
            past = (split.total, 2 * split.total)
            ranges = ((0, split.total),) + (past,) * (self._build.size - 1)
        source = weight.source.removesuffix("weight") + "bias"
        return replace(weight, source=source, shape=(split.total,), ranges=ranges, transposed=False)

    @property
    def inputs(self) -> Shards:
        """Its inputs, and which of them each rank takes."""
        return self._inputs

    def output_slices(self, path: str) -> tuple[CheckpointSlice, ...]:
        """Returns the rows of the checkpoint's tensors that the outputs on each rank belong to, in order."""
        parts = self._weight(path).slices
        if not self.by_inputs:
            return parts
        return tuple(replace(part, ranges=((0, part.shape[0]),) * self._build.size) for part in parts)

    def base_weights(self, path: str) -> Iterator[tuple[Weight, Weight | None]]:
        """Yields the checkpoint's floats of each of output_slices(), all inputs, and the bias that this rank adds."""
        build, weight = self._build, self._weight(path)
        for number, part in enumerate(weight.slices):
            whole = replace(part, ranges=((0, part.shape[0]),) * build.size) if self.by_inputs else part
            reader = build.quantization.reader(part.source.removesuffix(".weight"))
            bias = None
            if self._has_bias:
                split = Shards(part.shape[0], part.ranges) if self._apart else self._splits[number]
                bias = Weight("bias", (self._bias(part, split),), 0, build.rank, build.dtype, "vector")
            yield Weight("weight", (whole,), 0, build.rank, build.dtype, "linear", reader=reader), bias

    def add_lora_pool(self, pool: nn.Module) -> None:
        """Has a pool of adapters add to the product: a module with forward(y, x)."""
        self._lora = self._build.lora
        self.add_module(LORA_POOL, pool)

    @property
    def sums_over_ranks(self) -> bool:
        """True if each rank has some of the inputs: sums round in another order than in one process."""
        return self._reduce

    def bias_slice(self, path: str, output: int) -> CheckpointSlice:
        """Returns the checkpoint's slice with the bias of one output, given the path of a module beside this one."""
        return self._bias(self._weight(path).slices[output], self._splits[output])

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out], each this rank's share
        y = self._product(x)
        return self._build.comm.all_reduce(y) if self._reduce else y

    def _product(self, x: Tensor) -> Tensor:
        y = self._base_product(x)
        if self._lora is None or self._lora.slots is None:
            return y
        adapted: Tensor = self._modules[LORA_POOL](y, x)  # type: ignore[misc]
        return adapted

    def _base_product(self, x: Tensor) -> Tensor:
        if self._pieces:
            return functools.reduce(self.ops.beside, [piece._product(x) for piece in self._pieces])
        held: Mapping[str, Any] = self._parameters  # where nn.Module would look them up, one after the other
        rest = held.get("scales"), held.get("zeros"), held.get("order")
        weight = Matrix(held["weight"], *rest, self.format, held.get("mins"))
        y: Tensor = self._multiply(x, weight, held.get("bias"), self._widths)
        return y


class SubLinear(ColumnParallelLinear):
    """Some outputs of another layer, in a format of their own: the checkpoint has them under the other's path."""

    def set_parent(self, path: str, outputs: Mapping[str, Shards], first: int) -> None:
        """`outputs` are the other's; the piece begins with number `first`."""
        totals = [split.total for split in outputs.values()]
        self._path, self._offset, self._total = path, sum(totals[:first]), sum(totals)

    def _weight(self, path: str) -> Weight:
        return super()._weight(self._path)


class TensorSection(NamedTuple):
    """Some rows in a row of a checkpoint's tensor, and how they are shared out."""

    source: str
    first: int
    split: Shards
    total: int  # rows of the tensor


class SectionedLinear(ColumnParallelLinear):
    """Outputs in another order than checkpoints hold them in: each is a section of one of their tensors."""

    def __init__(self, build: BuildContext, inputs: int, sections: Sequence[TensorSection], bias: bool = False) -> None:
        outputs = {f"{each.source}:{number}": each.split for number, each in enumerate(sections)}
        super().__init__(build, replicated(inputs, build.size), outputs, bias)
        self._sections = tuple(sections)

    def _weight(self, path: str) -> Weight:
        parent, build = path.rpartition(".")[0], self._build
        parts = tuple(
            CheckpointSlice(
                _checkpoint_name(parent, each.source), (each.split.total, self._inputs.total), each.split.ranges,
                each.first, total=each.total,
            )
            for each in self._sections
        )  # fmt: skip
        return Weight("weight", parts, 0, build.rank, build.dtype, "linear")

    def _split(self, path: str, held: Sequence[tuple[WeightFormat, WeightReader | None]]) -> None:
        raise ValueError(f"{path} is held in several formats, and is one product here; use a checkpoint that holds one")


class RowParallelLinear(ColumnParallelLinear):
    """Every rank sees its own inputs; the outputs are summed over the ranks. Where a row has one scale, of what is
    rounded here, a rank's part of it would have another: there each rank makes some outputs, of all inputs."""

    by_inputs = True

    def finalize(self, path: str) -> None:
        super().finalize(path)
        inputs, (outputs,) = self._inputs, self._splits
        if self._reduce and self._rounds_rows and _covers_in_rank_order(inputs) and outputs.total >= self._build.size:
            self.by_inputs, self._reduce = False, False
            outputs = even_shards(outputs.total, self._build.size)
            self._inputs, self._outputs = (
                replicated(inputs.total, self._build.size),
                dict.fromkeys(self._outputs, outputs),
            )
            self._widths = (outputs.local(self._build.rank),)
            super().finalize(path)
            self.ops.take("beside")
            self._shares = inputs, outputs

    @property
    def _rounds_rows(self) -> bool:
        """True if all inputs of a token share a scale, or those of a weight's row that is quantized while loading."""
        fmt = self.format
        return not fmt.plain and fmt.group == 0 and (fmt.activations == 8 or self._reader is None)

    def forward(self, x: Tensor) -> Tensor:
        if self._shares is None:
            return super().forward(x)
        inputs, outputs = self._shares
        return self._together(self._product(self._together(x, inputs)), outputs)

    def _together(self, x: Tensor, split: Shards) -> Tensor:
        """[T, a share of the split] of each rank -> [T, total]. Ranks give equally many numbers: what fills up a
        smaller share is left out again."""
        widths = [split.local(rank) for rank in range(self._build.size)]
        most = max(widths)
        while x.shape[1] < most:
            x = self.ops.beside(x, x[:, : most - x.shape[1]])
        found = self._build.comm.all_gather(x, -1)
        if min(widths) == most:
            return found
        return functools.reduce(self.ops.beside, [found[:, at * most :][:, :width] for at, width in enumerate(widths)])


def column_parallel(
    build: BuildContext,
    inputs: int,
    outputs: Mapping[str, Shards],
    bias: bool = False,
    stored: CheckpointLayout | None = None,
) -> ColumnParallelLinear:
    """Every rank sees the whole input and computes some outputs."""
    return ColumnParallelLinear(build, replicated(inputs, build.size), outputs, bias, stored)


def row_parallel(
    build: BuildContext,
    inputs: Shards,
    output: tuple[str, int],
    bias: bool = False,
    stored: CheckpointLayout | None = None,
) -> ColumnParallelLinear:
    """Every rank sees its own inputs; the outputs are summed over the ranks."""
    name, total = output
    return RowParallelLinear(build, inputs, {name: replicated(total, build.size)}, bias, stored)


class HeadLinear(ColumnParallelLinear):
    """A head's product: its bias is its own where its weight is the embedding's; it may have the first rows alone."""

    def __init__(self, build: BuildContext, hidden: int, source: str, rows: tuple[int, int], bias: bool) -> None:
        """`rows`: of the product, and of the checkpoint's tensor."""
        super().__init__(build, replicated(hidden, build.size), {source: padded_shards(rows[0], build.size)}, bias)
        self._rows = rows[1] if rows[0] < rows[1] else None  # of the tensor, where the product has some of them

    def _weight(self, path: str) -> Weight:
        weight = super()._weight(path)
        return replace(weight, slices=tuple(replace(part, total=self._rows) for part in weight.slices))

    def _bias(self, weight: CheckpointSlice, split: Shards) -> CheckpointSlice:
        return replace(super()._bias(weight, split), source="lm_head.bias")

    def output_slices(self, path: str) -> tuple[CheckpointSlice, ...]:
        """The same under the head's own name."""
        return tuple(replace(part, source="lm_head.weight") for part in super().output_slices(path))


class LMHead(Layer):
    """Logits over the vocabulary, which is padded to equal shares, gathered, and cut back."""

    def __init__(
        self, build: BuildContext, hidden: int, vocab: int, source: str = "/lm_head", bias: bool = False
    ) -> None:
        super().__init__(build)
        self._comm, self.vocab = build.comm, min(vocab, build.requested_outputs.vocab_size or vocab)
        exact = replace(build, quantization=build.quantization.for_head())
        self.linear = HeadLinear(exact, hidden, source, (self.vocab, vocab), bias)

    @classmethod
    def from_config(
        cls, build: BuildContext, config: Any, embedding: str = "model.embed_tokens", bias: bool = False
    ) -> "LMHead":
        """Makes a model's head; its weight is the embedding's, under that name in the checkpoint, if they are tied."""
        source = f"/{embedding}" if build.ties_head(config) else "/lm_head"
        return cls(build, config.hidden_size, config.vocab_size, source, bias)

    def forward(self, x: Tensor) -> Tensor:  # [L, hidden] -> [L, vocab]
        logits = self.linear(x)
        if self._comm.size > 1:
            logits = self._comm.all_gather(logits, -1)
        return logits[:, : self.vocab]


def _covers_in_rank_order(split: Shards) -> bool:
    """True if every rank has a share, and the shares in rank order are the whole."""
    starts, stops = zip(*split.ranges, strict=True)
    follow = starts == (0, *stops[:-1]) and stops[-1] == split.total
    return follow and all(start < stop for start, stop in split.ranges)


def _intersect(stretch: tuple[int, int], first: int, count: int) -> tuple[int, int]:
    """Returns the part of a stretch within `count` units from `first` on, counted from `first`; (0, 0): nothing."""
    start, stop = max(stretch[0], first), min(stretch[1], first + count)
    return (start - first, stop - first) if start < stop else (0, 0)


def _checkpoint_name(parent: str, source: str) -> str:
    if source.startswith("/"):
        return f"{source[1:]}.weight"
    return f"{parent}.{source}.weight" if parent else f"{source}.weight"
