"""Families of random sizes, and checkpoints of many makes, against transformers' eager attention, in float32.

Each family in each variant, and in half precision, is the conformance kit's to prove.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, MiniMaxM2Config
from transformers.models.minimax import modeling_minimax
from transformers.models.minimax_m2 import modeling_minimax_m2

from quintet.config import EngineConfig
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.engine.startup import prepare
from quintet.layers.weight_transform import normalise_columns, normalise_rows
from quintet.model_loader.loader import declared_weights
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.derived_families import KIN, LIGHTNING
from quintet_tools.checkpoints.tiny import EVERY, FAMILIES, LENGTH, PLAIN, SERVED, VOCAB, Tiny, make, variant
from tests.helpers.checkpoints.configs import configs, kin_configs
from tests.helpers.platforms.run_model import Runner

LENGTHS = (23, 1, 40, 7)  # of the prompts of one batch
GENERATED = 6


def assert_agrees(tiny: Tiny, seed: int = 0, **runner: Any) -> None:
    """Logits are close for a ragged batch, and greedy tokens equal over the paged cache.

    The reference sees each request alone and whole: its best token after every prefix must be the one we chose.
    """
    run = Runner(tiny, **runner)
    prompts = random_prompts(seed, LENGTHS, VOCAB)
    chosen = run.greedy(prompts, GENERATED)
    references = [tiny.logits(prompt + more) for prompt, more in zip(prompts, chosen, strict=True)]
    for prompt, logits, reference in zip(prompts, run.prompts(prompts), references, strict=True):
        assert_close(logits, reference[: len(prompt)])
    for prompt, more, reference in zip(prompts, chosen, references, strict=True):
        assert reference[len(prompt) - 1 : -1].argmax(-1).tolist() == more


def assert_close(logits: Tensor, reference: Tensor) -> None:
    spread = float(reference.std())
    assert spread > 0.3, "these logits are too alike to tell anything"
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4 * spread)


@pytest.mark.grid(cases=12)
@pytest.mark.parametrize("family", FAMILIES)
@settings(derandomize=True, max_examples=4, deadline=None, database=None)
@given(data=st.data())
def test_random_configs_agree(family: str, data: st.DataObject) -> None:
    tiny = make(family, data.draw(configs(family)))
    assert_agrees(tiny, seed=data.draw(st.integers(0, 9)), page_size=data.draw(st.sampled_from([8, 16, 32])))


@pytest.mark.grid(cases=24)
@pytest.mark.parametrize("family", KIN)
@settings(derandomize=True, max_examples=2, deadline=None, database=None)
@given(data=st.data())
def test_random_configs_of_kin_agree(family: str, data: st.DataObject) -> None:
    assert_agrees(make(family, data.draw(kin_configs(family))), seed=data.draw(st.integers(0, 9)))


# families whose layers compute something by torch, and not by an op of the platform, or have a layer of their own
@pytest.mark.parametrize(
    "family",
    [
        "apertus",
        "baichuan",
        "bailing_hybrid",
        "cohere",
        "gemma4_text",
        "gemma4_unified_text",
        "inkling_text",
        "kimi_linear",
        "lfm2_moe",
        "minimax",
        "ministral3",
        "nemotron_h",
        "olmo",
        "olmo_hybrid",
        "plamo2",
        "rwkv7",
        "solar",
        "stablelm",
        "zamba2",
    ],
)
def test_bits_are_the_same_alone_batched_and_chunked(family: str) -> None:
    run = Runner(variant(family, list(KIN[family])[-1]))
    prompts = random_prompts(1, (37, 5, 20), VOCAB)
    batched = run.prompts(prompts)
    for prompt, together in zip(prompts, batched, strict=True):
        alone = run.prompts([prompt])[0]
        chunks = [run.step({0: prompt[at : at + 7]})[0] for at in range(0, len(prompt), 7)]
        run.finish(0)
        assert torch.equal(alone, together) and torch.equal(alone, torch.cat(chunks))


@pytest.mark.parametrize("family", KIN)
def test_an_engine_takes_what_transformers_writes(family: str) -> None:
    """Its names of classes, and where it says how long a text may be."""
    tiny = variant(family, next(iter(KIN[family])))
    settings = EngineConfig(model=str(tiny.folder), device="cpu", skip_tokenizer_init=True, max_model_len=LENGTH)
    assert prepare(settings).memory_plan.max_model_len == LENGTH


def test_longrope_turns_long_requests_by_the_long_factors() -> None:
    """transformers switches by each request's length, we by max_model_len: requests that are all long agree."""
    tiny = make("phi3", {**FAMILIES["phi3"]["longrope"], "original_max_position_embeddings": 16})
    prompts = random_prompts(0, (20, 45), VOCAB)
    for prompt, logits in zip(prompts, Runner(tiny).prompts(prompts), strict=True):
        assert_close(logits, tiny.logits(prompt))


