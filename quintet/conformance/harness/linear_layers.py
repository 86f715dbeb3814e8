"""Products as layers make them: checkpoint tensors through place(), by every scheme, against the specification."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from quintet.conformance.cases.linear import away_from_ties, long_sums
from quintet.conformance.cases.model_ops import CASES
from quintet.conformance.cases.random_arguments import randn
from quintet.conformance.check import NotSupported, require
from quintet.conformance.close import require_close
from quintet.conformance.harness.calls import OpCall, results, send
from quintet.conformance.harness.subject import Subject
from quintet.interface.platform import SingleRank
from quintet.interface.types import LayerSpec
from quintet.interface.weights import FLOATS, CheckpointSlice, Matrix, ShardRange, StoredTensor, WeightFormat
from quintet.layers.build import BuildContext, Layer, replacements, replicated
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.linear import CheckpointLayout, ColumnParallelLinear, column_parallel, row_parallel
from quintet.layers.moe.moe import DOWN, GATE, UP, Experts
from quintet.layers.quantization import QuantizationPlan, format_for_inputs
from quintet.layers.quantization.checkpoint_config import CheckpointQuantization, UniformPlan
from quintet.layers.quantization.group_scales import shard_format
from quintet.ops import Op
from quintet.ops.quantize import attributes, quantize
from quintet.ops.quantized import dequantized

L = TypeVar("L", bound=Layer)

# a product may turn activations that a scheme leaves as they are into whole numbers of 16 bits, group by group
SIXTEEN_BITS = 2**-13
IN_BYTES = 2**-7  # a table may be held in bytes, which only whole multiples of a step lose nothing by


@dataclass(frozen=True)
class LinearCase:
    """The sizes of one layer, and how a checkpoint keeps it."""

    rows: int
    inputs: int
    widths: tuple[int, ...]
    bias: bool = False
    stored: CheckpointLayout = CheckpointLayout()
    by_inputs: bool = False

    def __str__(self) -> str:
        kept = "fused " * bool(self.stored.fused) + "transposed " * self.stored.transposed
        cut = ", cut by inputs" if self.by_inputs else ""
        return f"{self.rows}x{self.inputs} by {kept}{'+'.join(map(str, self.widths))}, bias {self.bias}{cut}"

    def layer(self, build: BuildContext) -> ColumnParallelLinear:
        outputs = {f"/part{i}": replicated(width, 1) for i, width in enumerate(self.widths)}
        if self.by_inputs:
            return row_parallel(build, replicated(self.inputs, 1), ("/part0", self.widths[0]), self.bias, self.stored)
        return column_parallel(build, self.inputs, outputs, self.bias, self.stored)

    def checkpoint(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """The same numbers by the names, and in the order, that the layer asks for."""
        found = {}
        for name, piece in self._cut(weight):
            found[f"{name[1:]}.weight"] = piece.t().contiguous() if self.stored.transposed else piece.clone()
        return found | self._biases(bias)

    def canonical_checkpoint(self, matrix: Matrix, bias: Tensor | None) -> dict[str, Tensor]:
        """The same of a canonical matrix, see Canonical."""
        found: dict[str, Tensor] = {}
        by_output = {"": matrix.values, ".scales": matrix.scales, ".zeros": matrix.zeros, ".mins": matrix.mins}
        for suffix, each in by_output.items():
            if each is not None:
                found |= {f"{name[1:]}.weight{suffix}": piece for name, piece in self._cut(each)}
        if matrix.input_order is not None:
            found |= {f"{name[1:]}.weight.order": matrix.input_order.clone() for name, _ in self._cut(matrix.values)}
        return found | self._biases(bias)

    def _biases(self, bias: Tensor | None) -> dict[str, Tensor]:
        return {} if bias is None else {f"{name[1:]}.bias": piece for name, piece in self._cut(bias)}

    def _cut(self, x: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Splits a tensor with an entry for every output, by the names that the layer asks for."""
        names = [self.stored.fused] if self.stored.fused else [f"/part{i}" for i in range(len(self.widths))]
        cuts = [sum(self.widths)] if self.stored.fused else list(self.widths)
        return zip(names, x.split(cuts), strict=True)


FUSED = CheckpointLayout(fused="/all")
PRODUCTS = (
    LinearCase(1, 256, (64, 32, 32)),
    LinearCase(3, 96, (7, 5, 3), bias=True),
    LinearCase(33, 32, (40,), bias=True),
    LinearCase(65, 1024, (24,)),
    LinearCase(5, 128, (48, 16, 16), bias=True, stored=FUSED),
    LinearCase(2, 64, (77,), bias=True, stored=CheckpointLayout(transposed=True)),
    LinearCase(4, 64, (20, 10, 10), stored=CheckpointLayout(fused="/all", transposed=True)),
    LinearCase(8, 160, (50,), bias=True, by_inputs=True),
)


