"""Experts without gates on packed weights: the specification's numbers, and a token's bits whoever stands beside it."""

import pytest
import torch

from quintet.conformance.cases.model_ops import CASES
from quintet.ops import Op
from quintet.platforms.cpu.ops import linear
from quintet.platforms.cpu.ops.extension import missing
from quintet.platforms.cpu.ops.moe import pack_experts
from quintet_tools.checkpoints.tiny import EVERY, make
from tests.helpers.platforms.native import native
from tests.helpers.platforms.run_model import Runner

if reason := missing("experts"):
    pytest.skip(reason, allow_module_level=True)

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_equals_the_specification_alone_and_beside_others(isa: str, dtype: torch.dtype) -> None:
    serve = native("ungated_experts")
    for what, (x, up, down, weights, ids, kind) in CASES["ungated_experts"](dtype):
        if down.shape[2] % linear.PAIRS[dtype]:
            continue
        packed = pack_experts(up), pack_experts(down)
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