def test_minimax_turns_as_many_features_as_its_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MiniMax's own code; transformers' for MiniMax-M2 does so, and its older sister turns all."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    settings = {**KIN["minimax"]["plain"], "rotary_dim": 8, "rope_parameters": rope}
    tiny = make("minimax", settings)
    newer = {name: value for name, value in settings.items() if name not in LIGHTNING}
    tiny.reference.model.rotary_emb = modeling_minimax_m2.MiniMaxM2RotaryEmbedding(MiniMaxM2Config(**newer))
    with pytest.raises(RuntimeError, match="size of tensor"):
        tiny.logits([1, 2, 3])
    monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", modeling_minimax_m2.apply_rotary_pos_emb)
    assert_agrees(tiny)


def test_zamba2_holds_shared_blocks_once() -> None:
    """Three layers use two blocks by turns."""
    model = Runner(variant("zamba2", "plain")).worker.model
    uses = [layer.shared_transformer for layer in model.model.layers if layer.shared_transformer is not None]
    products = [use.self_attn.qkv for use in uses]
    assert [products.index(each) for each in products] == [0, 1, 0]
    assert sum(each.path.endswith("self_attn.qkv") for each in declared_weights(model)) == 2


def test_zamba2_reads_blocks_that_are_stored_again(tmp_path: Path) -> None:
    tiny = variant("zamba2", "plain")
    tensors = load_file(tiny.folder / "model.safetensors")
    again = {name.replace(".0.shared", ".3.shared"): t.clone() for name, t in tensors.items() if ".0.shared" in name}
    assert again
    save_file({**tensors, **again}, tmp_path / "model.safetensors")
    assert_agrees(replace(tiny, folder=tmp_path))


def test_rwkv7_reads_factors_that_are_stored_in_one(tmp_path: Path) -> None:
    tiny = variant("rwkv7", "plain")
    tensors = load_file(tiny.folder / "model.safetensors")
    for layer in range(3):
        apart = [tensors.pop(f"model.layers.{layer}.attn.x_{name}") for name in "rwkvag"]
        tensors[f"model.layers.{layer}.attn.x_x"] = torch.cat(apart)[:, 0]
    save_file(tensors, tmp_path / "model.safetensors")
    assert_agrees(replace(tiny, folder=tmp_path))


def test_nemotron_h_reads_nvidias_own_names(tmp_path: Path) -> None:
    tiny = variant("nemotron_h", "plain")
    tensors = {
        re.sub(r"^(model|backbone)\.", "backbone.", name): tensor
        for name, tensor in load_file(tiny.folder / "model.safetensors").items()
    }
    assert "backbone.embeddings.weight" in tensors and "backbone.layers.1.mixer.experts.0.up_proj.weight" in tensors
    save_file({**tensors, "mtp.layers.0.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert_agrees(replace(tiny, folder=tmp_path))


HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
WHOLE_HEADS = sorted({*FAMILIES} - {"gpt2", "opt", "phi3"})  # the others turn nothing, or a part


@pytest.mark.parametrize("family", WHOLE_HEADS)
def test_families_that_turn_whole_heads_ignore_a_partial_factor(family: str) -> None:
    kinds = {"full_attention": HALF, "sliding_attention": {**HALF, "rope_theta": 100.0}}
    rope = kinds if family.startswith("gemma3") else HALF
    tiny = make(family, {**next(iter(FAMILIES[family].values())), "rope_parameters": rope})
    assert "partial_rotary_factor" in json.dumps(tiny.config.rope_parameters)
    assert_agrees(tiny)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("gpt2", {"n_embd": 45, "n_head": 5}), ("opt", {"hidden_size": 45, "num_attention_heads": 5})],
)
def test_heads_may_be_odd_where_nothing_is_turned(family: str, sizes: dict[str, int]) -> None:
    assert_agrees(make(family, {**next(iter(FAMILIES[family].values())), **sizes}))


@pytest.mark.parametrize("factor", [0.5, 0.625])
def test_a_partial_factor_turns_a_part_where_the_family_knows_it(factor: float) -> None:
    """Of 8 features 4, or 5, which is rounded up."""
    rope = {**HALF, "partial_rotary_factor": factor}
    assert_agrees(make("phi3", {**FAMILIES["phi3"]["plain"], "rope_parameters": rope}))


