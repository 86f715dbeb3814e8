"""Products as layers make them: checkpoint tensors through place(), by every scheme, against the specification."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from quintet.conformance.calls import Call, results, send
from quintet.conformance.cases import CASES, long_sums, randn, untied
from quintet.conformance.check import require
from quintet.conformance.close import require_close
from quintet.conformance.subject import Subject
from quintet.layers.build import Build, Layer, replacements, whole
from quintet.layers.linear import Linear, Stored, columns, rows
from quintet.layers.moe import DOWN, GATE, UP, Experts
from quintet.layers.schemes import fitting
from quintet.ops import Op
from quintet.ops.quantize import quantize
from quintet.platforms.interface import Alone
from quintet.types import AttentionSpec, Scheme

L = TypeVar("L", bound=Layer)

# a product may turn activations that a scheme leaves as they are into whole numbers of 16 bits, group by group
SIXTEEN_BITS = 2**-13


@dataclass(frozen=True)
class Product:
    """The sizes of one layer, and how a checkpoint keeps it."""

    rows: int
    inputs: int
    widths: tuple[int, ...]
    bias: bool = False
    stored: Stored = Stored()
    by_inputs: bool = False

    def __str__(self) -> str:
        kept = "fused " * bool(self.stored.fused) + "transposed " * self.stored.transposed
        cut = ", cut by inputs" if self.by_inputs else ""
        return f"{self.rows}x{self.inputs} by {kept}{'+'.join(map(str, self.widths))}, bias {self.bias}{cut}"

    def layer(self, build: Build) -> Linear:
        outputs = {f"/part{i}": whole(width, 1) for i, width in enumerate(self.widths)}
        if self.by_inputs:
            return rows(build, whole(self.inputs, 1), ("/part0", self.widths[0]), self.bias, self.stored)
        return columns(build, self.inputs, outputs, self.bias, self.stored)

    def checkpoint(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """The same numbers by the names, and in the order, that the layer asks for."""
        names = [self.stored.fused] if self.stored.fused else [f"/part{i}" for i in range(len(self.widths))]
        cuts = [sum(self.widths)] if self.stored.fused else list(self.widths)
        found = {}
        for name, piece in zip(names, weight.split(cuts), strict=True):
            found[f"{name[1:]}.weight"] = piece.t().contiguous() if self.stored.transposed else piece.clone()
        if bias is not None:
            found |= {f"{name[1:]}.bias": piece for name, piece in zip(names, bias.split(cuts), strict=True)}
        return found


FUSED = Stored(fused="/all")
PRODUCTS = (
    Product(1, 256, (64, 32, 32)),
    Product(3, 96, (7, 5, 3), bias=True),
    Product(33, 32, (40,), bias=True),
    Product(65, 1024, (24,)),
    Product(5, 128, (48, 16, 16), bias=True, stored=FUSED),
    Product(2, 64, (77,), bias=True, stored=Stored(transposed=True)),
    Product(4, 64, (20, 10, 10), stored=Stored(fused="/all", transposed=True)),
    Product(8, 160, (50,), bias=True, by_inputs=True),
)


def tried(subject: Subject, scheme: Scheme | None, dtype: torch.dtype, most: int) -> None:
    """Each of the products on the platform, in one type; `most` of them."""
    there = subject.fresh() if subject.facts.opaque else subject
    build = _build(there, scheme, dtype)
    calls, wants = [], []
    for product in PRODUCTS[:most]:
        x, weight, bias = _numbers(product, scheme, dtype)
        layer = _loaded(there, product.layer(build), product.checkpoint(weight, bias))
        calls.append(Call(str(product), layer, (send(there, x),)))
        wants.append(_specified(x, weight, bias, scheme))
    if scheme is not None and scheme.name == "w8a8":
        x, weight = long_sums(dtype)
        product = Product(1, weight.shape[1], (1,))
        layer = _loaded(there, product.layer(build), product.checkpoint(weight, None))
        calls.append(Call("sums beyond 2**24", layer, (send(there, x),)))
        wants.append(torch.ones(1, 1))
    for call, (got,), want in zip(calls, results(there, calls), wants, strict=True):
        require(got.dtype == dtype, f"{call.what}: the result is {got.dtype}, {dtype} is wanted")
        require_close(call.what, got, want, _least(scheme))


def poisoned(subject: Subject, scheme: Scheme, dtype: torch.dtype, values: Sequence[float]) -> None:
    """One row of x holds such a value: the others' products are what they are without it."""
    there, product, row = subject.fresh() if subject.facts.opaque else subject, PRODUCTS[2], 1
    x, weight, bias = _numbers(product, scheme, dtype)
    layer = _loaded(there, product.layer(_build(there, scheme, dtype)), product.checkpoint(weight, bias))
    calls, kept, want = [], torch.arange(len(x)) != row, _specified(x, weight, bias, scheme)
    for value in values:
        x[row, ::11] = value
        calls.append(Call(f"{product}, {value} in row {row}", layer, (send(there, x),)))
    for call, (got,) in zip(calls, results(there, calls), strict=True):
        require_close(call.what, got[kept], want[kept], _least(scheme))


