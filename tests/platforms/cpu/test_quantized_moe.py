"""Experts with quantized weights, and with adapters: the specification's results, and a token's bits anywhere."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.conformance.cases.model_ops import CASES
from quintet.conformance.harness.linear_layers import CanonicalReader
from quintet.interface.weights import CheckpointSlice, Matrix, ShardRange, Weight, WeightFormat
from quintet.ops import Op
from quintet.ops.activation import KINDS
from quintet.ops.moe import ExpertGate, ExpertsLoRA, expert_matrix
from quintet.ops.quantize import attributes, concat_outputs
from quintet.ops.quantized import dequantized
from quintet.platforms.cpu import weight_layout as tiles
from quintet.platforms.cpu.ops import linear, quantized_moe
from quintet.platforms.cpu.ops import lora as native_lora
from quintet.platforms.cpu.ops.moe import pack_experts

if reason := quantized_moe.probe() or native_lora.probe_experts():
    pytest.skip(reason, allow_module_level=True)

from quintet import _cpu

E4M3 = torch.float8_e4m3fn
FORMS = {
    "fp8": WeightFormat("fp8", 8, 16, 128, dtype=E4M3),
    "fp8 by channel": WeightFormat("fp8", 8, 16, dtype=E4M3),
    "int8": WeightFormat("int8", 8, 16, 32),
    "int4 with zeros": WeightFormat("int4", 4, 16, 32, zeros=True),
    "w8a8": WeightFormat("w8a8", 8, 8),
    "w4a8": WeightFormat("w4a8", 4, 8, 32),
}
EXPERTS, HIDDEN, INNER = 5, 64, 96  # gate and up are three blocks of outputs, down one
TYPES = (torch.float32, torch.bfloat16, torch.float16)
RANK = 4
Args = tuple[Any, ...]


def stacked(fmt: WeightFormat, outputs: int, inputs: int) -> Matrix:
    """Canonical, each expert another."""
    made = CanonicalReader(fmt).random_matrix(EXPERTS * outputs, inputs)
    scales, zeros = (None if x is None else x.view(EXPERTS, outputs, -1) for x in (made.scales, made.zeros))
    return Matrix(made.values.view(EXPERTS, outputs, -1), scales, zeros, format=made.format)


def packed(matrix: Matrix) -> Matrix:
    """As place() lays it."""
    spare = -matrix.values.shape[1] % quantized_moe.COLUMNS
    each = [quantized_moe._pad_outputs(expert_matrix(matrix, expert), spare) for expert in range(EXPERTS)]
    laid = quantized_moe.packer_of(matrix.format).pack(concat_outputs(each))
    laid = {name: x.view(EXPERTS, -1, *x.shape[1:]) for name, x in laid.items()}
    return Matrix(laid["weight"], laid["scales"], laid.get("zeros"), format=matrix.format)


def drawn(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :2].to(torch.int32)
    ids[::5, 1] = -1  # of another rank
    weights = torch.rand(tokens, 2, generator=generator).softmax(-1)
    return torch.randn(tokens, HIDDEN, generator=generator).to(dtype), weights, ids


def native(x: Tensor, gate_up: Matrix, down: Matrix, weights: Tensor, ids: Tensor, kind: str = "silu") -> Tensor:
    got: Tensor = Op.registry["quantized_experts"].providers["native"](x, gate_up, down, weights, ids, kind)
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_experts_are_the_specifications_and_a_token_has_its_bits_anywhere(
    isa: str, name: str, dtype: torch.dtype
) -> None:
    gate_up, down = stacked(FORMS[name], 2 * INNER, HIDDEN), stacked(FORMS[name], HIDDEN, INNER)
    held = packed(gate_up), packed(down)
    x, weights, ids = drawn(23, dtype)
    want = Op.registry["quantized_experts"].reference(x.float(), gate_up, down, weights, ids, "silu")
    got = native(x, *held, weights, ids)
    near = 3e-2 if dtype == torch.bfloat16 or FORMS[name].activations == 8 else 2e-3
    assert (got.float() - want).norm() <= near * want.norm()
    for first, last in ((0, 1), (7, 12), (22, 23)):
        alone = native(x[first:last], *held, weights[first:last], ids[first:last])
        assert torch.equal(alone, got[first:last])


@pytest.mark.parametrize("name", FORMS)
def test_threads_change_no_bit(name: str) -> None:
    """Blocks of all experts are shared out together: who computes one changes nothing, nor do they depend on others."""
    fmt = FORMS[name]
    held = packed(stacked(fmt, 2 * INNER, HIDDEN)), packed(stacked(fmt, HIDDEN, INNER))
    x, weights, ids = drawn(300, torch.bfloat16)  # more rows of an expert than a panel takes at once for two threads
    before, found = _cpu.threads(), []
    for threads in (1, 2, 3):
        _cpu.set_threads(threads)
        found.append(native(x, *held, weights, ids))
    _cpu.set_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", FORMS)
def test_one_token_is_served_where_it_lies_and_several_from_copies(name: str) -> None:
    """Also by one expert twice, and by none."""
    fmt = FORMS[name]
    held = packed(stacked(fmt, 2 * INNER, HIDDEN)), packed(stacked(fmt, HIDDEN, INNER))
    x, weights, _ = drawn(2, torch.bfloat16)
    for chosen in ([3, 3], [4, -1], [-1, EXPERTS]):
        ids = torch.tensor([chosen, [0, 1]], dtype=torch.int32)
        alone, both = native(x[:1], *held, weights[:1], ids[:1]), native(x, *held, weights, ids)
        assert torch.equal(alone[0], both[0])
    assert not alone.any()


def test_an_activation_that_the_extension_lacks_is_computed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "relu3", lambda x: x.relu().pow(3))
    gate_up, down = stacked(FORMS["fp8"], 2 * INNER, HIDDEN), stacked(FORMS["fp8"], HIDDEN, INNER)
    x, weights, ids = drawn(9, torch.float32)
    want = Op.registry["quantized_experts"].reference(x, gate_up, down, weights, ids, "relu3")
    got = native(x, packed(gate_up), packed(down), weights, ids, "relu3")
    assert (got - want).norm() <= 1e-5 * want.norm()


def test_both_stacks_may_be_in_different_forms_and_one_unpacked() -> None:
    gate_up, down = stacked(FORMS["w4a8"], 2 * INNER, HIDDEN), stacked(FORMS["fp8"], HIDDEN, INNER)
    x, weights, ids = drawn(9, torch.float32)
    want = Op.registry["quantized_experts"].reference(x, gate_up, down, weights, ids, "silu")
    for second in (packed(down), down):
        got = native(x, packed(gate_up), second, weights, ids)
        assert (got - want).norm() <= 3e-2 * want.norm()
        alone = native(x[3:4], packed(gate_up), second, weights[3:4], ids[3:4])
        assert torch.equal(alone, got[3:4])
        assert native(x[:0], packed(gate_up), second, weights[:0], ids[:0]).shape == (0, HIDDEN)


def test_stacks_that_do_not_fit_are_refused() -> None:
    gate_up, down = packed(stacked(FORMS["int8"], 2 * INNER, HIDDEN)), packed(stacked(FORMS["int8"], HIDDEN, INNER))
    x, weights, ids = drawn(9, torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        native(x[:, :32], gate_up, down, weights, ids)
    with pytest.raises(ValueError, match="tokens"):
        native(x[:4], gate_up, down, weights, ids)


def test_a_group_of_8_bit_floats_is_even_or_all() -> None:
    counts = torch.zeros(16, dtype=torch.int32)

    def call(group: int) -> None:
        """One expert of no tokens, with 5 features and 8 inner ones."""
        first, second = ([1, 0, inputs, *[0] * 11] for inputs in (group, 8))
        _cpu.quantized_experts(0, 0, 0, 5, first, second, 0, 0, 0, 0, counts.data_ptr(), 0, 1, 1, 5, 8, 0)

    for group in (5, 2):
        call(group)
    for group in (3, 7, 0):
        with pytest.raises(ValueError, match="a group is even, or all"):
            call(group)


def test_a_checkpoints_stack_is_packed_without_rounding_in_the_bytes_that_were_promised() -> None:
    reader = CanonicalReader(FORMS["int4 with zeros"])
    matrix = reader.random_matrix(EXPERTS * 2 * INNER, HIDDEN)
    names = [f"experts.{expert}.{each}" for expert in range(EXPERTS) for each in ("gate_proj", "up_proj")]
    parts = tuple(CheckpointSlice(f"{name}.weight", (INNER, HIDDEN), ((0, INNER),)) for name in names)
    fmt = reader.format(ShardRange((0, INNER), (0, HIDDEN)))
    weight = Weight("gate_up", parts, 0, 0, torch.float32, "experts", fmt, reader, stack=EXPERTS)
    tensors = {}
    for i, part in enumerate(parts):
        for suffix, x in (("", matrix.values), (".scales", matrix.scales), (".zeros", matrix.zeros)):
            assert x is not None
            tensors[part.source + suffix] = x[i * INNER : (i + 1) * INNER]
    found = quantized_moe.pack(weight, tensors)
    assert set(found) == {"gate_up", "gate_up_scales", "gate_up_zeros"}
    assert quantized_moe.stack_packed_bytes(weight) == sum(each.nbytes for each in found.values())
    held = Matrix(found["gate_up"], found["gate_up_scales"], found["gate_up_zeros"], format=fmt)
    each = (attributes(expert_matrix(held, expert)) for expert in range(EXPERTS))
    back = torch.stack([tiles.unpack(laid, 2 * INNER, HIDDEN, fmt) for laid in each])
    assert torch.equal(back.reshape(-1, HIDDEN), dequantized(matrix))


def test_no_stack_is_packed_for_products_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the extension is older than the package: its tiles are others."""
    parts = tuple(CheckpointSlice(f"{i}.weight", (64, 96), ((0, 64),)) for i in range(EXPERTS))
    stacks = [
        Weight("down", parts, 0, 0, torch.float32, "experts", FORMS[name], stack=EXPERTS) for name in ("fp8", "w4a8")
    ]
    assert all(map(quantized_moe.can_pack, stacks))
    monkeypatch.setattr(quantized_moe.quantized, "probe", lambda: "the compiled extension is older than this provider")
    assert [quantized_moe.can_pack(each) for each in stacks] == [True, False]
    found = quantized_moe.pack(stacks[1], {part.source: torch.ones(64, 96) for part in parts})
    assert found["down"].shape == (EXPERTS, 64, 48)
    assert quantized_moe.stack_packed_bytes(stacks[1]) == sum(each.nbytes for each in found.values())