def check_products(subject: Subject, scheme: WeightFormat | None, dtype: torch.dtype, most: int) -> None:
    """Each of the products on the platform, in one type; `most` of them."""
    there = subject.with_new_platform() if subject.facts.ops_only else subject
    build = _build(there, QuantizationPlan(scheme), dtype)
    calls, wants = [], []
    for product in PRODUCTS[:most]:
        x, weight, bias = _numbers(product, scheme, dtype)
        layer = _load_layer(there, product.layer(build), product.checkpoint(weight, bias))
        calls.append(OpCall(str(product), layer, (send(there, x),)))
        wants.append(_specified(x, weight, bias, scheme))
    if scheme is not None and scheme.kind == "w8a8":
        x, weight = long_sums(dtype)
        product = LinearCase(1, weight.shape[1], (1,))
        layer = _load_layer(there, product.layer(build), product.checkpoint(weight, None))
        calls.append(OpCall("sums beyond 2**24", layer, (send(there, x),)))
        wants.append(torch.ones(1, 1))
    for call, (got,), want in zip(calls, results(there, calls), wants, strict=True):
        require(got.dtype == dtype, f"{call.what}: the result is {got.dtype}, {dtype} is wanted")
        require_close(call.what, got, want, _min_tolerance(scheme))


def check_poisoned_row(subject: Subject, scheme: WeightFormat, dtype: torch.dtype, values: Sequence[float]) -> None:
    """One row of x holds such a value: the others' products are what they are without it."""
    there, product, row = subject.with_new_platform() if subject.facts.ops_only else subject, PRODUCTS[2], 1
    x, weight, bias = _numbers(product, scheme, dtype)
    layer = _load_layer(
        there, product.layer(_build(there, QuantizationPlan(scheme), dtype)), product.checkpoint(weight, bias)
    )
    calls, kept, want = [], torch.arange(len(x)) != row, _specified(x, weight, bias, scheme)
    for value in values:
        x[row, ::11] = value
        calls.append(OpCall(f"{product}, {value} in row {row}", layer, (send(there, x),)))
    for call, (got,) in zip(calls, results(there, calls), strict=True):
        require_close(call.what, got[kept], want[kept], _min_tolerance(scheme))


def check_tied_table(subject: Subject, dtype: torch.dtype) -> None:
    """One table that a look-up and a product share, as in a model with a tied head."""
    there = subject.with_new_platform() if subject.facts.ops_only else subject
    table, x = randn(40, 64, dtype=dtype), randn(5, 64, dtype=dtype)
    ids = torch.tensor([0, 39, 7, 7, 16], dtype=torch.int32)
    kept = there.place_shared(table, ("embedding", "linear"))
    calls = [
        OpCall("look-up", there.ops.embedding, (send(there, ids), kept[0], 0, False)),
        OpCall("product", there.ops.linear, (send(there, x), Matrix(kept[1]), None, (40,))),
    ]
    wants = [table.float()[ids.long()], x.float() @ table.float().t()]
    for call, (got,), want in zip(calls, results(there, calls), wants, strict=True):
        require_close(f"{call.what} in a table that both share", got, want)


def check_quantized_embedding(subject: Subject, dtype: torch.dtype, forms: Sequence[tuple[str, WeightFormat]]) -> None:
    """Rows of tables that a checkpoint holds quantized, in their form or in floats, and a head that is tied to each."""
    there = subject.with_new_platform() if subject.facts.ops_only else subject
    ids, x, calls, wants = torch.tensor([0, 76, 7, 7, 64], dtype=torch.int32), randn(5, 128, dtype=dtype), [], []
    for what, fmt in forms:
        reader = CanonicalReader(fmt.float_activations)
        matrix, quantized = (
            reader.random_matrix(77, 128),
            CheckpointQuantization("the kit's", UniformPlan(reader), heads=True),
        )
        build = _build(there, QuantizationPlan(checkpoint=quantized, supported_kinds=there.facts.weight_formats), dtype)
        table, head = VocabParallelEmbedding(build, 77, 128), column_parallel(build, 128, {"/layer": replicated(77, 1)})
        _check_tied(there, (table, head), matrix)
        for each, layer, given in (("rows", table, ids), ("a head", head, x)):
            calls.append(OpCall(f"{each} of {what}", layer, (send(there, given),)))
        known = dequantized(matrix)
        wants += [(known[ids.long()], fmt), (x.float() @ known.t(), fmt)]
    for call, (got,), (want, fmt) in zip(calls, results(there, calls), wants, strict=True):
        require(got.dtype == dtype, f"{call.what}: the result is {got.dtype}, {dtype} is wanted")
        require_close(call.what, got, want, _min_tolerance(fmt.float_activations))


