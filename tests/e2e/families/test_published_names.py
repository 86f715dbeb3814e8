"""Checkpoints whose config.json names a class otherwise than transformers does, or that bring code of their own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quintet.config import EngineConfig
from quintet.conformance.check import NotSupported
from quintet.engine.startup import prepare
from quintet.hub.resolve import load_model_config
from quintet_tools.checkpoints.scaled_families import DEEPSEEK, MINICPM, TELECHAT
from quintet_tools.checkpoints.tiny import EVERY, PLAIN, Tiny, configured, make, variant
from tests.e2e.families.test_families import assert_agrees
from tests.helpers.platforms.run_model import Runner

LINEAR = {"replace_with_linear": True}


def published(tiny: Tiny, folder: Path, **entries: Any) -> Tiny:
    """The checkpoint with other entries in its config.json, which is read as an engine does."""
    raw = json.loads((tiny.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **entries}))
    if not (folder / "model.safetensors").exists():
        (folder / "model.safetensors").symlink_to(tiny.folder / "model.safetensors")
    return replace(tiny, folder=folder, config=load_model_config(folder))


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("llama", "LLaMAForCausalLM"),
        ("internlm3", "InternLM3ForCausalLM"),
        ("iquestcoder", "IQuestCoderForCausalLM"),
        ("phimoe", "PhiMoEForCausalLM"),
        ("exaone_moe", "ExaoneMoEForCausalLM"),
        ("chatglm", "ChatGLMForConditionalGeneration"),
    ],
)
def test_a_class_may_go_by_another_name(family: str, architecture: str, tmp_path: Path) -> None:
    tiny = variant(family, next(iter(EVERY[family])))
    assert_agrees(published(tiny, tmp_path, architectures=[architecture]))


@pytest.mark.parametrize(
    ("wrapper", "family", "architecture"),
    [
        ("inkling_mm_model", "inkling_text", "InklingForConditionalGeneration"),
        ("hyperclovax_vision_v2", "hyperclovax", "HCXVisionV2ForCausalLM"),
    ],
)
def test_the_text_of_a_wrapper_runs_under_the_class_that_its_file_names(
    wrapper: str, family: str, architecture: str, tmp_path: Path
) -> None:
    tiny = variant(family, next(iter(EVERY[family])))
    text = json.loads((tiny.folder / "config.json").read_text())
    raw = {"model_type": wrapper, "architectures": [architecture], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tiny.folder / "model.safetensors")
    inner = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(inner, tmp_path / "model.safetensors")
    assert_agrees(replace(tiny, folder=tmp_path, config=load_model_config(tmp_path).get_text_config()))


def test_the_text_of_minimax_m3_may_stand_by_itself(tmp_path: Path) -> None:
    tiny = variant("minimax_m3_vl_text", next(iter(EVERY["minimax_m3_vl_text"])))
    alone = published(tiny, tmp_path, model_type="minimax_m3_text", architectures=["MiniMaxM3SparseForCausalLM"])
    assert_agrees(alone)


def test_an_rnj1_that_attends_to_all_is_a_gemma_3(tmp_path: Path) -> None:
    tiny = make("gemma3_text", {**EVERY["gemma3_text"]["plain"], "layer_types": ["full_attention"] * 3})
    assert_agrees(published(tiny, tmp_path, architectures=["Rnj1ForCausalLM"]))
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    read = published(tiny, tmp_path, architectures=["Rnj1ForCausalLM"], layer_types=kinds)
    with pytest.raises(NotSupported, match="Rnj1ForCausalLM with layer_types .'sliding_attention'. is not supported"):
        Runner(read)


def test_a_minicpm_that_names_no_type_is_known_by_its_class(tmp_path: Path) -> None:
    """The first ones have code of their own, and no model_type."""
    tiny = variant("minicpm", "plain")
    raw = json.loads((tiny.folder / "config.json").read_text())
    del raw["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(tmp_path)
    assert (config.model_type, config.embedding_multiplier) == ("minicpm", MINICPM["scale_emb"])


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        ("minicpm", {**MINICPM, "sparse_config": {"dense_len": 32}}, "of more than 32 tokens, which is not computed"),
        ("minicpm", {**MINICPM, "hidden_act": "fatrelu"}, "activation 'fatrelu' is not known"),
        ("deepseek", {**PLAIN, **DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq=2"),
        (
            "nemotron-nas",
            {**EVERY["nemotron-nas"]["plain"], "block_configs": [{"attention": LINEAR, "ffn": LINEAR}] * 4},
            r"replace_with_linear=True in block_configs\[0\].attention is not supported",
        ),
        ("nemotron-nas", {**EVERY["nemotron-nas"]["plain"], "block_configs": []}, "an entry for each of num_hidden"),
        (
            "nemotron-nas",
            {
                **EVERY["nemotron-nas"]["plain"],
                "block_configs": [{"attention": {"n_heads_in_group": -2}, "ffn": {"intermediate_size": 77}}] * 4,
            },
            r"block_configs\[0\] has n_heads_in_group -2",
        ),
        ("PanguEmbedded", {**EVERY["PanguEmbedded"]["plain"], "interleaved_sliding_window": [8, 8, 8]}, "not computed"),
        ("minicpm", {**MINICPM, "sparse_config": {"dense_len": "32"}}, "not an object with a whole number dense_len"),
        ("plamo3", {**EVERY["plamo3"]["plain"], "scale_embedding": True}, "scale_embedding"),
        ("plamo3", {**EVERY["plamo3"]["plain"], "rope_scaling": {"rope_type": "yarn", "factor": 8}}, "rope_scaling is"),
        ("sarvam_mla", {**EVERY["sarvam_mla"]["plain"], "score_function": "softmax"}, "score_function is 'softmax'"),
        ("telechat", {**TELECHAT, "embed_layernorm": True}, "embed_layernorm"),
        ("telechat", {**TELECHAT, "base_seqlen": 64, "training_seqlen": 128}, "training_seqlen is 128 and base_seqlen"),
    ],
)
def test_what_is_not_computed_is_refused(family: str, entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **entries}))
    settings = EngineConfig(
        model=str(tmp_path), device="cpu", skip_tokenizer_init=True, load_format="dummy", max_model_len=64
    )
    with pytest.raises(ValueError, match=message):
        prepare(settings)


def test_a_minicpm_within_its_dense_length_attends_to_all(tmp_path: Path) -> None:
    tiny = make("minicpm", {**MINICPM, "sparse_config": {"dense_len": 4096}})
    assert_agrees(tiny)


def test_windows_of_plamo_3_may_be_listed(tmp_path: Path) -> None:
    tiny = variant("plamo3", "plain")
    raw = json.loads((tiny.folder / "config.json").read_text())
    seen = [kind == "sliding_attention" for kind in tiny.config.layer_types]
    listed = published(tiny, tmp_path, sliding_window=[raw["window_size"] if each else None for each in seen])
    assert listed.config.layer_types == tiny.config.layer_types
    assert_agrees(listed)
    with pytest.raises(ValueError, match="not one window or null for each layer"):
        published(tiny, tmp_path, sliding_window=[8, 16])


def test_the_shared_experts_of_param2_are_counted_together() -> None:
    entries = {**EVERY["param2moe"]["plain"], "num_shared_experts": 2, "moe_shared_expert_intermediate_size": 122}
    config = configured("param2moe", entries)
    assert (config.moe_shared_expert_intermediate_size, config.n_shared_experts) == (61, 2)
    with pytest.raises(ValueError, match="61, no multiple of the 2 shared experts"):
        configured("param2moe", {**entries, "moe_shared_expert_intermediate_size": 61})
