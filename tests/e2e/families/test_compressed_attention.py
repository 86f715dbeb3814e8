"""DeepSeek-V4: requests shorter and longer than windows, than the tokens of an entry, and than entries are chosen."""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quintet import LLM, SamplingParams
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.layers.quantization.fp4_fp8 import E2M1
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.hyper_families import DEEPSEEK_V4
from quintet_tools.checkpoints.sizes import WINDOW
from quintet_tools.checkpoints.tiny import VOCAB, Tiny, make
from tests.helpers.platforms.run_model import Runner

SERVED, SPARSE, HEAVY, TOPK = 256, 4, 24, 6
# an entry's tokens, one fewer and one more; more entries than are chosen
LENGTHS = (150, 3, SPARSE, HEAVY - 1, HEAVY, WINDOW, SPARSE * (TOPK + 1) + 1, 77)
CONFIGS: dict[str, dict[str, Any]] = {
    "all kinds": {},
    "heavy alone": {"layer_types": ["heavily_compressed_attention"] * 4},
    "windows alone": {"layer_types": ["sliding_attention"] * 4},
    "entries longer than windows": {"sliding_window": 3, "mlp_layer_types": ["moe"] * 4},
    "YaRN": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1
        }
    },
    "quantized": {
        "hidden_size": 64, "head_dim": 32, "partial_rotary_factor": 0.25, "q_lora_rank": 32, "o_lora_rank": 16,
        "intermediate_size": 64, "index_head_dim": 32,
    },
}  # fmt: skip
KINDS = [each for each in CONFIGS if each not in ("all kinds", "quantized")]
ENGINES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 5},
    "pages of 32": {"block_size": 32, "num_pages": 60},
    "preempted": {"num_pages": 20},
    "preempted, no cached pages": {"num_pages": 20, "enable_prefix_caching": False},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
}


@functools.cache
def tiny(name: str) -> Tiny:
    return make("deepseek_v4", {**DEEPSEEK_V4, "max_position_embeddings": SERVED, **CONFIGS[name]})


def generated(name: str | Path, prompts: list[list[int]], **settings: Any) -> tuple[list[list[int]], int]:
    """Tokens after prompts that came twice, and those of the second time that were cached."""
    folder = name if isinstance(name, Path) else tiny(name).folder
    llm = LLM(
        str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, use_tqdm=False,
        **{"num_pages": 100, **settings},
    )  # fmt: skip
    params, outputs = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False), []
    for _ in range(2):  # the second time beginnings are cached, and steps come again
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    llm.close()
    return [list(each.outputs[0].token_ids) for each in outputs], sum(each.num_cached_tokens or 0 for each in outputs)


