"""GPTQ's packings, against values that were packed one by one by the published rules."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.interface.weights import FLOATS, CheckpointSlice, ShardRange, StoredTensor
from quintet.layers.quantization.checkpoint_config import read_quantization_config
from quintet.layers.quantization.formats.gptq import Gptq
from quintet.layers.quantization.formats.marlin import Marlin
from quintet.ops.quantized import dequantized
from tests.helpers.checkpoints.packed import Numbers, gptq_tensors, marlin_tensors, numbers

OUTPUTS, INPUTS = 64, 192
NAME = "model.layers.0.mlp.up_proj"
WHOLE = ShardRange((0, OUTPUTS), (0, INPUTS))
PART = CheckpointSlice(f"{NAME}.weight", (OUTPUTS, INPUTS), ((0, OUTPUTS),))


def weight(seed: int = 0, outputs: int = OUTPUTS, inputs: int = INPUTS) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) + 0.3


def there(tensors: dict[str, Tensor]) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(tuple(each.shape), (each.dtype,), read=lambda each=each: each)
        for name, each in tensors.items()
    }


def reader(tensors: dict[str, Tensor], name: str = NAME, **said: Any) -> Gptq:
    """Of a checkpoint's configuration."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, **said}
    found = read_quantization_config(config, lambda: there(tensors))
    assert found is not None
    read = found.plan.reader(name)
    assert isinstance(read, Gptq)
    return read


def packed(
    bits: int, group: int, symmetric: bool, ordered: bool, version: str
) -> tuple[Gptq, Numbers, dict[str, Tensor]]:
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1)) if ordered else None
    x = numbers(weight(), bits, group, symmetric, order)
    tensors = gptq_tensors(NAME, x, bits, version)
    said = {"sym": symmetric, "desc_act": ordered, "checkpoint_format": version}
    return reader(tensors, bits=bits, group_size=group, **said), x, tensors


ALL = [
    *itertools.product((2, 3, 4, 8), (-1, 32, 64, 128), (True, False), (True, False), ("gptq", "gptq_v2")),
    *itertools.product((3, 5, 6, 7), (-1, 64), (True, False), (True, False), ("gptq_p",)),
]


@pytest.mark.parametrize("how", ALL, ids=str)
def test_a_matrix_stands_for_what_was_packed(how: Any) -> None:
    read, x, tensors = packed(*how)
    wanted = read.stored(PART)
    assert {name: tuple(tensors[name].shape) for name in wanted} == {name: on.shape for name, on in wanted.items()}
    assert torch.equal(read.floats(PART, WHOLE, tensors), x.known)
    matrix = read.matrix(PART, WHOLE, tensors)
    assert not matrix.format.plain and matrix.format.act_order == (how[3] and how[1] != -1)
    torch.testing.assert_close(dequantized(matrix), x.known, rtol=1e-6, atol=1e-6)


CUTS = [
    ShardRange((16, 48), (0, INPUTS)),
    ShardRange((0, OUTPUTS), (64, 192)),
    ShardRange((0, OUTPUTS), (32, 96)),
    ShardRange((3, 50), (7, 90)),
]


@pytest.mark.grid
@pytest.mark.parametrize("shard", CUTS, ids=str)
@pytest.mark.parametrize("how", [each for each in ALL if each[1] in (-1, 64)], ids=str)
def test_a_share_is_the_wholes(how: Any, shard: ShardRange) -> None:
    read, x, tensors = packed(*how)
    want = x.known[slice(*shard.outputs), slice(*shard.inputs)]
    assert torch.equal(read.floats(PART, shard, tensors), want)
    if not read.format(shard).plain:
        torch.testing.assert_close(dequantized(read.matrix(PART, shard, tensors)), want, rtol=1e-6, atol=1e-6)


def test_shares_of_inputs_stay_quantized_unless_groups_are_scattered() -> None:
    neighbours, scattered = (packed(4, 64, True, ordered, "gptq")[0] for ordered in (False, True))
    half = ShardRange((0, OUTPUTS), (64, 128))
    assert neighbours.format(half).group == 64 and scattered.format(half).plain
    assert scattered.format(ShardRange((0, 8), (0, INPUTS))).act_order


def test_scattered_groups_of_uneven_sizes_are_dequantized() -> None:
    read, x, tensors = packed(4, 64, False, True, "gptq_v2")
    x.groups[:3] = 0
    tensors[f"{NAME}.g_idx"] = x.groups.int()
    read = reader(tensors, checkpoint_format="gptq_v2")
    assert read.format(WHOLE).plain
    assert torch.equal(read.floats(PART, WHOLE, tensors), x.known)