def tied(subject: Subject, dtype: torch.dtype) -> None:
    """One table that a look-up and a product share, as in a model whose head is tied."""
    there = subject.fresh() if subject.facts.opaque else subject
    table, x = randn(40, 64, dtype=dtype), randn(5, 64, dtype=dtype)
    ids = torch.tensor([0, 39, 7, 7, 16], dtype=torch.int32)
    kept = there.place_shared(table, ("embedding", "linear"))
    calls = [
        Call("look-up", there.ops.embedding, (send(there, ids), kept[0], 0, False)),
        Call("product", there.ops.linear, (send(there, x), kept[1], None, (40,))),
    ]
    wants = [table.float()[ids.long()], x.float() @ table.float().t()]
    for call, (got,), want in zip(calls, results(there, calls), wants, strict=True):
        require_close(f"{call.what} in a table that both share", got, want)


def mixed(subject: Subject, dtype: torch.dtype, most: int) -> None:
    """Experts as layers make them of a checkpoint, each of whose tensors is one expert's."""
    there = subject.fresh() if subject.facts.opaque else subject
    build, calls, wants = _build(there, None, dtype), [], []
    for what, (x, gate_up, down, *chosen, kind) in list(CASES["experts"](dtype))[::4][:most]:
        names = [f"experts.{expert}" for expert in range(len(down))]
        layer = _loaded(there, Experts(build, down.shape[1:], kind, names), _one_by_one(names, gate_up, down))
        calls.append(Call(what, layer, tuple(send(there, each) for each in (x, *chosen))))
        raised = [each.float() for each in (x, gate_up, down)]
        wants.append(Op.registry["experts"].reference(*raised, *chosen, kind))
    for call, (got,), want in zip(calls, results(there, calls), wants, strict=True):
        require(got.dtype == dtype, f"{call.what}: the result is {got.dtype}, {dtype} is wanted")
        require_close(call.what, got, want)


def _one_by_one(names: Sequence[str], gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """The stacks as a checkpoint keeps them."""
    found: dict[str, Tensor] = {}
    for name, first, second in zip(names, gate_up, down, strict=True):
        pieces = (*first.chunk(2), second)
        found |= {f"{name}.{each}.weight": piece.clone() for each, piece in zip((GATE, UP, DOWN), pieces, strict=True)}
    return found


def _build(subject: Subject, scheme: Scheme | None, dtype: torch.dtype) -> Build:
    layers = replacements(subject.platform.layers)
    return Build(subject.ops, _no_attention, Alone(), dtype, 16, 128, scheme, layers=layers)


def _least(scheme: Scheme | None) -> float:
    return SIXTEEN_BITS if scheme is not None and scheme.activations == 16 else 0.0


def _no_attention(spec: AttentionSpec) -> Any:
    raise AssertionError("a product attends to nothing")


def _loaded(subject: Subject, layer: L, tensors: dict[str, Tensor]) -> L:
    for weight in layer.weights("layer"):
        layer.assign(subject.platform.place(weight, {part.source: tensors[part.source] for part in weight.parts}))
    return layer


def _numbers(product: Product, scheme: Scheme | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, a weight that the scheme holds exactly, and a bias."""
    inputs, outputs = product.inputs, sum(product.widths)
    x = randn(product.rows, inputs, dtype=dtype)
    bias = randn(outputs, dtype=dtype) if product.bias else None
    fits = fitting(scheme, inputs)
    if fits is None:
        return x, randn(outputs, inputs, dtype=dtype, scale=inputs**-0.5), bias
    if fits.activations == 8:
        x = untied(x, fits.group, 127.0, torch.round)
    return x, _on_grid(outputs, inputs, fits).to(dtype), bias


def _on_grid(outputs: int, inputs: int, scheme: Scheme) -> Tensor:
    """Whole multiples of a power of two in each group, the largest of which is where the scheme's numbers end."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    group = scheme.group or inputs
    first, last = (-127, 127) if scheme.bits == 8 else (-8, 7)
    shape = outputs, inputs // group, group
    whole = torch.randint(first, last + 1, shape, generator=generator).float()
    ends = torch.randint(group, (*shape[:2], 1), generator=generator)
    whole.scatter_(-1, ends, float(first))
    powers = torch.randint(5, 9, (*shape[:2], 1), generator=generator)
    return (whole * 2.0**-powers).reshape(outputs, inputs)


def _specified(x: Tensor, weight: Tensor, bias: Tensor | None, scheme: Scheme | None) -> Tensor:
    """In float32; by the scheme that the layer has settled on."""
    x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    fits, outputs = fitting(scheme, x.shape[1]), (len(weight),)
    given: Iterator[Any] = iter((weight,) if fits is None else quantize(weight, fits))
    name = "linear" if fits is None else f"linear_{fits.name}"
    zeros = (None,) if name == "linear_int4" else ()
    want: Tensor = Op.registry[name].reference(x, *given, *zeros, bias, outputs)
    return want
