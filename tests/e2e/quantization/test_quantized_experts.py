"""Mixtures whose experts are quantized, against transformers' model of what they stand for."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintet.config import EngineConfig
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.startup import prepare
from quintet.model_loader.loader import declared_weights
from quintet.platforms.cpu.ops import quantized_moe
from quintet_tools.checkpoints.tiny import FAMILIES, VOCAB, Tiny, make
from tests.helpers.checkpoints.packed import gptq
from tests.helpers.checkpoints.quantized import awq, fp8
from tests.helpers.platforms.engines import answers, continued, engine, forms_of, ranked
from tests.helpers.platforms.run_model import Runner

if reason := quantized_moe.probe():
    pytest.skip(reason, allow_module_level=True)

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
SIZES = {**FAMILIES["qwen3_moe"]["plain"], **HEADS, "hidden_size": 128, "moe_intermediate_size": 64}
MIXTRAL = {**FAMILIES["mixtral"]["plain"], **HEADS, "hidden_size": 128, "intermediate_size": 64}
ROUTERS = ("mlp.gate", "block_sparse_moe.gate")
MADE: dict[str, Callable[[], Tiny]] = {
    "fp8 in blocks": lambda: fp8(make("qwen3_moe", SIZES), ignored=ROUTERS),
    "fp8 in blocks, stacked": lambda: stacked(fp8(make("qwen3_moe", SIZES), (32, 32), ROUTERS)),
    "fp8 in blocks of gate and up, stacked": lambda: stacked(of_both(make("qwen3_moe", SIZES))),
    "fp8 in blocks, latent": lambda: fp8(make("deepseek_v3", LATENT), (32, 32), ROUTERS),
    "awq": lambda: awq(make("mixtral", MIXTRAL), 32, ROUTERS),
    "gptq": lambda: gptq(make("mixtral", MIXTRAL), 4, 32, ROUTERS),
    "gptq in order": lambda: gptq(make("mixtral", MIXTRAL), 4, 32, ROUTERS, desc_act=True),
}
LATENT = {
    **FAMILIES["deepseek_v3"]["plain"], "hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 96,
    "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 24, "v_head_dim": 40, "first_k_dense_replace": 0,
}  # fmt: skip
KINDS = {"fp8 in blocks": "fp8", "awq": "int4", "gptq": "int4", "gptq in order": "plain"}


def of_both(tiny: Tiny) -> Tiny:
    """FP8 in which one scale is of gate and up together: 128 x 128 of 64 features each."""
    known = dict(tiny.reference.named_parameters())
    with torch.no_grad():
        for name in [name for name in known if name.endswith(".gate_up_proj")]:
            for expert in known[name]:
                expert[64, 0] = expert[0, 0] = expert.abs().max()  # so that both halves have the same scale
    tiny.reference.save_pretrained(folder := Path(tempfile.mkdtemp(dir=tiny.folder.parent)))
    return fp8(Tiny(folder, tiny.config, tiny.reference), ignored=ROUTERS)


def stacked(tiny: Tiny) -> Tiny:
    """The experts' tensors joined as transformers 5 has them (FP8Experts): gate over up, scales likewise."""
    tensors, joined = load_file(tiny.folder / "model.safetensors"), dict[str, Tensor]()
    for name in [name for name in tensors if ".experts.0.down_proj." in name]:
        stem, end = name.split(".experts.0.down_proj.weight")
        count = sum(each.startswith(stem) and each.endswith(f".down_proj.weight{end}") for each in tensors)
        gates, ups, downs = (
            [tensors.pop(f"{stem}.experts.{expert}.{own}_proj.weight{end}") for expert in range(count)]
            for own in ("gate", "up", "down")
        )
        shared = end and all(torch.equal(gate, up) for gate, up in zip(gates, ups, strict=True))
        pairs = gates if shared else [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        joined[f"{stem}.experts.gate_up_proj{end}"] = torch.stack(pairs)
        joined[f"{stem}.experts.down_proj{end}"] = torch.stack(downs)
    folder = Path(shutil.copytree(tiny.folder, tempfile.mkdtemp(dir=tiny.folder.parent), dirs_exist_ok=True))
    save_file({**tensors, **joined}, folder / "model.safetensors")
    return Tiny(folder, tiny.config, tiny.reference)


@pytest.mark.parametrize("name", MADE)
def test_logits_are_those_of_what_the_checkpoint_stands_for(name: str) -> None:
    tiny = MADE[name]()
    run = Runner(tiny, torch.float32, quantization=forms_of(tiny))
    kinds = {each.weight.format.kind for each in declared_weights(run.worker.model) if each.weight.use == "experts"}
    assert kinds == {KINDS.get(name, "fp8")}
    for prompt in random_prompts(3, (23, 1, 40), VOCAB):
        (logits,) = run.prompts([prompt])
        want = tiny.logits(prompt)[-len(logits) :]
        torch.testing.assert_close(logits, want, rtol=0, atol=2e-3 * float(want.std()))


def test_scales_of_stacks_are_in_the_stacks() -> None:
    tensors = load_file(MADE["fp8 in blocks, stacked"]().folder / "model.safetensors")
    assert tensors["model.layers.0.mlp.experts.gate_up_proj_scale_inv"].shape == (7, 4, 4)
    tensors = load_file(MADE["fp8 in blocks of gate and up, stacked"]().folder / "model.safetensors")
    assert tensors["model.layers.0.mlp.experts.gate_up_proj_scale_inv"].shape == (7, 1, 1)


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("name", ["awq", "fp8 in blocks, stacked"])
def test_ranks_read_their_shares_of_experts(name: str, ranks: int) -> None:
    tiny = MADE[name]()
    (prompt,) = random_prompts(3, (23,), VOCAB)
    want = tiny.logits(prompt)
    for logits in ranked(tiny, ranks, prompt):
        torch.testing.assert_close(logits, want, rtol=0, atol=2e-3 * float(want.std()))


def test_experts_with_orders_of_their_own_are_dequantized_and_that_is_said_once() -> None:
    with engine(MADE["gptq in order"]()) as llm:
        reasons = [each for each in llm._client.engine_plan.reasons if "act-order" in each]
    assert reasons == ["experts in orders of their own (act-order) are dequantized while they are loaded"]


def test_an_engine_answers_from_an_awq_mixtral_as_transformers_does() -> None:
    tiny = MADE["awq"]()
    with engine(tiny) as llm:
        assert answers(llm) == continued(tiny)
        (said,) = [each for each in llm._client.engine_plan.reasons if "quantized by" in each]
    assert said == "checkpoint quantized by awq: 6 products as int4 by native, 6 stacks of experts as int4"


def test_experts_are_quantized_while_they_are_loaded_and_the_plan_says_so() -> None:
    tiny = make("qwen3_moe", SIZES)
    config = EngineConfig.from_kwargs(
        model=str(tiny.folder), device="cpu", dtype="float32", quantization="int8", skip_tokenizer_init=True
    )
    prepared = prepare(config)
    model = prepared.ranks.workers[0].model
    experts = [each.weight.format.kind for each in declared_weights(model) if each.weight.use == "experts"]
    assert experts and set(experts) == {"w8a8"}
    (said,) = [reason for reason in prepared.reasons if reason.startswith("quantization")]
    assert f"{len(experts)} stacks of experts" in said and "routers stay as they are" in said