@pytest.mark.parametrize("said", [{"static_groups": True}, {}], ids=str)
def test_an_order_that_says_nothing_is_none(said: dict[str, Any]) -> None:
    """Static groups are of neighbours, whatever desc_act says; so may others be."""
    _, _, tensors = packed(4, 64, True, False, "gptq")
    read = reader(tensors, desc_act=True, sym=True, **said)
    assert not read.format(WHOLE).act_order and f"{NAME}.g_idx" not in read.stored(PART)


def test_files_without_an_order_are_of_neighbours() -> None:
    _, x, tensors = packed(4, 64, True, False, "gptq")
    del tensors[f"{NAME}.g_idx"]
    read = reader(tensors, sym=True)
    assert torch.equal(read.floats(PART, WHOLE, tensors), x.known)
    assert f"{NAME}.g_idx" in reader(tensors, sym=True, desc_act=True).stored(PART)  # the loader says that it lacks it


def test_zero_points_of_zero_borrowed_from_their_neighbours_in_the_first_version() -> None:
    x = numbers(weight().abs(), 4, 64, False)
    assert int(x.zeros.max()) == 0
    x.zeros[1::2] = 5
    tensors = gptq_tensors(NAME, x, 4)
    assert torch.equal(reader(tensors).floats(PART, WHOLE, tensors), x.known)


def test_a_group_that_is_the_last_and_smaller() -> None:
    part = CheckpointSlice(f"{NAME}.weight", (32, 160), ((0, 32),))
    x = numbers(weight(0, 32, 160), 4, 128, False)
    tensors = gptq_tensors(NAME, x, 4)
    read, cut = reader(tensors, group_size=128), ShardRange((0, 32), (0, 160))
    assert read.format(cut).group == 32
    torch.testing.assert_close(dequantized(read.matrix(part, cut, tensors)), x.known, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("group", [8, 24])
def test_groups_that_no_kernel_has_are_dequantized(group: int) -> None:
    x = numbers(weight(), 4, group, False)
    tensors = gptq_tensors(NAME, x, 4)
    read = reader(tensors, group_size=group)
    assert read.format(WHOLE).plain and torch.equal(read.floats(PART, WHOLE, tensors), x.known)


def test_symmetric_ones_are_held_to_it() -> None:
    _, _, tensors = packed(4, 64, False, False, "gptq")
    with pytest.raises(ValueError, match=rf"{NAME}\.qzeros holds the zero point \d+, .* set its sym to false"):
        reader(tensors, sym=True).matrix(PART, WHOLE, tensors)


@pytest.mark.parametrize("group", [-1, 128])
def test_marlins_layout(group: int) -> None:
    part, x = CheckpointSlice(f"{NAME}.weight", (128, 256), ((0, 128),)), numbers(weight(2, 128, 256), 4, group, True)
    tensors = marlin_tensors(NAME, x)
    found = read_quantization_config(
        {**GPTQ, "group_size": group, "is_marlin_format": True, "sym": True}, lambda: there(tensors)
    )
    assert found is not None
    read = found.plan.reader(NAME)
    assert read is not None
    assert {name: tuple(tensors[name].shape) for name in tensors} == {k: v.shape for k, v in read.stored(part).items()}
    for cut in (
        ShardRange((0, 128), (0, 256)),
        ShardRange((30, 70), (0, 256)),
        ShardRange((0, 128), (128, 256)),
        ShardRange((0, 128), (24, 90)),
    ):
        want = x.known[slice(*cut.outputs), slice(*cut.inputs)]
        assert torch.equal(read.floats(part, cut, tensors), want)
        if not read.format(cut).plain:
            assert torch.equal(dequantized(read.matrix(part, cut, tensors)), want)


def test_overrides_of_modules() -> None:
    """GPTQModel's: the first that fits."""
    names = [f"model.layers.{layer}.{each}" for layer in (0, 1, 10) for each in ("mlp.down_proj", "self_attn.q_proj")]
    dynamic = {
        r"-:model\.layers\.1\..*": {},
        r"+:.*\.(?:0|1)\..*down": {"bits": 8, "group_size": 32},
        r".*q_proj": {"bits": 2, "sym": False},
    }
    found = read_quantization_config(
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "dynamic": dynamic}
    )
    assert found is not None and not found.heads
    read = [found.plan.reader(name) for name in names]
    assert read == [
        Gptq(8, 32, True), Gptq(2, 128, False), None, None, Gptq(4, 128, True), Gptq(2, 128, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "heads"), [({}, False), ({"lm_head": True}, True), ({"dynamic": {"lm_head": {"bits": 8}}}, True)], ids=str
)
def test_a_head_is_packed_if_that_is_said(said: dict[str, Any], heads: bool) -> None:
    found = read_quantization_config({"quant_method": "gptq", "bits": 4, "group_size": 128, **said})
    assert found is not None and found.heads == heads