def _check_tied(subject: Subject, layers: Sequence[Layer], matrix: Matrix) -> None:
    """All of them on one matrix, as the loader places it."""
    named = attributes(matrix).items()
    tensors = {"layer.weight" if name == "weight" else f"layer.weight.{name}": each.clone() for name, each in named}
    for layer in layers:
        layer.finalize("layer")
    weights = [weight for layer in layers for weight in layer.weights("layer")]
    shared = len({weight.format for weight in weights}) == 1
    for layer, weight in zip(layers, weights, strict=True):
        given = {name: tensors[name] for name in weight.stored}
        layer.assign(subject.platform.place(replace(weight, shared=shared), given))


def check_experts(subject: Subject, dtype: torch.dtype, most: int) -> None:
    """Experts as layers make them of a checkpoint with a tensor for each expert."""
    there = subject.with_new_platform() if subject.facts.ops_only else subject
    build, calls, wants = _build(there, QuantizationPlan(), dtype), [], []
    for what, (x, gate_up, down, *chosen, kind) in list(CASES["experts"](dtype))[::4][:most]:
        names = [f"experts.{expert}" for expert in range(len(down))]
        layer = _load_layer(there, Experts(build, down.shape[1:], kind, names), _one_by_one(names, gate_up, down))
        calls.append(OpCall(what, layer, tuple(send(there, each) for each in (x, *chosen))))
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


def _build(subject: Subject, forms: QuantizationPlan, dtype: torch.dtype) -> BuildContext:
    layers = replacements(subject.platform.layers)
    return BuildContext(subject.ops, _no_attention, SingleRank(), dtype, 16, 128, forms, layers=layers)


def _min_tolerance(scheme: WeightFormat | None) -> float:
    if scheme is not None and any(8 * each % 1 for each in scheme.codebook):
        return IN_BYTES
    return SIXTEEN_BITS if scheme is not None and scheme.activations == 16 else 0.0


def _no_attention(spec: LayerSpec) -> Any:
    raise AssertionError("a product attends to nothing")


def _load_layer(subject: Subject, layer: L, tensors: dict[str, Tensor]) -> L:
    layer.finalize("layer")
    before = {name: each.clone() for name, each in tensors.items()}
    for weight in layer.weights("layer"):
        layer.assign(subject.platform.place(weight, {name: tensors[name] for name in weight.stored}))
    for name, each in tensors.items():
        same = torch.equal(each.view(torch.uint8), before[name].view(torch.uint8))
        require(same, f"place() wrote into the checkpoint's tensor {name}, which is a view of its file")
    return layer


