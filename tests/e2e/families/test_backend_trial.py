"""What the Transformers backend's trial of a model finds before anything is served."""

from typing import Any

import pytest
import torch
from torch import nn

from quintet.conformance.check import NotSupported
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.models.transformers.trace import alike_experts
from quintet_tools.checkpoints.tiny import PLAIN, VOCAB, make
from tests.helpers.platforms.run_model import Runner
from tests.helpers.releases import need_logits


def test_experts_whose_gate_is_clamped_are_not_ours() -> None:
    class Clamped(nn.Module):
        limit = 7.0

        def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            gate_up = torch.einsum("ti,eoi->teo", x, self.gate_up_proj)  # type: ignore[arg-type]
            gate, up = gate_up.clamp(max=self.limit).chunk(2, -1)
            each = torch.einsum("teo,eho->teh", nn.functional.silu(gate) * up, self.down_proj)  # type: ignore[arg-type]
            chosen = torch.take_along_dim(each, ids[..., None], 1)
            return (chosen * weights[..., None]).sum(1)

    module = Clamped()
    assert not alike_experts(module, "silu")
    module.limit = float("inf")  # type: ignore[assignment]
    assert alike_experts(module, "silu")


def test_tables_that_go_by_the_longest_text_of_a_step_are_refused() -> None:
    """Phi-3.5-MoE has two factors for them; published ones are the same."""
    factors: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "short_mscale": 1.5}
    said = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **factors}
    base = {**PLAIN, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}
    tiny = make("phimoe", {**base, "rope_parameters": {**said, "long_mscale": 1.5}})
    need_logits(tiny)
    prompts = random_prompts(0, (23, 7), VOCAB)
    for prompt, logits in zip(prompts, Runner(tiny, transformers_backend=True).prompts(prompts), strict=True):
        reference = tiny.logits(prompt)
        torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.std()))
    with pytest.raises(NotSupported, match="count tokens by themselves"):
        Runner(make("phimoe", {**base, "rope_parameters": {**said, "long_mscale": 3.0}}), transformers_backend=True)
