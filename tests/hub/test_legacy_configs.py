"""config.json of types that transformers does not know, as published files have them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from quintet.config import EngineConfig
from quintet.config.cache_dir import cache_folder
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.engine.startup import prepare
from quintet.hub.config_checks import check_architectures
from quintet.hub.legacy_configs import LEGACY_ADAPTERS
from quintet.hub.resolve import load_model_config
from quintet.models import built_in, families, model_class
from quintet.platforms.cpu import PLATFORM
from quintet.quantize.calibrated import config_of
from quintet.quantize.checkpoint import SourceCheckpoint
from quintet_tools.checkpoints.custom_encoders import PUBLISHED_ENCODERS
from quintet_tools.checkpoints.custom_families import PUBLISHED as ALL_PUBLISHED
from quintet_tools.checkpoints.derived_families import BAICHUAN, CHATGLM, GROUPS, KIN, LING
from quintet_tools.checkpoints.hyper_families import TEXTS
from quintet_tools.checkpoints.tiny import PLAIN, configured, variant

PUBLISHED = [family for family in ALL_PUBLISHED if family not in TEXTS]  # of those transformers has a config


def test_what_is_read_can_be_built_and_is_compared() -> None:
    embedder = "llama_bidirec"  # compared in tests/e2e/pooling/test_decoders.py
    assert {*LEGACY_ADAPTERS} == {*PUBLISHED, *PUBLISHED_ENCODERS, embedder} <= {*families()}
    assert not {*LEGACY_ADAPTERS} & {*CONFIG_MAPPING}, "transformers has learned of one: compare with its class"


def test_reading_registers_nothing() -> None:
    before = {*CONFIG_MAPPING}
    configured("internlm2", KIN["internlm2"]["plain"])
    assert {*CONFIG_MAPPING} == before


DIVIDED = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_model_that_brings_python_loads_without_it(family: str) -> None:
    """auto_map names classes that are not there: nothing of it may be looked for."""
    tiny = variant(family, next(iter(KIN[family])))
    raw = json.loads((tiny.folder / "config.json").read_text())
    named = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    (tiny.folder / "config.json").write_text(json.dumps({**raw, "auto_map": named}))
    settings = EngineConfig(model=str(tiny.folder), device="cpu", skip_tokenizer_init=True, max_model_len=64)
    prepared = prepare(settings)
    assert model_class(prepared.hf_config).__module__ == f"quintet.models.{_file(family)}"


def _file(family: str) -> str:
    return str(built_in(family))


def test_a_reading_is_kept_until_the_way_of_reading_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "chatglm", **CHATGLM}))
    first, again = load_model_config(tmp_path), load_model_config(tmp_path)
    assert first == again and len(list(cache_folder("readings").iterdir())) == 1
    monkeypatch.setattr("quintet.hub.hf_config.version", lambda: b"another")
    assert load_model_config(tmp_path) == first and len(list(cache_folder("readings").iterdir())) == 2


def test_chatglm_is_read_in_the_words_of_glm() -> None:
    config = configured("chatglm", {**CHATGLM, "rope_ratio": 500})
    sizes = {name: getattr(config, name) for name in ("vocab_size", "num_hidden_layers", "num_key_value_heads")}
    assert sizes == {"vocab_size": 101, "num_hidden_layers": 3, "num_key_value_heads": 2}
    assert config.rope_parameters["rope_theta"] == 5e6 and config.rope_parameters["partial_rotary_factor"] == 0.5
    assert config.model_type == "chatglm" and config.attention_bias


@pytest.mark.parametrize(
    ("changes", "alibi", "normalised"),
    [
        ({"max_position_embeddings": 4096}, False, False),
        ({"max_position_embeddings": 4096, "model_max_length": 4096, "z_loss_weight": 0}, False, True),
        ({"model_max_length": 4096}, True, False),
        ({"model_max_length": 4096, "vocab_size": 125696}, True, True),
    ],
)
def test_baichuans_are_told_apart(changes: dict[str, Any], alibi: bool, normalised: bool) -> None:
    config = configured("baichuan", {**BAICHUAN, **changes})
    assert (config.alibi, config.normalised_head, config.max_position_embeddings) == (alibi, normalised, 4096)


def test_a_longer_baichuan_13b_keeps_its_slopes(tmp_path: Path) -> None:
    entries = {**BAICHUAN, "model_type": "baichuan", "hidden_size": 5120, "num_attention_heads": 40}
    (tmp_path / "config.json").write_text(json.dumps({**entries, "model_max_length": 4096}))
    assert load_model_config(tmp_path, {"max_position_embeddings": 8192}).alibi


def test_the_second_generation_of_ling_goes_by_the_type_of_the_first(tmp_path: Path) -> None:
    """What its class takes for what is not said is the second's."""
    entries = {"model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"], "use_qk_norm": True}
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, **LING, **GROUPS, **entries}))
    config = load_model_config(tmp_path)
    assert config.score_function == "sigmoid" and config.rope_parameters["partial_rotary_factor"] == 0.5
    assert model_class(config).__module__ == "quintet.models.bailing_moe"
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, **LING, "model_type": "bailing_moe"}))
    assert load_model_config(tmp_path).score_function == "softmax"