def _numbers(
    product: LinearCase, scheme: WeightFormat | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, a weight that the scheme holds exactly, and a bias."""
    inputs, outputs = product.inputs, sum(product.widths)
    x = randn(product.rows, inputs, dtype=dtype)
    bias = randn(outputs, dtype=dtype) if product.bias else None
    fits = format_for_inputs(scheme, inputs)
    if fits.plain:
        return x, randn(outputs, inputs, dtype=dtype, scale=inputs**-0.5), bias
    if fits.activations == 8:
        x = _away_from_ties(x, fits)
    return x, _on_grid(outputs, inputs, fits).to(dtype), bias


def _away_from_ties(x: Tensor, fmt: WeightFormat) -> Tensor:
    """Without what lies between two numbers of the activations' type."""
    if fmt.dtype is None:
        return away_from_ties(x, fmt.group, 127.0, torch.round)
    return away_from_ties(x, fmt.group, torch.finfo(fmt.dtype).max, lambda v: v.to(E4M3).float())


def _on_grid(outputs: int, inputs: int, scheme: WeightFormat) -> Tensor:
    """Whole multiples of a power of two in each group, the largest of which is where the scheme's numbers end."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    group = scheme.group or inputs
    first, last = (-127, 127) if scheme.bits == 8 else (-8, 7)
    shape = outputs, inputs // group, group
    if scheme.dtype is None:
        whole = torch.randint(first, last + 1, shape, generator=generator).float()
    else:
        first = -int(torch.finfo(scheme.dtype).max)
        whole = (torch.randn(shape, generator=generator) * 100).to(scheme.dtype).float().clamp(first, -first)
    ends = torch.randint(group, (*shape[:2], 1), generator=generator)
    whole.scatter_(-1, ends, float(first))
    powers = torch.randint(5, 9, (*shape[:2], 1), generator=generator)
    return (whole * 2.0**-powers).reshape(outputs, inputs)


def _specified(x: Tensor, weight: Tensor, bias: Tensor | None, scheme: WeightFormat | None) -> Tensor:
    """In float32; by the scheme that the layer has settled on."""
    x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    fits = format_for_inputs(scheme, x.shape[1])
    matrix = Matrix(weight) if fits.plain else quantize(weight, fits)
    want: Tensor = Op.registry["linear"].reference(x, matrix, bias, (len(weight),))
    return want


# ------------------------------------------------------------------------------------------- of quantized checkpoints


E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class CanonicalReader:
    """Reads a checkpoint with matrices that are canonical already."""

    weight_format: WeightFormat

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        assert not part.transposed, "a quantized matrix lies by its outputs"
        (outputs, inputs), fmt = part.stored_shape, self._fitted(part.shape[1])
        found = {part.source: StoredTensor((outputs, inputs * fmt.bits // 8), (fmt.dtype or torch.int8, torch.uint8))}
        found[f"{part.source}.scales"] = StoredTensor((outputs, fmt.groups(inputs)), FLOATS)
        if fmt.zeros:
            found[f"{part.source}.zeros"] = StoredTensor((outputs, fmt.groups(inputs)), (torch.uint8,))
        if fmt.mins:
            found[f"{part.source}.mins"] = StoredTensor((outputs, fmt.groups(inputs)), FLOATS)
        if fmt.act_order:
            found[f"{part.source}.order"] = StoredTensor((inputs,), (torch.int32,))
        return found

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(self.weight_format, shard)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        found = {name.removeprefix(part.source): tensors[name] for name in self.stored(part)}
        values, scales, zeros, mins = (
            None if each is None else each[slice(*shard.outputs)]
            for each in map(found.get, ("", ".scales", ".zeros", ".mins"))
        )
        assert values is not None
        return Matrix(values, scales, zeros, found.get(".order"), self.format(shard), mins)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized(self.matrix(part, shard, tensors))

    def _fitted(self, inputs: int) -> WeightFormat:
        return self.format(ShardRange((0, 1), (0, inputs)))

    def random_matrix(self, outputs: int, inputs: int) -> Matrix:
        """Any such matrix."""
        fmt, generator = self._fitted(inputs), torch.Generator().manual_seed(outputs + inputs)
        scales = torch.rand((outputs, fmt.groups(inputs)), generator=generator) * 0.01 + 0.005
        zeros = torch.randint(16, scales.shape, generator=generator, dtype=torch.uint8) if fmt.zeros else None
        mins = (torch.randn(scales.shape, generator=generator) * 0.05).half().float() if fmt.mins else None
        order = torch.randperm(inputs, generator=generator).int() if fmt.act_order else None
        if fmt.dtype is not None:
            values = torch.randn((outputs, inputs), generator=generator).to(fmt.dtype)
        elif fmt.codebook and fmt.bits == 8:
            values = torch.randint(len(fmt.codebook), (outputs, inputs), generator=generator, dtype=torch.uint8)
        elif fmt.bits == 8:
            values = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
            scales = scales / 16
        else:
            values = torch.randint(256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
        return Matrix(values, scales.half().float(), zeros, order, fmt, mins)  # such scales as any platform can keep


def check_checkpoint_format(subject: Subject, fmt: WeightFormat, dtype: torch.dtype, most: int) -> None:
    """Each of the products, `most` of them, from a checkpoint that holds the form."""
    if not fmt.required_kinds <= subject.facts.weight_formats:
        missing = ", ".join(sorted(fmt.required_kinds - subject.facts.weight_formats))
        raise NotSupported(f"held in another form, or in floats: Capabilities.weight_formats lacks {missing}")
    there, reader = subject.with_new_platform() if subject.facts.ops_only else subject, CanonicalReader(fmt)
    build = _build(there, QuantizationPlan(checkpoint=CheckpointQuantization("the kit's", UniformPlan(reader))), dtype)
    calls, wants = [], []
    usual = [each for each in PRODUCTS if not each.stored.transposed]
    for product in [each for each in usual if not fmt.act_order or len(each.widths) == 1][:most]:  # an order is of one
        matrix, bias = reader.random_matrix(sum(product.widths), product.inputs), None
        x = randn(product.rows, product.inputs, dtype=dtype)
        if fmt.activations == 8:
            x = _away_from_ties(x, matrix.format)
        if product.bias:
            bias = randn(sum(product.widths), dtype=dtype)
        layer = _load_layer(there, product.layer(build), product.canonical_checkpoint(matrix, bias))
        calls.append(OpCall(str(product), layer, (send(there, x),)))
        wants.append(Op.registry["linear"].reference(x.float(), matrix, None if bias is None else bias.float(), (0,)))
    for call, (got,), want in zip(calls, results(there, calls), wants, strict=True):
        require(got.dtype == dtype, f"{call.what}: the result is {got.dtype}, {dtype} is wanted")
        require_close(call.what, got, want, _min_tolerance(fmt))
