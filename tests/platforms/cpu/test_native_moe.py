"""The mixture of experts on packed weights: each instruction set against the specification, a token's bits anywhere."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.conformance.cases.model_ops import CASES
from quintet.conformance.cases.random_arguments import randn
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.ops import Op
from quintet.ops.activation import KINDS
from quintet.platforms.cpu.arena import Arena, use_arena
from quintet.platforms.cpu.ops import linear
from quintet.platforms.cpu.ops import moe as native_moe
from quintet.platforms.cpu.ops.extension import missing
from quintet.platforms.cpu.ops.moe import pack_experts, unpack_experts
from quintet_tools.checkpoints.tiny import FAMILIES, make
from tests.helpers.platforms.native import native
from tests.helpers.platforms.run_model import Runner

if reason := missing("experts"):
    pytest.skip(reason, allow_module_level=True)

from quintet import _cpu
from quintet.interface.weights import Matrix

TYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = _cpu.LINEAR_COLUMNS


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = _cpu.threads()
    _cpu.set_threads(2)
    yield
    _cpu.set_threads(before)


def layer(
    dtype: torch.dtype, tokens: int = 70, num: int = 9, hidden: int = 80, inner: int = 200, k: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, plain gate_up and down, weights, ids: the first expert serves about every other token, the last none."""
    x = randn(tokens, hidden, dtype=dtype)
    gate_up = randn(num, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    down = randn(num, hidden, inner, dtype=dtype, scale=inner**-0.5)
    logits = randn(tokens, num, dtype=torch.float32)
    logits[::2, 0] += 9
    logits[:, -1] -= 99
    weights, ids = native("route")(logits, k, True)
    return x, gate_up, down, weights, ids


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, what: str) -> None:
    """To 6 roundings of the type at the result's size, 20 of float32."""
    assert got.dtype == dtype and got.shape == want.shape, what
    size = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    limit = (20 if dtype == torch.float32 else 6) * torch.finfo(dtype).eps * size
    assert ((got.float() - want).abs() <= limit).all(), what  # NaN is wrong, too


# ------------------------------------------------------------------------------------------- against the specification


