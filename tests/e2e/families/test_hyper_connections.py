"""HY V4 and GLM-5-Next, whose layers have several streams; Mistral Large 4: pipeline stages, files, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from quintet import LLM, SamplingParams
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.hyper_families import HYPER_CONNECTED
from quintet_tools.checkpoints.tiny import SERVED, VOCAB, Tiny, variant
from tests.helpers.checkpoints.wrappers import make_wrapper
from tests.helpers.platforms.run_model import Runner


def generated(tiny: Tiny, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    llm = LLM(
        str(tiny.folder), device="cpu", dtype="float32", skip_tokenizer_init=True, use_tqdm=False, num_pages=60,
        **settings,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    llm.close()
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.mark.parametrize("family", HYPER_CONNECTED)
def test_stages_hand_on_all_streams(family: str) -> None:
    tiny, prompts = variant(family, "plain"), random_prompts(3, (40, 5, 17), VOCAB)
    found = generated(tiny, prompts, pipeline_parallel_size=3, max_num_batched_tokens=16, max_num_seqs=4)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tiny.logits(prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_hy_v4_as_tencent_names_its_tensors(tmp_path: Path) -> None:
    tiny = variant("hy_v4", "plain")
    theirs = {
        ".attn_hc.": ".hc_attn_layer.hc_pre.hc_", ".ffn_hc.": ".hc_mlp_layer.hc_pre.hc_",
        ".sinks": ".learnable_sink_param",
        "self_attn.gate_proj": "self_attn.linear_gate", ".hc_head.hc_": ".hc_head.hc_head_",
    }  # fmt: skip
    tensors = {}
    for name, tensor in tiny.reference.state_dict().items():
        for own, other in theirs.items():
            name = name.replace(own, other)
        tensors[name] = tensor.contiguous()
    assert {
        "model.layers.0.hc_mlp_layer.hc_pre.hc_fn",
        "model.layers.1.self_attn.learnable_sink_param",
    } <= tensors.keys()
    tensors["model.mtp_layers.0.enorm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    prompts = random_prompts(0, (9, 20), VOCAB)
    got, want = (Runner(each).prompts(prompts) for each in (replace(tiny, folder=tmp_path), tiny))
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("family", ["glm5_next", "mistral_large4"])
def test_the_text_of_a_wrapper_is_read_by_the_names_of_published_files(family: str) -> None:
    tiny = make_wrapper(family, HYPER_CONNECTED[f"{family}_text"]["plain"])
    run, prompts = Runner(tiny), random_prompts(0, (9, 20), VOCAB)
    for prompt, logits in zip(prompts, run.prompts(prompts), strict=True):
        reference = tiny.logits(prompt)
        torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * float(reference.std()))


@pytest.mark.parametrize("family", HYPER_CONNECTED)
def test_half_precision_is_near(family: str) -> None:
    tiny, prompts = variant(family, "plain"), random_prompts(5, (30,), VOCAB)
    [logits] = Runner(tiny, torch.bfloat16).prompts(prompts)
    reference = tiny.logits(prompts[0])
    assert (logits.float() - reference).abs().mean() < 0.1 * reference.std()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("hy_v4", {"swiglu_limit": 0.0}, "swiglu_limit=0.0 is not supported"),
        ("hy_v4", {"hc_mult": 0}, "hc_mult 0 has no stream"),
        ("glm5_next_text", {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail=False is not"),
        ("glm5_next_text", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: silu follows"),
        ("mistral_large4_text", {"n_group": 4}, "n_group=4 is not supported; it has 1"),
        ("mistral_large4_text", {"kv_source_layers": [0, 1, 0]}, r"kv_source_layers \[0, 1, 0\]\) is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(family: str, settings: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model(family, **{**HYPER_CONNECTED[family]["plain"], **settings})
    with pytest.raises(ValueError, match=message):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, SERVED))