def test_modules_that_the_files_hold_in_floats_are_read_as_they_are() -> None:
    _, _, tensors = packed(4, 64, True, False, "gptq")
    files = {**there(tensors), "model.layers.0.odd.weight": StoredTensor((4, 4), FLOATS[:1])}
    found = read_quantization_config({"quant_method": "gptq", "bits": 4, "group_size": 64}, lambda: files)
    assert found is not None and found.plan.reader("model.layers.0.odd") is None


def test_names_that_were_quantized_leave_out_all_others() -> None:
    only = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj"]]
    said = {"bits": 4, "group_size": 64, "modules_in_block_to_quantize": only, "modules_to_not_convert": ["layers.3"]}
    found = read_quantization_config({"quant_method": "gptq", **said})
    assert found is not None
    names = ["layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.1.mlp.up_proj", "layers.3.mlp.up_proj"]
    assert [found.plan.reader(f"model.{name}") is not None for name in names] == [True, False, True, False]


def test_names_may_lie_in_any_depth_of_lists() -> None:
    only: list[Any] = ["up_proj"]
    for _ in range(5000):
        only = [only, None]
    found = read_quantization_config({**GPTQ, "modules_in_block_to_quantize": only})
    assert found is not None
    assert [found.plan.reader(f"layers.0.{name}") is None for name in ("up_proj", "q_proj")] == [False, True]


def test_an_order_means_nothing_to_marlins_layout() -> None:
    files = {"a.B": torch.zeros(8, 256, dtype=torch.int32), "a.g_idx": torch.arange(128, dtype=torch.int32)}
    found = read_quantization_config({**GPTQ, "checkpoint_format": "marlin"}, lambda: there(files))
    assert found is not None and isinstance(found.plan.reader("a"), Marlin)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"bits": 9}, "GPTQ with 9 bits; quintet reads 2 to 8"),
        ({"bits": "4"}, "GPTQ with '4' bits"),
        ({"bits": True}, "GPTQ with True bits"),
        ({"bits": 16}, "GPTQ with 16 bits"),
        ({"group_size": 0}, "group_size 0 is not -1 or a number of inputs"),
        ({"group_size": 2**70}, "group_size 1180591620717411303424"),
        ({"group_size": None}, "group_size None"),
        ({"checkpoint_format": "bitblas"}, "'bitblas': its bits are in the order that BitBLAS chose"),
        ({"checkpoint_format": "qqq"}, "'qqq': its scales"),
        ({"checkpoint_format": "gptq_v9"}, "'gptq_v9': quintet reads gptq, gptq_v2"),
        ({"pack_dtype": "int16"}, "pack_dtype 'int16'; quintet reads int32"),
        ({"checkpoint_format": "marlin", "bits": 8}, "Marlin's layout with 8 bits"),
        ({"checkpoint_format": "marlin", "group_size": 64}, "group_size 64"),
        ({"is_marlin_format": True, "desc_act": True}, "desc_act True"),
        ({"dynamic": [1]}, r"dynamic is \[1\], not an object"),
        ({"dynamic": {"+:a": 3}}, "dynamic has 3 for"),
        ({"dynamic": {"+:a": {"bits": 40}}}, "40 bits"),
        ({"dynamic": {"-:(a+)+b": {}}}, "could take long to match"),
        ({"dynamic": {"-:" + ".*a" * 9: {}}}, "could take long to match"),
        ({"dynamic": {"-:[": {}}}, "no regular expression"),
        ({"modules_in_block_to_quantize": [[3]]}, "names 3, which is no module"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_quantization_config({**GPTQ, **said})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("groups", "wrong"), [([0, 1, 2, 3] * 48, 3), ([0, -1] * 96, -1)])
def test_groups_that_there_are_not(groups: list[int], wrong: int) -> None:
    _, _, tensors = packed(4, 64, True, True, "gptq")
    tensors[f"{NAME}.g_idx"] = torch.tensor(groups, dtype=torch.int32)
    message = rf"{NAME}\.g_idx says that an input is of group {wrong}, and 192 inputs make groups 0 to 2"
    with pytest.raises(ValueError, match=message):
        reader(tensors)