# ------------------------------------------------------------------------------------------------------ adapters


def run(args: Args) -> Tensor:
    result: Tensor = Op.registry["lora_experts"].providers["native"](*args)
    return result


def wide(x: Any) -> Any:
    """Floats become float32, in tuples of any kind too."""
    if isinstance(x, Tensor):
        return x.float() if x.is_floating_point() else x
    if isinstance(x, tuple):
        each = [wide(one) for one in x]
        return type(x)(*each) if hasattr(x, "_fields") else tuple(each)
    return x


def adapters_of(slots: Tensor, dtype: torch.dtype) -> ExpertsLoRA:
    """Three adapters of all experts, of ranks 0 to RANK; what lies beyond a rank is NaN."""
    generator, count = torch.Generator().manual_seed(3), 3 * EXPERTS
    ranks = torch.randint(0, RANK + 1, (count, 3), generator=generator, dtype=torch.int32)
    columns = ((0, INNER), (1, INNER))
    sizes = (2, RANK, HIDDEN), (RANK, 2 * INNER), (1, RANK, INNER), (RANK, HIDDEN)
    first_a, first_b, second_a, second_b = (torch.randn(count, *size, generator=generator) * 0.2 for size in sizes)
    rows = torch.arange(RANK)
    first_a[rows >= ranks[:, :2, None]] = torch.nan
    second_a[rows >= ranks[:, 2:, None]] = torch.nan
    first_b[rows[:, None] >= ranks[:, :2].repeat_interleave(INNER, 1)[:, None]] = torch.nan
    second_b[rows >= ranks[:, 2:]] = torch.nan
    matrices = (each.to(dtype) for each in (first_a, first_b, second_a, second_b))
    gate_up_a, gate_up_b, down_a, down_b = matrices
    return ExpertsLoRA(gate_up_a, gate_up_b, down_a, down_b, ranks, slots, columns)


