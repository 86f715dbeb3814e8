"""Matrix products with weights, sharded by columns (outputs) or by rows (inputs)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from quintet.layers.build import Build, Layer, Split, padded, whole
from quintet.ops.registry import of_kind
from quintet.weights import PLAIN, Form, Matrix, Part, Reader, Weight


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
        super().__init__(build)
        self.form: Form = PLAIN  # of the weight, once settled
        self._reader: Reader | None = None
        self._build, self._inputs, self._outputs = build, inputs, dict(outputs)
        self._has_bias, self._stored = bias, stored or Stored()
        self._reduce = self.by_inputs and build.size > 1 and inputs.ranges != whole(inputs.total, build.size).ranges
        self._widths = tuple(split.local(build.rank) for split in self._outputs.values())
        self.weight: Tensor  # as place() packed it, with scales, zeros and order where its form has them
        self.bias: Tensor | None = None

    def settle(self, path: str) -> None:
        """The form, and the provider for it: steps ask for neither."""
        weight = self._weight(path)
        modules = [part.source.removesuffix(".weight") for part in weight.parts]
        self.form, self._reader = self._build.forms.of(modules, [weight.cut(part) for part in weight.parts])
        op = of_kind("linear", self.form.kind)
        self._multiply = getattr(self.ops.take(op), op)

    def weights(self, path: str) -> list[Weight]:
        build, weight = self._build, self._weight(path)
        found = [replace(weight, form=self.form, reader=self._reader)]
        if self._has_bias:
            splits = zip(weight.parts, self._outputs.values(), strict=True)
            biases = tuple(self._bias(part, split) for part, split in splits)
            found.append(Weight("bias", biases, 0, build.rank, build.dtype, "vector"))
        return found

    def _weight(self, path: str) -> Weight:
        """In floats; its parts, one per output."""
        parent, parts, offset = path.rpartition(".")[0], [], 0
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
        build = self._build
        return Weight("weight", tuple(parts), int(self.by_inputs), build.rank, build.dtype, "linear")

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
        held: Mapping[str, Any] = self._parameters  # where nn.Module would look them up, one after the other
        weight = Matrix(held["weight"], held.get("scales"), held.get("zeros"), held.get("order"), self.form)
        y: Tensor = self._multiply(x, weight, held.get("bias"), self._widths)
        return y


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
        exact = replace(build, forms=build.forms.of_head())
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