def test_every_instruction_set_passes_its_probe(isa: str) -> None:
    assert native_moe.probe() is None


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_grouped_linear_equals_the_specification(isa: str, dtype: torch.dtype) -> None:
    for what, (x, weight, counts) in CASES["grouped_linear"](dtype):
        want = Op.registry["grouped_linear"].reference(x.float(), weight.float(), counts)
        got = native("grouped_linear")(x, pack_experts(weight), counts)
        assert_close(got[:, : want.shape[1]], want, dtype, what)
        assert got.shape[1] == -(-want.shape[1] // COLUMNS) * COLUMNS and not got[:, want.shape[1] :].any(), what


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_experts_equal_the_specification(isa: str, dtype: torch.dtype) -> None:
    """An odd number of features inside is not packed in bfloat16; every other case is."""
    seen = 0
    for what, (x, gate_up, down, *rest) in CASES["experts"](dtype):
        if down.shape[2] % linear.PAIRS[dtype]:
            continue
        want = Op.registry["experts"].reference(*(a.float() for a in (x, gate_up, down)), *rest)
        assert_close(native("experts")(x, pack_experts(gate_up), pack_experts(down), *rest), want, dtype, what)
        seen += 1
    assert seen >= 12


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_experts_are_their_parts_bit_for_bit(isa: str, dtype: torch.dtype) -> None:
    """Sorted rows, two products and an activation by the native ops, each rounded; then the sum in the order of j."""
    x, gate_up, down, weights, ids = layer(dtype, inner=96)
    packed = pack_experts(gate_up), pack_experts(down)
    order = torch.sort(ids.reshape(-1), stable=True).indices
    counts = ids.reshape(-1).bincount(minlength=len(down)).to(torch.int32)
    for kind in KINDS:
        wide = native("grouped_linear")(x[order // ids.shape[1]], packed[0], counts)[:, :192]
        outer = native("grouped_linear")(native("gated")(wide, kind), packed[1], counts)[:, : x.shape[1]]
        each = outer[torch.sort(order).indices].reshape(*ids.shape, -1).double()
        want = torch.zeros(x.shape, dtype=torch.float32)
        for j in range(ids.shape[1]):
            term = each[:, j] * weights[:, j, None].double()
            want = (want + term).float() if isa != "baseline" else want + term.float()  # its multiply-add rounds twice
        assert torch.equal(native("experts")(x, *packed, weights, ids, kind), want.to(dtype)), kind


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_experts_with_an_activation_that_the_extension_lacks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their products stay native; who is nobody's expert adds nothing."""
    monkeypatch.setitem(KINDS, "relu3", lambda x: x.relu().pow(3))
    x, gate_up, down, weights, ids = layer(dtype)
    ids[3, 1], ids[4, 0] = -1, len(down)
    want = Op.registry["experts"].reference(*(a.float() for a in (x, gate_up, down)), weights, ids, "relu3")
    got = native("experts")(x, pack_experts(gate_up), pack_experts(down), weights, ids, "relu3")
    assert_close(got, want, dtype, "relu3")


def test_each_product_is_rounded_to_the_type() -> None:
    """1 + 3/256 is no bfloat16: gate and up become 1 + 1/64 before they meet."""
    x = torch.tensor([[1.0, 3 / 256]], dtype=torch.bfloat16)
    gate_up, down = torch.ones(1, 2, 2, dtype=torch.bfloat16), torch.tensor([[[1.0, 0], [0, 0]]], dtype=torch.bfloat16)
    gate_up = torch.cat([gate_up, gate_up], 1)
    one, zero = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    got = native("experts")(x, pack_experts(gate_up), pack_experts(down), one, zero, "relu")
    assert got[0, 0] == torch.tensor(1.015625**2).to(torch.bfloat16) != torch.tensor((1 + 3 / 256) ** 2).bfloat16()


def test_an_id_of_another_rank_adds_nothing_not_even_nan(isa: str) -> None:
    for dtype in TYPES:
        x, gate_up, down, weights, ids = layer(dtype)
        packed = pack_experts(gate_up), pack_experts(down)
        elsewhere = ids.clone()
        elsewhere[3], elsewhere[5, 1], elsewhere[7, 0] = -1, len(down), 2**31 - 1
        dropped = weights.clone()
        dropped[3], dropped[5, 1], dropped[7, 0] = 0, 0, 0
        want = native("experts")(x, *packed, dropped, ids, "silu")
        weights[3, 0] = weights[5, 1] = torch.nan
        x[3] = torch.nan
        got = native("experts")(x, *packed, weights, elsewhere, "silu")
        assert not got[3].any()
        rest = [t for t in range(len(x)) if t != 3]
        assert torch.equal(got[rest], want[rest])


# -------------------------------------------------------------------------------------------------------------- routing


def test_the_largest_are_torchs_also_where_they_are_equal_or_not_finite() -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[-0.0, 0.0, 1, 1, -1, -inf], [-1, -2, -1, -3, -2, -1], [nan, 1, inf, nan, 0, -inf]])
    for dtype, k in itertools.product(TYPES, (1, 3, 6)):
        want, ids = Op.registry["route"].reference(rows.to(dtype), k, False)
        weights, got = native("route")(rows.to(dtype), k, False)
        assert got.tolist() == ids.tolist()
        torch.testing.assert_close(weights, want, equal_nan=True)


def test_every_half_precision_number_is_ordered_and_weighed_as_the_specification_does() -> None:
    for dtype in TYPES[1:]:
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        logits = numbers[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))].reshape(-1, 64)
        bias = torch.zeros(64)
        for name, more in (("route", ()), ("route_grouped", (bias,))):
            tail = (1, 1) if more else ()
            want, ids = Op.registry[name].reference(logits, *more, 64, *tail, False)
            weights, got = native(name)(logits, *more, 64, *tail, False)
            torch.testing.assert_close(
                weights.sort(1).values, want.sort(1).values, equal_nan=True, rtol=2e-6, atol=1e-9
            )
            if name == "route":  # a sigmoid's last bit may decide between two of route_grouped's
                assert torch.equal(got, ids)