def rows(args: Args, first: int, last: int) -> Args:
    """The same arguments for some of the tokens."""
    x, stacks, gate, weights, ids, lora = args
    own = lora._replace(slots=lora.slots[first:last].contiguous())
    return x[first:last], stacks, gate, weights[first:last], ids[first:last], own


def assert_near(args: Args, exact: Args, what: str) -> None:
    x, got = args[0], run(args)
    want = Op.registry["lora_experts"].reference(*wide(exact))
    coarse = x.dtype != torch.float32 or any(each.format.activations == 8 for each in exact[1])
    assert got.dtype == x.dtype
    assert (got.float() - want).norm() <= (3e-2 if coarse else 2e-3) * want.norm(), what
    for first, last in ((0, 1), (len(x) // 2, len(x))):
        assert torch.equal(run(rows(args, first, last)), got[first:last]), what


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_cases_of_the_kit_are_the_specifications(isa: str, dtype: torch.dtype) -> None:
    """Packed, and as the checkpoint has them."""
    for what, args in CASES["lora_experts"](dtype):
        x, stacks, *rest = args
        if stacks[1].values.shape[2] % linear.PAIRS[dtype] == 0:
            assert_near((x, tuple(Matrix(pack_experts(each.values)) for each in stacks), *rest), args, what)
        assert_near(args, args, f"{what}, not packed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_quantized_experts_with_adapters_are_the_specifications(isa: str, name: str, dtype: torch.dtype) -> None:
    exact = stacked(FORMS[name], 2 * INNER, HIDDEN), stacked(FORMS[name], HIDDEN, INNER)
    held, (x, weights, ids) = tuple(map(packed, exact)), drawn(23, dtype)
    lora = adapters_of(torch.arange(23, dtype=torch.int32) * 5 % 4, dtype)
    rest = ExpertGate("silu"), weights, ids, lora
    assert_near((x, held, *rest), (x, exact, *rest), name)
    base = Op.registry["quantized_experts"].providers["native"](x, *held, weights, ids, "silu")
    assert torch.equal(run((x, held, *rest))[lora.slots == 0], base[lora.slots == 0])


def test_threads_change_no_bit_of_adapters() -> None:
    held = packed(stacked(FORMS["int8"], 2 * INNER, HIDDEN)), packed(stacked(FORMS["int8"], HIDDEN, INNER))
    x, weights, ids = drawn(300, torch.bfloat16)
    lora = adapters_of(torch.arange(300, dtype=torch.int32) * 7 % 4, x.dtype)
    before, found = _cpu.threads(), []
    for threads in (1, 2, 3):
        _cpu.set_threads(threads)
        found.append(run((x, held, ExpertGate("silu"), weights, ids, lora)))
    _cpu.set_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_an_activation_that_the_extension_lacks_keeps_the_bases_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "relu3", lambda x: x.relu().pow(3))
    exact = stacked(FORMS["fp8"], 2 * INNER, HIDDEN), stacked(FORMS["fp8"], HIDDEN, INNER)
    held, (x, weights, ids) = tuple(map(packed, exact)), drawn(9, torch.float32)
    lora = adapters_of(torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0], dtype=torch.int32), x.dtype)
    rest = ExpertGate("relu3"), weights, ids, lora
    got, want = run((x, held, *rest)), Op.registry["lora_experts"].reference(x, exact, *rest)
    assert (got - want).norm() <= 2e-3 * want.norm()
    base = Op.registry["quantized_experts"].providers["native"](x, *held, weights, ids, "relu3")
    assert torch.equal(got[lora.slots == 0], base[lora.slots == 0])


def test_adapters_that_do_not_fit_are_refused() -> None:
    held = packed(stacked(FORMS["int8"], 2 * INNER, HIDDEN)), packed(stacked(FORMS["int8"], HIDDEN, INNER))
    x, weights, ids = drawn(3, torch.float32)
    lora = adapters_of(torch.ones(3, dtype=torch.int32), x.dtype)
    for wrong in (
        {"down_a": lora.down_a[:, :, :, 1:]},
        {"gate_up_b": lora.gate_up_b.bfloat16()},
        {"ranks": lora.ranks.long()},
        {"slots": lora.slots[1:]},
        {"columns": ((0, INNER), (2, INNER))},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            run((x, held, ExpertGate("silu"), weights, ids, lora._replace(**wrong)))
