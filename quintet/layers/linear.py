"""Matrix products with weights, sharded by columns (outputs) or by rows (inputs)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from quintet.layers.build import Build, Layer, Split, padded, whole
from quintet.layers.schemes import fitting, of_head
from quintet.types import Part, Weight


@dataclass(frozen=True)
class Stored:
    """How a checkpoint keeps a linear layer, where that is not one [out, in] tensor per output."""

    fused: str | None = None  # all outputs stand one after the other in this one
    transposed: bool = False  # [in, out]


class Linear(Layer):
    """y = x W' + b. `outputs` maps checkpoint names, relative to the parent module ("/": absolute), to their splits.

    The weight is shared out along its outputs (axis 0), or along its inputs (axis 1) with `by_inputs`.
    """

    by_inputs = False

    def __init__(
        self,
        build: Build,
        inputs: Split,
        outputs: Mapping[str, Split],
        bias: bool = False,
        stored: Stored | None = None,
    ) -> None:
        scheme = fitting(build.scheme, inputs.local(build.rank))
        op = "linear" if scheme is None else f"linear_{scheme.name}"
        super().__init__(build, op)
        self._scheme, self._multiply = scheme, getattr(self.ops, op)
        self._build, self._inputs, self._outputs = build, inputs, dict(outputs)
        self._has_bias, self._stored = bias, stored or Stored()
        self._reduce = self.by_inputs and build.size > 1 and inputs.ranges != whole(inputs.total, build.size).ranges
        self._widths = tuple(split.local(build.rank) for split in self._outputs.values())
        self.weight: Tensor
        self.scales: Tensor  # of a quantized weight
        self.bias: Tensor | None = None

    def weights(self, path: str) -> list[Weight]:
        parent = path.rpartition(".")[0]
        build, parts = self._build, self._parts(parent)
        found = [Weight("weight", parts, int(self.by_inputs), build.rank, build.dtype, "linear", self._scheme)]
        if self._has_bias:
            biases = tuple(self._bias(part, split) for part, split in zip(parts, self._outputs.values(), strict=True))
            found.append(Weight("bias", biases, 0, build.rank, build.dtype, "vector"))
        return found

    def _parts(self, parent: str) -> tuple[Part, ...]:
        """Of the weight, one per output."""
        parts, offset = [], 0
        fused, total = self._stored.fused, sum(split.total for split in self._outputs.values())
        for source, split in self._outputs.items():
            part = Part(
                source=_checkpoint_name(parent, fused or source),
                shape=(split.total, self._inputs.total),
                ranges=self._inputs.ranges if self.by_inputs else split.ranges,
                offset=offset if fused else 0,
                transposed=self._stored.transposed,
                total=total if fused else None,
            )
            parts.append(part)
            offset += split.total
        return tuple(parts)

    def _bias(self, weight: Part, split: Split) -> Part:
        """Beside a part of the weight. A sum over ranks adds it once: all but one keep what is past its end, zeros."""
        ranges = split.ranges
        if self._reduce:
            past = (split.total, 2 * split.total)
            ranges = ((0, split.total),) + (past,) * (self._build.size - 1)
        source = weight.source.removesuffix("weight") + "bias"
        return replace(weight, source=source, shape=(split.total,), ranges=ranges, transposed=False)

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out], each this rank's share
        y = self._product(x)
        return self._build.comm.all_reduce(y) if self._reduce else y

    def _product(self, x: Tensor) -> Tensor:
        if self._scheme is None:
            return self._multiply(x, self.weight, self.bias, self._widths)
        if self._scheme.name == "int4":  # the one with zero points, where a checkpoint has them
            return self._multiply(x, self.weight, self.scales, None, self.bias, self._widths)
        return self._multiply(x, self.weight, self.scales, self.bias, self._widths)


class RowLinear(Linear):
    """Every rank sees its own inputs; the outputs are summed over the ranks."""

    by_inputs = True


def columns(
    build: Build, inputs: int, outputs: Mapping[str, Split], bias: bool = False, stored: Stored | None = None
) -> Linear:
    """Every rank sees the whole input and computes some outputs."""
    return Linear(build, whole(inputs, build.size), outputs, bias, stored)


def rows(
    build: Build, inputs: Split, output: tuple[str, int], bias: bool = False, stored: Stored | None = None
) -> Linear:
    """Every rank sees its own inputs; the outputs are summed over the ranks."""
    name, total = output
    return RowLinear(build, inputs, {name: whole(total, build.size)}, bias, stored)


class LMHead(Layer):
    """Logits over the vocabulary, which is padded to equal shares, gathered, and cut back."""

    def __init__(self, build: Build, hidden: int, vocab: int, source: str = "/lm_head", bias: bool = False) -> None:
        super().__init__(build)
        self._comm, self.vocab = build.comm, vocab
        exact = replace(build, scheme=of_head(build.scheme))
        self.linear = columns(exact, hidden, {source: padded(vocab, build.size)}, bias)

    def forward(self, x: Tensor) -> Tensor:  # [L, hidden] -> [L, vocab]
        logits = self.linear(x)
        if self._comm.size > 1:
            logits = self._comm.all_gather(logits, -1)
        return logits[:, : self.vocab]


def _checkpoint_name(parent: str, source: str) -> str:
    if source.startswith("/"):
        return f"{source[1:]}.weight"
    return f"{parent}.{source}.weight" if parent else f"{source}.weight"