@pytest.mark.parametrize(
    ("rotary", "wanted"),
    [
        ({"base": 1000000, "type": "origin"}, {"rope_type": "default", "rope_theta": 1000000}),
        ({"base": 50000, "type": "dynamic"}, {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 50000}),
        (None, {"rope_type": "default", "rope_theta": 10000.0}),
    ],
)
def test_internlms_own_entry_for_positions_is_read(rotary: Any, wanted: dict[str, Any]) -> None:
    config = configured("internlm", {**KIN["internlm"]["plain"], "rotary": rotary})
    assert config.rope_parameters == wanted


@pytest.mark.parametrize("rotary", [{"type": "linear"}, [10000]])
def test_internlms_other_positions_are_refused(rotary: Any) -> None:
    with pytest.raises(ValueError, match="not an object whose type is origin or dynamic"):
        configured("internlm", {**KIN["internlm"]["plain"], "rotary": rotary})


def test_an_override_in_the_words_of_the_class_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "exaone", **KIN["exaone"]["plain"]}))
    assert load_model_config(tmp_path, {"num_hidden_layers": 2}).num_hidden_layers == 2
    assert load_model_config(tmp_path, {"num_layers": 1}).num_hidden_layers == 1


def test_chatglms_class_has_a_head_whatever_it_is_called() -> None:
    check_architectures("chatglm", ["ChatGLMModel"], "config.json")
    with pytest.raises(ValueError, match="ChatGLMForSequenceClassification"):
        check_architectures("chatglm", ["ChatGLMForSequenceClassification"], "config.json")
    with pytest.raises(ValueError, match="ChatGLMModel"):
        check_architectures("llama", ["ChatGLMModel"], "config.json")


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        ("chatglm", {**CHATGLM, "position_encoding_2d": True}, "position_encoding_2d"),
        ("chatglm", {**CHATGLM, "rmsnorm": False}, "rmsnorm=False"),
        ("chatglm", {**CHATGLM, "multi_query_attention": False}, "multi_query_attention=False"),
        ("chatglm", {**CHATGLM, "quantization_bit": 4}, "quantization_bit"),
        ("bailing_moe", {**KIN["bailing_moe"]["plain"], "use_bias": True}, "use_bias"),
        (
            "bailing_moe_v2",
            {**KIN["bailing_moe_v2"]["plain"], "moe_router_enable_expert_bias": False},
            "moe_router_enable_expert_bias=False",
        ),
        ("plamo2", {**KIN["plamo2"]["plain"], "use_predefined_initial_state": True}, "use_predefined_initial_state"),
        ("rwkv7", {**KIN["rwkv7"]["plain"], "intermediate_size": [77, 77, 77]}, "intermediate_size is a list"),
        ("rwkv7", {**KIN["rwkv7"]["plain"], "gate_low_rank_dim": [7]}, "gate_low_rank_dim is .*not a whole number"),
        ("plamo2", {**KIN["plamo2"]["plain"], "mamba_num_heads": -1}, "mamba_num_heads is -1, not a whole number"),
        ("solar", {**KIN["solar"]["plain"], "bskcn_tv": [0.9]}, "not two numbers"),
        ("solar", {**KIN["solar"]["plain"], "bskcn_1": []}, "mixes into layer 3 what no layer before it keeps"),
        ("solar", {**KIN["solar"]["plain"], "bskcn_3": [2]}, "keeps and mixes what goes into layer 2"),
        ("solar", {**KIN["solar"]["plain"], "bskcn_tv": [0.9, 0.0]}, "within 0, 1"),
        ("minicpm", {**DIVIDED, "dim_model_base": 0}, "is 0, and may not be: dim_model_base"),
        ("minicpm", {**DIVIDED, "dim_model_base": "x"}, "an entry has a wrong type"),
        ("minicpm", {"hidden_size": 32, "num_hidden_layers": 1}, "the entry 'num_attention_heads' is missing"),
        ("TeleFLM", {**DIVIDED, "use_mup": True, "output_mult": 0}, "is 0, and may not be: output_mult"),
        ("plamo3", {**DIVIDED, "sliding_window_pattern": 0}, "sliding_window_pattern is 0, not a whole number"),
        ("telechat3", {**DIVIDED, "rope_scaling": {"type": "telechat3-yarn"}}, "the entry 'factor' is missing"),
    ],
)
def test_what_is_not_computed_is_refused(family: str, entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **entries}))
    settings = EngineConfig(
        model=str(tmp_path), device="cpu", skip_tokenizer_init=True, load_format="dummy", max_model_len=64
    )
    with pytest.raises(ValueError, match=message):
        prepare(settings)


