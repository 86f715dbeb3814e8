"""Mixtures whose experts are quantized, against transformers' model of what they stand for."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quintet.config import EngineConfig
from quintet.conformance.direct import random_prompts
from quintet.conformance.tiny import FAMILIES, VOCAB, make
from quintet.engine.loader import declared
from quintet.engine.start import prepare
from quintet.layers.forms import Forms
from quintet.layers.forms.checkpoint import quantized
from quintet.platforms.cpu import PLATFORM, quantized_moe
from quintet.platforms.interface import Capabilities
from tests.helpers.run_model import Runner

if reason := quantized_moe.probe():
    pytest.skip(reason, allow_module_level=True)

SETTINGS = {**FAMILIES["qwen3_moe"]["plain"], "hidden_size": 128, "moe_intermediate_size": 64}


def fp8(folder: Path, of: Path) -> Path:
    """Writes the experts' tensors in FP8 blocks of 128 x 128; beside it the model that they stand for."""
    meant = folder / "meant"
    shutil.copytree(of, folder / "fp8")
    shutil.copytree(of, meant)
    tensors, known = load_file(of / "model.safetensors"), {}
    held: dict[str, Tensor] = {}
    for name, x in tensors.items():
        held[name], known[name] = x, x
        if ".experts." in name:
            scale = x.float().abs().max() / 448  # one block
            held[name] = (x.float() / scale).to(torch.float8_e4m3fn)
            held[f"{name}_scale_inv"], known[name] = scale.reshape(1, 1), (held[name].float() * scale).to(x.dtype)
    save_file(held, folder / "fp8" / "model.safetensors")
    save_file(known, meant / "model.safetensors", {"format": "pt"})
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["self_attn", "mlp.gate"]}
    config = json.loads((of / "config.json").read_text())
    (folder / "fp8" / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return folder / "fp8"


def forms_of(folder: Path) -> Forms:
    facts = PLATFORM.probe()
    assert isinstance(facts, Capabilities)
    return Forms(checkpoint=quantized(json.loads((folder / "config.json").read_text())["quantization_config"]),
                 kept=facts.quant)  # fmt: skip


def test_experts_in_fp8_blocks_stay_so_and_answer_as_transformers_does(tmp_path: Path) -> None:
    tiny = make("qwen3_moe", SETTINGS)
    folder = fp8(tmp_path, tiny.folder)
    held = replace(tiny, folder=folder)
    run = Runner(held, torch.float32, forms=forms_of(folder))
    kinds = {each.weight.form.kind for each in declared(run.worker.model) if each.weight.use == "experts"}
    assert kinds == {"fp8"}
    reference = AutoModelForCausalLM.from_pretrained(folder.parent / "meant", dtype=torch.float32).eval()
    for prompt in random_prompts(3, (23, 1, 40), VOCAB):
        (logits,) = run.prompts([prompt])
        with torch.inference_mode():
            want = reference(torch.tensor([prompt])).logits[0]
        assert torch.allclose(logits, want[-len(logits) :], atol=2e-4)


def test_experts_are_quantized_while_they_are_loaded_and_the_plan_says_so() -> None:
    tiny = make("qwen3_moe", SETTINGS)
    config = EngineConfig.from_kwargs(
        model=str(tiny.folder), device="cpu", dtype="float32", quantization="int8", skip_tokenizer_init=True
    )
    prepared = prepare(config)
    model = prepared.ranks.workers[0].model
    experts = [each.weight.form.kind for each in declared(model) if each.weight.use == "experts"]
    assert experts and set(experts) == {"w8a8"}
    (said,) = [reason for reason in prepared.reasons if reason.startswith("quantization")]
    assert f"{len(experts)} stacks of experts" in said and "routers stay as they are" in said