def test_groups_without_a_place_serve_nobody() -> None:
    logits = randn(200, 64, dtype=torch.float32)
    logits[:, 10] = 50.0  # alone in its group that is large; two of 3 are more
    logits[:, 24:26], logits[:, 40:42] = 3.0, 3.0
    bias = randn(64, dtype=torch.float32, scale=0.1)
    for dtype, own in itertools.product(TYPES, (bias * 0, bias, bias.bfloat16())):
        weights, ids = native("route_grouped")(logits.to(dtype), own, 4, 8, 2, True)
        want = Op.registry["route_grouped"].reference(logits.to(dtype), own, 4, 8, 2, True)
        assert torch.equal(ids, want[1])
        torch.testing.assert_close(weights, want[0])


# ---------------------------------------------------------------------------------------------------------- invariance

PARTS = [slice(first, first + count) for first, count in ((0, 1), (13, 1), (69, 1), (1, 16), (3, 64), (35, 35))]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_token_has_the_same_bits_in_every_batch_on_any_threads(isa: str, dtype: torch.dtype) -> None:
    for hidden, inner in ((80, 200), (16, 600)):
        x, gate_up, down, *_ = layer(dtype, hidden=hidden, inner=inner)
        packed, logits, bias = (pack_experts(gate_up), pack_experts(down)), randn(70, 12, dtype=dtype), torch.zeros(12)
        whole: tuple[Tensor, ...] = ()
        for count, at in itertools.product((1, 2, 3), [slice(0, 70), *PARTS]):
            _cpu.set_threads(count)
            weights, ids = native("route")(logits[at], 4, True)
            grouped = native("route_grouped")(logits[at], bias, 3, 4, 2, True)
            out = native("experts")(x[at], *packed, weights, ids, "silu")
            gots = (out, weights, ids, *grouped)
            whole = whole or gots
            same = all(torch.equal(got, want[at]) for got, want in zip(gots, whole, strict=True))
            assert same, f"{hidden} to {inner}, {at}, {count} threads"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_has_the_bits_of_a_plain_product(isa: str, dtype: torch.dtype) -> None:
    """However many rows its expert has: more than a panel, one, none."""
    weight, counts = randn(5, 192, 130, dtype=dtype), torch.tensor([0, 300, 1, 0, 250], dtype=torch.int32)
    x, packed, product = randn(560, 130, dtype=dtype), pack_experts(weight), Op.registry["linear"].providers["native"]
    first = 0
    for threads in (1, 2, 3):
        _cpu.set_threads(threads)
        got = native("grouped_linear")(x, packed, counts)
        first = 0
        for expert, count in enumerate(counts.tolist()):
            want = product(x, Matrix(packed[expert]), None, (192,))[first : first + count]
            assert torch.equal(got[first : first + count], want), f"expert {expert}, {threads} threads"
            first += count
        assert not got[first:].any()


