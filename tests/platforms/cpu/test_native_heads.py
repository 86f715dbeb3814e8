"""Packed stacks of heads and of experts without gates: the specification's results, a token's bits anywhere."""

from collections.abc import Iterator

import pytest
import torch

from quintet.conformance.cases.model_ops import CASES
from quintet.conformance.cases.random_arguments import randn
from quintet.interface.weights import CheckpointSlice, Matrix, Weight
from quintet.ops import Op
from quintet.platforms.cpu.ops import heads as native_heads
from quintet.platforms.cpu.ops import linear
from quintet.platforms.cpu.ops import moe as native_moe
from quintet.platforms.cpu.ops.extension import missing
from quintet_tools.checkpoints.tiny import EVERY, make
from tests.helpers.platforms.native import native
from tests.helpers.platforms.run_model import Runner

if reason := missing("linear_by_heads"):
    pytest.skip(reason, allow_module_level=True)

from quintet import _cpu

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = _cpu.threads()
    _cpu.set_threads(2)
    yield
    _cpu.set_threads(before)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_heads_equal_the_specification(isa: str, dtype: torch.dtype) -> None:
    for what, (x, weight, outputs, turned) in CASES["by_heads"](dtype):
        want = Op.registry["by_heads"].reference(x.float(), weight.float(), outputs, turned)
        packed = native_moe.pack_experts(weight.mT.contiguous() if turned else weight)
        got = native("by_heads")(x, packed, outputs, turned)
        limit = (20 if dtype == torch.float32 else 6) * torch.finfo(dtype).eps * float(want.abs().max())
        assert got.shape == want.shape and got.dtype == dtype, what
        assert ((got.float() - want).abs() <= limit).all(), what


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_token_is_its_own_and_each_head_a_product_by_itself(isa: str, dtype: torch.dtype) -> None:
    x, weight = randn(70, 3, 40, dtype=dtype), randn(3, 100, 40, dtype=dtype)
    packed = native_moe.pack_experts(weight)
    whole = native("by_heads")(x, packed, 100, False)
    for token in (0, 41, 69):
        assert torch.equal(native("by_heads")(x[token : token + 1], packed, 100, False)[0], whole[token])
    for head in range(3):
        alone = native("linear")(x[:, head].contiguous(), Matrix(linear.pack(weight[head])), None, (100,))
        assert torch.equal(alone, whole[:, head])


@pytest.mark.parametrize("use", native_heads.USES)
def test_a_stack_is_packed_from_slices_of_one_tensor(use: str) -> None:
    """Heads 1 and 2 of three, of which each has 6 and 4 rows one under the other: the last 4."""
    parts = tuple(CheckpointSlice("kv_b.weight", (4, 8), ((0, 4),), 10 * head + 6, total=30) for head in (1, 2))
    weight = Weight("of_values", parts, 0, 0, torch.bfloat16, use, stack=2)
    whole = torch.randn(30, 8)
    packed = native_heads.pack(weight, {"kv_b.weight": whole})
    outputs, inputs = (8, 4) if use == "transposed heads" else (4, 8)
    heads = torch.stack([whole[16:20], whole[26:30]]).bfloat16()
    got = torch.stack([linear.unpack(each, outputs, inputs) for each in packed])
    assert torch.equal(got, heads.mT if use == "transposed heads" else heads)
    assert packed.nbytes == native_heads.packed_bytes(weight)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_experts_equal_the_specification_alone_and_beside_others(isa: str, dtype: torch.dtype) -> None:
    serve = native("ungated_experts")
    for what, (x, up, down, weights, ids, kind) in CASES["ungated_experts"](dtype):
        if down.shape[2] % linear.PAIRS[dtype]:
            continue
        packed = native_moe.pack_experts(up), native_moe.pack_experts(down)
        got = serve(x, *packed, weights, ids, kind)
        want = Op.registry["ungated_experts"].reference(x.float(), up.float(), down.float(), weights, ids, kind)
        atol = 20 * torch.finfo(dtype).eps * float(want.abs().max())
        torch.testing.assert_close(got.float(), want, rtol=0, atol=atol, msg=lambda told, what=what: f"{what}: {told}")
        for at in range(len(x)):
            alone = serve(x[at : at + 1], *packed, weights[at : at + 1], ids[at : at + 1], kind)
            assert torch.equal(alone[0], got[at]), what


def test_odd_inputs_in_half_precision_keep_both_stacks_as_they_are() -> None:
    """Else one would be packed and the other not, and no provider takes that."""
    settings = {**EVERY["nemotron_h"]["plain"], "layers_block_type": ["moe"], "hidden_size": 45}
    run = Runner(make("nemotron_h", settings), torch.bfloat16)
    kept = [parameter.dim() for name, parameter in run.worker.model.named_parameters() if ".experts." in name]
    assert kept == [3, 3]
    (logits,) = run.prompts([[5, 6, 7]])
    assert logits.isfinite().all()