@pytest.mark.parametrize(
    ("name", "engine"), [("all kinds", each) for each in ENGINES] + [(each, "chunked") for each in KINDS]
)
def test_tokens_equal_transformers(name: str, engine: str) -> None:
    prompts = random_prompts(4, LENGTHS, VOCAB)
    found, cached = generated(name, prompts, **ENGINES[engine])
    for prompt, tokens in zip(prompts, found, strict=True):
        reference = tiny(name).logits(prompt + tokens)
        assert reference[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    assert cached or engine != "batched"


@pytest.mark.parametrize("name", ["all kinds", *KINDS])
def test_logits_equal_transformers_and_bits_do_not_depend_on_the_batch(name: str) -> None:
    run, prompts = Runner(tiny(name), max_model_len=SERVED), random_prompts(1, LENGTHS, VOCAB)
    for prompt, together in zip(prompts, run.prompts(prompts), strict=True):
        reference = tiny(name).logits(prompt)
        torch.testing.assert_close(together, reference, rtol=0, atol=1e-4 * float(reference.std()))
        alone = run.prompts([prompt])[0]
        chunks = [run.step({0: prompt[at : at + 7]})[0] for at in range(0, len(prompt), 7)]
        run.finish(0)
        assert torch.equal(alone, together) and torch.equal(alone, torch.cat(chunks))


def test_an_indexer_matters_behind_the_entries_that_it_may_choose() -> None:
    """Else the tests above would pass without one."""
    [prompt], every = random_prompts(1, (100,), VOCAB), copy.deepcopy(tiny("all kinds").reference)
    for module in every.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = SERVED
    whole = replace(tiny("all kinds"), reference=every).logits(prompt)
    found, first = Runner(tiny("all kinds")).prompts([prompt])[0], SPARSE * (TOPK + 1) - 1
    torch.testing.assert_close(found[:first], whole[:first], rtol=0, atol=1e-4 * float(whole.std()))
    assert (found - whole)[first:].abs().max() > 0.1 * whole.std()


def published_name(name: str) -> str:
    """The name that published files have for a tensor that transformers writes."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def published(name: str, folder: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> Tiny:
    """A model whose files have the published names, with tensors that `change` makes of each."""
    made: dict[str, torch.Tensor] = {}
    for each, tensor in load_file(tiny(name).folder / "model.safetensors").items():
        made |= change(published_name(each), tensor)
    save_file({each: tensor.contiguous() for each, tensor in made.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((tiny(name).folder / "config.json").read_text())
    return replace(tiny(name), folder=folder)


def test_published_names_and_those_of_transformers_modules_are_the_same_model(tmp_path: Path) -> None:
    prompts = random_prompts(0, (9, 40), VOCAB)
    [want, *found] = (
        Runner(each).prompts(prompts)
        for each in (
            tiny("all kinds"),
            published("all kinds", tmp_path, lambda name, tensor: {name: tensor, "mtp.0.norm.weight": torch.ones(3)}),
        )
    )
    held = {name: tensor.contiguous() for name, tensor in tiny("all kinds").reference.state_dict().items()}
    assert "model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight" in held
    save_file(held, tmp_path / "model.safetensors")
    found.append(Runner(replace(tiny("all kinds"), folder=tmp_path)).prompts(prompts))
    assert all(torch.equal(*pair) for each in found for pair in zip(each, want, strict=True))


def quantized(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Products as published: experts in 4 bits with a scale for 32 inputs, others in FP8 by blocks, and some floats."""
    module = name.removesuffix(".weight")
    floats = "norm" in name or ".compressor." in name or name.endswith(("weights_proj.weight", ".gate.weight"))
    if floats or module == name or not module.startswith("layers."):
        return {name: tensor}
    scale = torch.full((tensor.shape[0] if ".experts." in name else -(-tensor.shape[0] // 16), 1), 2.0**-4)
    if ".experts." not in name:
        scale = scale.repeat(1, -(-tensor.shape[1] // 16))
        return {name: (tensor * 16).to(torch.float8_e4m3fn), f"{module}.scale": scale.to(torch.float8_e8m0fnu)}
    scale = scale.repeat(1, tensor.shape[1] // 32)
    codes = torch.tensor(E2M1)
    places = ((tensor * 16)[..., None] - codes).abs().argmin(-1)
    pairs = (places[:, ::2] + 16 * places[:, 1::2]).to(torch.uint8).view(torch.int8)
    return {name: pairs, f"{module}.scale": scale.to(torch.float8_e8m0fnu)}


def test_published_files_of_fp8_with_experts_in_4_bits_are_as_transformers_reads_them(tmp_path: Path) -> None:
    model = published("quantized", tmp_path, quantized)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"expert_dtype": "fp4"}
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
        "dequantize": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    del config["quantization_config"]["dequantize"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    [prompt] = random_prompts(0, (40,), VOCAB)
    [tokens], _ = generated(tmp_path, [prompt])
    logits = replace(model, reference=read).logits(prompt + tokens)
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported; it has 'sqrtsoftplus'"),
        ({"o_groups": 3}, r"4 attention heads are no 3 groups \(o_groups\); correct config.json"),
    ],
)
def test_what_is_not_computed_is_refused(settings: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model("deepseek_v4", **{**DEEPSEEK_V4, **settings})
    with pytest.raises(ValueError, match=message):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, 40))


def test_what_a_request_or_cache_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="compressed entries are kept in the model's dtype alone"):
        generated("all kinds", [[1, 2]], kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="takes no prompt embeddings: the ids of tokens choose the experts"):
        generated("all kinds", [[1, 2]], enable_prompt_embeds=True)
    with pytest.raises(ValueError, match="4 ranks cannot share 2 groups.*lower tensor_parallel_size to 2"):
        generated("all kinds", [[1, 2]], tensor_parallel_size=4)


def test_platforms_without_compressed_entries_refuse_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLATFORM, "optional_spec_fields", PLATFORM.optional_spec_fields - {"compressed"})
    for name in ("all kinds", "windows alone"):
        config = AutoConfig.for_model("deepseek_v4", **{**DEEPSEEK_V4, **CONFIGS[name]})
        with pytest.raises(ValueError, match="no attention to compressed entries.*run this model with device='cpu'"):
            Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, 40))