def test_strided_tensors_are_as_good_as_contiguous_ones() -> None:
    x, gate_up, down, weights, ids = layer(torch.bfloat16)
    packed = pack_experts(gate_up), pack_experts(down)
    want = native("experts")(x, *packed, weights, ids, "silu")
    for other in (torch.cat([x, x], 1)[:, 80:], x.T.contiguous().T):
        assert torch.equal(native("experts")(other, *packed, weights, ids, "silu"), want)
    many = (weights.T.contiguous().T, torch.cat([ids, ids], 1)[:, 3:])
    assert torch.equal(native("experts")(x, *packed, *many, "silu"), want)
    counts = torch.full((9,), 7, dtype=torch.int32)
    for other in (torch.cat([x, x], 1)[:, 80:], x.T.contiguous().T):
        got = native("grouped_linear")(other, packed[0], counts)
        assert torch.equal(got, native("grouped_linear")(x, packed[0], counts))
    logits = randn(70, 18, dtype=torch.bfloat16)
    got, want = (native("route")(part, 3, True)[0] for part in (logits[:, 9:], logits[:, 9:].clone()))
    assert torch.equal(got, want)
    turned = pack_experts(down.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(turned, packed[1])


# ------------------------------------------------------------------------------------------- packing, replay, refusals


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_unpack_gives_back_what_was_packed(dtype: torch.dtype) -> None:
    for shape in ((1, 64, 2), (3, 128, 48), (4, 77, 6), (2, 1, 1000)):
        weight = randn(*shape, dtype=dtype)
        packed = pack_experts(weight)
        assert packed.shape[:2] == (shape[0], -(-shape[1] // COLUMNS))
        assert torch.equal(unpack_experts(packed, shape[1]), weight)
        assert all(torch.equal(each, linear.pack(of)) for each, of in zip(packed, weight, strict=True))


def test_plain_weights_go_to_torch() -> None:
    x, gate_up, down, weights, ids = layer(torch.float32)
    args = (x, gate_up, down, weights, ids, "silu")
    assert torch.equal(native("experts")(*args), Op.registry["experts"].providers["torch"](*args))
    counts = torch.full((9,), 7, dtype=torch.int32)
    want = Op.registry["grouped_linear"].reference(x, gate_up, counts)
    assert torch.equal(native("grouped_linear")(x, gate_up, counts), want)


def test_recorded_calls_run_again_on_new_numbers(isa: str) -> None:
    """Other tokens, that other experts serve: what is scratch must be the arena's, and nobody's in between."""

    def step() -> Tensor:
        weights, ids = native("route")(logits, 3, True)
        out: Tensor = native("experts")(x, *packed, weights, ids, "silu")
        weights, ids = native("route_grouped")(logits, bias, 2, 3, 2, False)
        out = native("experts")(out, *packed, weights, ids, "gelu")
        last: Tensor = native("grouped_linear")(out, packed[0], counts)
        return last

    x, gate_up, down, *_ = layer(torch.bfloat16)
    packed, logits, bias = (
        (pack_experts(gate_up), pack_experts(down)),
        randn(70, 9, dtype=torch.bfloat16),
        torch.ones(9),
    )
    counts, graph, arena = torch.full((9,), 7, dtype=torch.int32), _cpu.Graph(), Arena()
    with use_arena(arena):
        graph.begin()
        result = step()
        graph.end()
    before = result.clone()
    x.copy_(x.flip(0))
    logits.copy_(logits.roll(1, 1))
    counts.copy_(torch.arange(9))
    graph.run()
    assert len(graph) == 5
    assert torch.equal(result, step()) and not torch.equal(result, before)


def test_no_tokens_give_no_tokens() -> None:
    for dtype in TYPES:
        x, gate_up, down, weights, ids = layer(dtype)
        packed = pack_experts(gate_up), pack_experts(down)
        assert native("experts")(x[:0], *packed, weights[:0], ids[:0], "silu").shape == (0, 80)
        assert native("grouped_linear")(x[:0], packed[0], torch.zeros(9, dtype=torch.int32)).shape == (0, 448)
        assert native("route")(x[:0], 2, True)[0].shape == (0, 2)


def test_what_does_not_fit_is_refused() -> None:
    x, gate_up, down, weights, ids = layer(torch.bfloat16)
    packed = pack_experts(gate_up), pack_experts(down)
    nine = torch.full((9,), 7, dtype=torch.int32)
    calls: list[tuple[str, tuple[Any, ...], str]] = [
        ("experts", (x[:, 2:], *packed, weights, ids, "silu"), "do not fit"),
        ("experts", (x.float(), *packed, weights, ids, "silu"), "do not fit"),
        ("experts", (x, packed[0], packed[1][1:], weights, ids, "silu"), "do not fit"),
        ("experts", (x, packed[1], packed[1], weights, ids, "silu"), "do not fit"),
        ("experts", (x, packed[0], down, weights, ids, "silu"), "do not fit"),
        ("experts", (x, *packed, weights[1:], ids, "silu"), "tokens"),
        ("experts", (x, *packed, weights.double(), ids, "silu"), "tokens"),
        ("experts", (x, *packed, weights, ids.long(), "silu"), "int32"),
        ("grouped_linear", (x, packed[0], nine[1:]), "counts"),
        ("grouped_linear", (x, packed[0], nine.long()), "int32"),
        ("grouped_linear", (x, packed[0], nine + 1), "experts have 72 rows, of 70"),
        ("grouped_linear", (x, packed[0], -nine), "expert 0 has fewer than 0"),
        ("route", (x, 81, True), "k must be 1 to 80"),
        ("route", (x.double(), 2, True), "float64"),
        ("route_grouped", (x, torch.zeros(79), 2, 4, 2, True), "does not fit"),
        ("route_grouped", (x, torch.zeros(80), 2, 7, 2, True), "multiple of groups"),
        ("route_grouped", (x, torch.zeros(80), 2, 80, 2, True), "experts of a group must be 2"),
        ("route_grouped", (x, torch.zeros(80), 2, 4, 5, True), "kept must be 1 to 4"),
    ]
    for name, args, message in calls:
        with pytest.raises(ValueError, match=message):
            native(name)(*args)
    for wrong, message in (
        (gate_up[0], "experts, outputs, inputs"),
        (down[:, :, 1:], "odd"),
        (down.double(), "float64"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_experts(wrong)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inner", [48, 20, 7])
def test_a_checkpoints_experts_are_packed_as_their_stack_is(inner: int, dtype: torch.dtype) -> None:
    """Also where they are cut between blocks: straight from the checkpoint's tensors, or joined before."""
    ranges = ((0, inner + inner % 2),)
    parts = tuple(CheckpointSlice(f"{e}.{name}", (inner, 32), ranges) for e in range(3) for name in ("gate", "up"))
    weight = Weight("gate_up", parts, 0, 0, dtype, "experts", stack=3)
    tensors = {part.source: randn(inner, 32, dtype=torch.float32, scale=at + 1.0) for at, part in enumerate(parts)}
    assert native_moe.can_pack(weight)
    packed = native_moe.pack(weight, tensors)
    assert torch.equal(packed, pack_experts(weight.local(tensors).to(dtype)))
    assert packed.numel() * packed.element_size() == native_moe.packed_bytes(weight)


def test_odd_inputs_in_half_precision_keep_both_stacks_as_they_are() -> None:
    """Else one would be packed and the other not, and no provider takes that."""
    settings = {**FAMILIES["mixtral"]["plain"], "hidden_size": 45, "head_dim": 16, "num_hidden_layers": 1}
    run = Runner(make("mixtral", settings), torch.bfloat16)
    kept = [parameter for name, parameter in run.worker.model.named_parameters() if ".experts." in name]
    assert [each.dim() for each in kept] == [3, 3]
    (logits,) = run.prompts([[5, 6, 7]])
    assert logits.isfinite().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_experts_with_biases_equal_the_specification(isa: str, dtype: torch.dtype) -> None:
    for what, (x, stacks, biases, *rest) in CASES["biased_experts"](dtype):
        if stacks[1].values.shape[2] % linear.PAIRS[dtype]:
            continue
        exact = [Matrix(each.values.float()) for each in stacks], [each.float() for each in biases]
        want = Op.registry["biased_experts"].reference(x.float(), *exact, *rest)
        packed = tuple(Matrix(pack_experts(each.values)) for each in stacks)
        assert_close(native("biased_experts")(x, packed, biases, *rest), want, dtype, what)
