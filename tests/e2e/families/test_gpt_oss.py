"""gpt-oss as it is published: experts in MXFP4, each with biases; and shared out over ranks."""

import copy
import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from quintet.conformance.harness.worker_runner import random_prompts
from quintet.layers.quantization.fp4_fp8 import E2M1
from quintet.model_loader.loader import declared_weights
from quintet.platforms.cpu.ops import quantized_moe
from quintet_tools.checkpoints.tiny import FAMILIES, VOCAB, Tiny, make
from tests.helpers.platforms.engines import forms_of, ranked
from tests.helpers.platforms.run_model import Runner

SIZES = {**FAMILIES["gpt_oss"]["plain"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@torch.no_grad()
def published() -> Tiny:
    """The experts' weights on the nearest numbers of e2m1, with a power of 2 for every 32 inputs."""
    tiny = make("gpt_oss", SIZES)
    folder, model = Path(tempfile.mkdtemp(dir=tiny.folder.parent)), copy.deepcopy(tiny.reference)
    tensors = load_file(tiny.folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, exponents, known = rounded(tensors.pop(name).mT)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
            parameter.copy_(known.mT)
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((tiny.folder / "config.json").read_text())
    said = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": said}))
    return Tiny(folder, AutoConfig.from_pretrained(folder), model)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[E, N, K] -> two numbers to a byte [E, N, K / 32, 16], exponents [E, N, K / 32], and what both stand for."""
    runs = weight.unflatten(-1, (-1, 32))
    exponents = (runs.abs().amax(-1) / 6).log2().ceil()
    places = ((runs / 2 ** exponents[..., None])[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    known = torch.tensor(E2M1)[places] * 2 ** exponents[..., None]
    blocks = (places[..., 0::2] | places[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), known.flatten(-2)


def test_logits_are_those_of_what_the_blocks_stand_for() -> None:
    tiny = published()
    run = Runner(tiny, torch.float32, quantization=forms_of(tiny))
    kinds = {
        each.weight.format.kind for each in declared_weights(run.worker.model) if each.weight.use == "biased experts"
    }
    assert kinds == {"plain" if quantized_moe.probe() else "table4"}
    for prompt in random_prompts(3, (23, 1, 40), VOCAB):
        (logits,) = run.prompts([prompt])
        want = tiny.logits(prompt)
        torch.testing.assert_close(logits, want, rtol=0, atol=2e-3 * float(want.std()))


@pytest.mark.parametrize("ranks", [2])
def test_ranks_read_their_shares_of_blocks(ranks: int) -> None:
    tiny = published()
    (prompt,) = random_prompts(3, (23,), VOCAB)
    want = tiny.logits(prompt)
    for logits in ranked(tiny, ranks, prompt):
        torch.testing.assert_close(logits, want, rtol=0, atol=2e-3 * float(want.std()))