def test_a_partial_factor_beside_a_scaling_is_refused_where_whole_heads_are_turned() -> None:
    """transformers then turns fewer features than its layers want turned, and fails."""
    tiny = make("llama", {**PLAIN, "rope_parameters": {**HALF, "rope_type": "linear", "factor": 2.0}})
    with pytest.raises(RuntimeError, match="size of tensor"):
        tiny.logits([1, 2, 3])
    with pytest.raises(ValueError, match=r"partial_rotary_factor is 0.5 beside rope_type 'linear', in a family that"):
        Worker(PLATFORM(), tiny.config, ModelSizes(torch.float32, 16, SERVED))


OLD_STYLE = {
    "linear": {"type": "linear", "factor": 2.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("kind", OLD_STYLE)
def test_old_style_rope_scaling(kind: str, tmp_path: Path) -> None:
    """config.json as it was written before transformers 5: rope_theta and rope_scaling beside each other."""
    tiny = make("llama", {**PLAIN, "rope_theta": 5000.0, "rope_scaling": OLD_STYLE[kind]})
    raw = json.loads((tiny.folder / "config.json").read_text())
    raw.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps({**raw, "rope_theta": 5000.0, "rope_scaling": OLD_STYLE[kind]}))
    assert_agrees(replace(tiny, config=AutoConfig.from_pretrained(tmp_path)))


@pytest.mark.parametrize(
    ("wrapper", "text", "wrapped", "sight"),
    [
        ("gemma3", "gemma3_text", "language_model.model.", "vision_tower.patch.weight"),
        ("gemma3", "gemma3_text", "model.language_model.", "vision_tower.patch.weight"),
        ("gemma3n", "gemma3n_text", "model.language_model.", "model.audio_tower.conv.weight"),
        ("gemma4", "gemma4_text", "model.language_model.", "model.vision_tower.patch_embedder.input_proj.weight"),
        ("gemma4_unified", "gemma4_unified_text", "model.language_model.", "model.embed_vision.norm.weight"),
        ("llama4", "llama4_text", "language_model.model.", "vision_model.patch.weight"),
        ("qwen3_5", "qwen3_5_text", "model.language_model.", "model.visual.patch_embed.proj.weight"),
        ("qwen3_5_moe", "qwen3_5_moe_text", "model.language_model.", "model.visual.patch_embed.proj.weight"),
    ],
)
def test_the_text_model_is_read_of_a_checkpoint_that_sees(
    wrapper: str, text: str, wrapped: str, sight: str, tmp_path: Path
) -> None:
    tiny = variant(text, "plain")
    tensors = load_file(tiny.folder / "model.safetensors")
    inner = {name.replace("model.", wrapped, 1): tensor for name, tensor in tensors.items()}
    save_file({**inner, sight: torch.ones(2)}, tmp_path / "model.safetensors")
    seeing = AutoConfig.for_model(wrapper, text_config=tiny.config.to_dict())
    assert_agrees(replace(tiny, folder=tmp_path, config=seeing.get_text_config()))


def test_falcon_adds_slopes_once() -> None:
    """As transformers' sdpa does; its eager attention, by which other references compute, adds them twice."""
    tiny = make("falcon", {**PLAIN, "hidden_size": 64, "num_attention_heads": 4, "alibi": True, "parallel_attn": False})
    tiny.reference.config._attn_implementation = "sdpa"
    assert_agrees(tiny)


def test_gpt_neox_reads_a_head_by_its_published_name(tmp_path: Path) -> None:
    tiny = variant("gpt_neox", "parallel")
    tensors = load_file(tiny.folder / "model.safetensors")
    save_file(
        {name.replace("lm_head.", "embed_out."): t for name, t in tensors.items()}, tmp_path / "model.safetensors"
    )
    assert_agrees(replace(tiny, folder=tmp_path))


@pytest.mark.parametrize("family", ["bloom", "gpt2", "opt"])
def test_first_checkpoints_without_prefix(family: str, tmp_path: Path) -> None:
    name, prefix = ("norm before", "model.") if family == "opt" else ("plain", "transformer.")
    tiny = variant(family, name)
    tensors = load_file(tiny.folder / "model.safetensors")
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if family == "gpt2":
        bare |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(bare, tmp_path / "model.safetensors")
    assert_agrees(replace(tiny, folder=tmp_path))


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("cohere2_moe", {"expert_selection_fn": "sparsemax"}, "by softmax or sigmoid"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "without parallel_attn"),
        ("gptj", {"rotary_dim": 5}, "rotary_dim=5"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi=False"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min=0.5"),
        ("phimoe", {"num_experts_per_tok": 3}, "chooses two experts"),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 3}, "attention within chunks of some tokens"),
        ("gemma3n_text", {"altup_active_idx": 4}, "altup_active_idx is 4, and there are 4 streams"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ("gemma4_text", {"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}, "layer 4 .* reads a full_att"),
        ("llama", {"hidden_act": "mish"}, "activation 'mish' is not known"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "^nemotron_h with mamba_hidden_act='gelu' is not supported"),
        ("zamba2", {"use_long_context": True}, "use_long_context"),
        ("afmoe", {"route_norm": False}, "route_norm=False"),
        ("afmoe", {"score_func": "softmax"}, "score_func='softmax'"),
        ("exaone_moe", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("hunyuan_v1_moe", {"num_shared_expert": [1, 2, 1]}, r"num_shared_expert=\[1, 2, 1\] is not supported; 1 is"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": 5}, "moe_intermediate_size=5"),
        ("hunyuan_v1_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("hunyuan_v1_moe", {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped=1"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": [50]}}, "chunk_size and local_size"),
        ("zamba2", {"tie_word_embeddings": False}, "transformers then shares no block"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ],
)
def test_what_is_not_computed_is_refused(family: str, settings: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model(family, **{**next(iter(EVERY[family].values())), **settings})
    with pytest.raises(ValueError, match=message):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, SERVED))


def test_layers_of_decoders_can_be_shared_out_to_stages() -> None:
    config = AutoConfig.for_model("llama", **next(iter(EVERY["llama"].values())))
    model = Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, SERVED)).main.model
    assert model.pipeline_trunk() is model.get_submodule("model")


def test_a_platform_without_chunks_refuses_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLATFORM, "optional_spec_fields", PLATFORM.optional_spec_fields - {"chunk"})
    chunked, plain = (
        AutoConfig.for_model(family, **next(iter(EVERY[family].values()))) for family in ("llama4_text", "llama")
    )
    with pytest.raises(ValueError, match="no attention within chunks, and layers of llama4_text see chunks of"):
        Worker(PLATFORM(), chunked, ModelSizes(torch.float32, 16, SERVED))
    Worker(PLATFORM(), plain, ModelSizes(torch.float32, 16, SERVED))


# entries of a config -> the longest requests in which they change nothing
SHORT: dict[str, tuple[dict[str, Any], int]] = {
    **dict.fromkeys(
        ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        ({"dual_chunk_attention_config": {"chunk_size": 50, "local_size": 10}}, 40),
    ),
}


@pytest.mark.parametrize("family", SHORT)
def test_what_changes_long_requests_alone_is_refused_with_the_length_that_is_served(family: str) -> None:
    settings, most = SHORT[family]
    config = AutoConfig.for_model(family, **{**next(iter(EVERY[family].values())), **settings})
    Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, most))
    with pytest.raises(ValueError, match=f"{family}.* set max_model_len to {most} or less, and not {most + 1}"):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, most + 1))


