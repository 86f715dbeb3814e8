"""config.json as transformers' classes read it, for every family, without importing transformers."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from quintet.conformance import tiny as models
from quintet.engine.hub import load_model_config
from quintet.engine.model_config import FAMILIES, ModelConfig, plain_config
from quintet.engine.model_defaults import DEFAULTS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}

# family, what its config.json says: the forms in which models lie on the hub, before transformers 5 and since
FILES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}}),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, "max_position_embeddings": 131072}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2}, "dtype": "bfloat16", "torch_dtype": "float32"}),
    ("llama", {"rope_scaling": None, "rope_theta": 10000, "partial_rotary_factor": 0.5, "pretraining_tp": 2}),
    ("llama", {"hidden_size": 2048, "num_attention_heads": 32, "head_dim": None, "eos_token_id": [1, 2]}),
    ("mistral", {"sliding_window": None, "rope_theta": 1e6, "max_position_embeddings": 32768}),
    ("mistral", {"head_dim": 128, "hidden_size": 5120, "torch_dtype": "bfloat16"}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 21, "rope_theta": 1e6}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}),
    ("qwen2", {"rope_scaling": {**YARN, "type": "yarn"}}),
    ("qwen3", {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}, "head_dim": 64}),
    ("qwen3", {"rope_scaling": YARN, "rope_theta": 1e6, "sliding_window": None, "quantization_config": {"bits": 4}}),
    ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 144, "cache_implementation": "hybrid"}),
    ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 512}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 3}),
    ("gpt2", {"n_ctx": 1024, "n_embd": 1280, "n_head": 20, "n_layer": 36, "task_specific_params": {"a": {"b": 1}}}),
    ("granite", {"embedding_multiplier": 12, "logits_scaling": 8.0, "rope_theta": 1e7, "rope_scaling": None}),
    ("olmo2", {"rope_theta": 500000, "rope_scaling": None, "num_key_value_heads": 8}),
    (
        "opt",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 512, "hidden_size": 1024, "num_attention_heads": 16},
    ),
    ("phi3", {"rope_scaling": {**LONG, "type": "longrope"}, "max_position_embeddings": 131072}),
    ("phi3", {"rope_parameters": {**LONG, "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    ("phi3", {"partial_rotary_factor": 0.75, "hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 1e4}),
    ("smollm3", {"rope_theta": 5e6, "no_rope_layer_interval": 3, "num_hidden_layers": 7, "use_sliding_window": False}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 8}),
]
BARE: list[tuple[str, dict[str, Any]]] = [(family, {}) for family in FAMILIES]
TINY = [(family, models.FAMILIES[family][name]) for family, name in models.VARIANTS if family in FAMILIES]
# Left over from what transformers takes for itself.
ASIDE = {"transformers_version", "cache_implementation", "use_cache", "architectures"}


def _same(ours: ModelConfig, theirs: Any, entries: dict[str, Any]) -> None:
    assert vars(ours).keys() >= {"dtype", *DEFAULTS[ours.model_type]}
    for name in vars(ours).keys() - ASIDE:
        assert getattr(ours, name) == getattr(theirs, name), name
        assert type(getattr(ours, name)) is type(getattr(theirs, name)), name
    taken = {"rope_scaling", "rope_theta", "rope_local_base_freq", "torch_dtype"}
    assert vars(ours).keys() >= entries.keys() - taken - {"partial_rotary_factor"}
    assert not vars(ours).keys() & taken


@pytest.mark.parametrize(("family", "entries"), [*FILES, *BARE, *TINY], ids=lambda value: str(value)[:40])
def test_a_file_reads_as_transformers_reads_it(family: str, entries: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **entries}))
    ours = load_model_config(tmp_path)
    assert type(ours) is ModelConfig
    _same(ours, AutoConfig.from_pretrained(tmp_path), entries)


@pytest.mark.parametrize(("family", "entries"), [*FILES, *BARE, *TINY], ids=lambda value: str(value)[:40])
def test_a_file_that_transformers_wrote_reads_the_same_again(
    family: str, entries: dict[str, Any], tmp_path: Path
) -> None:
    written = CONFIG_MAPPING[family](**json.loads(json.dumps(entries)))
    written.save_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    assert type(ours) is ModelConfig
    _same(ours, written, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers_classes(family: str) -> None:
    shared = {each.name for each in dataclasses.fields(PreTrainedConfig)}
    fields = {each.name: each.default for each in dataclasses.fields(CONFIG_MAPPING[family]) if each.name not in shared}
    assert fields == DEFAULTS[family]


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("mamba", {}),
        ("llama", {"hidden_size": "big"}),
        ("llama", {"hidden_size": 4096.0}),
        ("llama", {"vocab_size": None}),
        ("llama", {"hidden_size": 4095}),
        ("llama", {"dtype": "tensor"}),
        ("llama", {"rope_theta": None}),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}),
        ("llama", {"rope_scaling": {"rope_type": "spiral"}}),
        ("llama", {"rope_scaling": {"full_attention": {"rope_type": "default"}}}),
        ("llama", {"per_layer_config": {"0": {"head_dim": 8}}}),
        ("qwen3", {"layer_types": ["full_attention"]}),
        ("qwen3", {"num_hidden_layers": 1, "layer_types": ["attention"]}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gpt2", {"hidden_size": 12}),
        ("phi3", {"rope_scaling": {**LONG, "type": "su"}}),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}),
    ],
)
def test_what_is_not_plain_is_left_to_transformers(family: str, entries: dict[str, Any]) -> None:
    assert plain_config(family, {"model_type": family, **entries}) is None


def test_what_is_left_to_transformers_reads_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3_text", "use_bidirectional_attention": True})
    )
    assert load_model_config(tmp_path).sliding_window == 2049


def test_overrides_may_name_what_only_transformers_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    config = load_model_config(tmp_path, {"problem_type": "regression", "num_hidden_layers": 2})
    assert (config.problem_type, config.num_hidden_layers) == ("regression", 2)


def test_the_file_read_is_not_changed() -> None:
    raw = {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"}
    before = json.dumps(raw)
    assert plain_config("llama", raw) is not None
    assert json.dumps(raw) == before


def test_transformers_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    code = (
        "import sys, pathlib, quintet.engine.hub as hub\n"
        f"hub.load_model_config(pathlib.Path({str(tmp_path)!r}), {{'num_hidden_layers': 2}})\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