def test_plamo2s_layers_take_turns() -> None:
    """Attention stands in the middle of each `mamba_step`, or last where the model is shorter than half a step."""
    said = {**KIN["plamo2"]["plain"], "num_hidden_layers": 6, "mamba_step": 3, "full_attention_idx": [4]}
    kinds = configured("plamo2", said).layer_types
    assert [kind.partition("_")[0] for kind in kinds] == ["linear", "sliding", "linear", "linear", "full", "linear"]
    short = configured("plamo2", {**said, "num_hidden_layers": 2, "mamba_step": 4}).layer_types
    assert short == ["linear_attention", "sliding_attention"]
    assert "linear_attention" not in configured("plamo2", {**said, "mamba_enabled": False}).layer_types
    with pytest.raises(ValueError, match="mamba_step=1"):
        configured("plamo2", {**said, "mamba_step": 1})


def test_rwkv7s_ranks_follow_from_its_size_where_they_are_not_said() -> None:
    """As flash-linear-attention's layer rounds them: 2.5, 2.5, 1.7 and 5 times the root of 2048, by 32."""
    said = {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "head_dim": 64,
        "intermediate_size": None,
        "hidden_ratio": 4.0,
    }
    config = configured("rwkv7", said)
    ranks = [getattr(config, f"{name}_low_rank_dim") for name in ("decay", "a", "v", "gate")]
    assert ranks == [128, 128, 64, 224] and config.intermediate_size == 8192 and set(config.value_dim) == {2048}


@pytest.mark.parametrize(
    ("entries", "message"),
    [({"attn": {"layers": [1]}}, "attn="), ({"value_dim": [48, 96, 48]}, "values are as wide as keys")],
)
def test_what_rwkv7_does_not_compute_is_refused(entries: dict[str, Any], message: str) -> None:
    config = configured("rwkv7", {**KIN["rwkv7"]["plain"], **entries})
    with pytest.raises(ValueError, match=message):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, 64))


def test_there_is_no_model_to_calibrate_with() -> None:
    original = SourceCheckpoint.load(str(variant("exaone", "plain").folder))
    with pytest.raises(ValueError, match="there is none of type 'exaone'; use --method rtn"):
        config_of(original)