def test_phimoe_turns_and_scales_long_requests_by_the_long_factors() -> None:
    """transformers turns every request by the short ones, and scales by its length; here both go by max_model_len."""
    settings = FAMILIES["phimoe"]["longrope, biased"]
    rope = {**settings["rope_parameters"], "original_max_position_embeddings": 16}
    tiny = make("phimoe", {**settings, "rope_parameters": {**rope, "short_factor": rope["long_factor"]}})
    ours = replace(tiny, config=AutoConfig.for_model("phimoe", **{**settings, "rope_parameters": rope}))
    prompts = random_prompts(0, (20, 45), VOCAB)  # longer than the 16 tokens that it was trained for
    for prompt, logits in zip(prompts, Runner(ours).prompts(prompts), strict=True):
        assert_close(logits, tiny.logits(prompt))


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_end(family: str) -> None:
    config = next(iter(FAMILIES[family].values()))
    with pytest.raises(ValueError, match="max_model_len 257 exceeds the 256 positions"):
        Worker(PLATFORM(), AutoConfig.for_model(family, **config), ModelSizes(torch.float32, 16, LENGTH + 1))


@pytest.mark.parametrize("family", ["codegen", "gptj", "phi"])
def test_a_tied_head_has_a_bias_of_its_own(family: str) -> None:
    assert_agrees(make(family, {**KIN[family]["plain"], "tie_word_embeddings": True}))


def test_each_row_or_column_of_a_normalised_head_has_length_1() -> None:
    head = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(normalise_rows(head).norm(dim=1), torch.ones(7))
    torch.testing.assert_close(normalise_columns(head).norm(dim=0), torch.ones(5))
