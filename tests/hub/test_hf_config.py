"""config.json as transformers' classes read it, for every family they know, and kept from one start to the next."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, PreTrainedConfig

import quintet.models
from quintet.config import EngineConfig
from quintet.config.cache_dir import cache_folder
from quintet.engine.executor.worker import Worker
from quintet.engine.startup import launch, prepare
from quintet.hub.hf_config import EQUIVALENT_TYPES, HFConfig, freeze, read_config, thaw
from quintet.hub.legacy_configs import LEGACY_ADAPTERS
from quintet.hub.resolve import load_model_config
from quintet.models import families
from quintet.ops.activation import UnknownActivation
from quintet_tools.checkpoints import tiny as models

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
# heads do not divide the default hidden size of the first three; of the rest, transformers has no class
ODD = {"glm4_moe", "glm4v_moe_text", "qwen3_omni_moe_text", *EQUIVALENT_TYPES, *LEGACY_ADAPTERS}
BARE: list[tuple[str, dict[str, Any]]] = [(family, {}) for family in sorted({*families()} - ODD)]
TINY = [
    (family, each) for family, found in models.EVERY.items() if family not in LEGACY_ADAPTERS for each in found.values()
]
PER_LAYER = "allow_global_per_layer_attribute_access"
# Of the installation; an object of transformers' own, plain in the file; and the text, which is compared by itself.
ASIDE = {"transformers_version", "_name_or_path", "per_layer_config", "text_config", PER_LAYER}
# Their bare configs are refused by transformers itself, or have two texts and no way to choose.
BARELY = {"gemma4_assistant", "nougat", "musicgen", "musicgen_melody"}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def assert_same(ours: HFConfig, theirs: PreTrainedConfig) -> None:
    """Every entry under every name it has, with its type, and the parts of a wrapper alike."""
    names = {*theirs.to_dict(), *vars(ours), *theirs.attribute_map} - ASIDE
    setattr(theirs, PER_LAYER, True)  # or it refuses to name what differs between layers
    for name in filter(partial(hasattr, theirs), names):
        got, want = getattr(ours, name), getattr(theirs, name)
        if isinstance(want, PreTrainedConfig):
            assert_same(got, want)
        else:
            want = type(theirs).model_type if name == "model_type" else want  # a part may be given another's
            got, want = _lists(got), _lists(want)
            assert (got, type(got)) == (want, type(want)), name
    text = theirs.get_text_config()
    if text is theirs:
        assert ours.get_text_config() is ours
    else:
        assert_same(ours.get_text_config(), text)


def _lists(value: Any) -> Any:
    """JSON has no tuples."""
    if isinstance(value, dict):
        return {key: _lists(each) for key, each in value.items()}
    return [_lists(each) for each in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize(("family", "entries"), [*FILES, *BARE, *TINY], ids=lambda value: str(value)[:40])
def test_a_file_reads_as_transformers_reads_it(family: str, entries: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **entries}))
    first, again = load_model_config(tmp_path), load_model_config(tmp_path)
    assert_same(first, AutoConfig.from_pretrained(tmp_path))
    assert first == again and list(_readings()) != []


def _readings() -> list[Path]:
    return sorted(cache_folder("readings").iterdir())


@pytest.mark.slow
def test_every_family_that_transformers_knows_is_read() -> None:
    for kind in sorted({*CONFIG_MAPPING} - BARELY):
        theirs = CONFIG_MAPPING[kind](model_type=kind)
        assert_same(thaw(json.loads(json.dumps(freeze(theirs)))), theirs)


def test_what_a_class_computes_is_read() -> None:
    jamba = thaw(freeze(CONFIG_MAPPING["jamba"](num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1)))
    assert jamba.layers_block_type == ["mamba", "attention"] * 2


def test_a_wrapper_gives_its_text_by_any_name() -> None:
    gemma = thaw(freeze(CONFIG_MAPPING["gemma3"]()))
    assert gemma.get_text_config() is gemma.text_config and gemma.text_config.model_type == "gemma3_text"
    rag = thaw(freeze(CONFIG_MAPPING["rag"](question_encoder={"model_type": "bert"}, generator={"model_type": "gpt2"})))
    assert rag.get_text_config().model_type == "gpt2" and rag.get_text_config().hidden_size == 768


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("llama", {"tie_word_embeddings": "big"}),
        ("llama", {"hidden_size": 4095}),
        ("llama", {"dtype": "tensor"}),
        ("llama", {"dtype": "float99"}),
        ("qwen3", {"layer_types": ["full_attention"]}),
    ],
)
def test_what_transformers_refuses_is_refused_each_time(family: str, entries: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **entries}))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"is no valid {family} config: "):
            load_model_config(tmp_path)
    assert not cache_folder("readings").exists()


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("exaone4", {"sliding_window_pattern": "LLLG", "layer_types": ["full_attention"] * 4}),
        ("exaone_moe", {"sliding_window_pattern": "LLLG", "layer_types": ["full_attention"] * 4}),
        ("hunyuan_v1_moe", {"moe_intermediate_size": [3072] * 4, "num_shared_expert": [1] * 4, "moe_topk": [1] * 4}),
        ("llama4_text", {"attn_temperature_tuning": 4, "no_rope_layers": []}),
        ("llama4", {"text_config": {"model_type": "llama4_text", "attn_temperature_tuning": 4}}),
    ],
)
def test_published_files_say_some_entries_otherwise(family: str, entries: dict[str, Any], tmp_path: Path) -> None:
    """Letters for a number, a list with a number for each layer, a number for a switch."""
    said = entries if family == "llama4" else {"num_hidden_layers": 4, **entries}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **said}))
    text = load_model_config(tmp_path).get_text_config()
    assert getattr(text, "attn_temperature_tuning", True) is True


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        ("hunyuan_v1_moe", {"num_hidden_layers": 4, "moe_topk": [1, 1]}, "moe_topk names 2 of 4 layers"),
        ("zamba2", {"mamba_ngroups": -1}, "mamba_ngroups is -1, not a whole number"),
        ("zamba2", {"hybrid_layer_ids": 3}, "hybrid_layer_ids is 3, not a list"),
        ("exaone4", {"sliding_window_pattern": "LLX"}, "sliding_window_pattern is 'LLX', not a whole number"),
    ],
)
def test_entries_that_no_model_has_are_named(
    family: str, entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **entries}))
    with pytest.raises(ValueError, match=message):
        load_model_config(tmp_path)


def test_a_family_without_a_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no config for model type 'sextet', and no package adds .*; give the"):
        read_config("sextet", {}, tmp_path / "config.json")


def test_a_model_that_a_package_adds_brings_its_config_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SextetConfig(PreTrainedConfig):
        model_type = "sextet"
        voices: int = 6

    class SextetForCausalLM:
        config_class: Any = SextetConfig

    monkeypatch.setattr(quintet.models, "_REGISTERED", {"sextet": SextetForCausalLM})
    entries = {"model_type": "sextet", "voices": 7, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    config = load_model_config(tmp_path)
    assert (config.model_type, config.voices, config.vocab_size) == ("sextet", 7, 50)
    assert load_model_config(tmp_path, {"voices": 8}).voices == 8
    monkeypatch.setattr(quintet.models, "_REGISTERED", {"SextetForCausalLM": SextetForCausalLM})
    (tmp_path / "config.json").write_text(json.dumps({**entries, "architectures": ["SextetForCausalLM"]}))
    assert load_model_config(tmp_path).voices == 7


@pytest.mark.parametrize(
    ("config_class", "message"),
    [
        (None, "and OctetForCausalLM has no config_class; give the model class .* model_type = 'octet'"),
        (dict, "OctetForCausalLM.config_class is <class 'dict'>, no subclass of PretrainedConfig"),
        (LlamaConfig, "LlamaConfig.model_type is 'llama', not 'octet'"),
    ],
)
def test_a_config_class_that_cannot_be_used_is_named(
    config_class: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = type("OctetForCausalLM", (), {} if config_class is None else {"config_class": config_class})
    monkeypatch.setattr(quintet.models, "_REGISTERED", {"octet": model})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "octet"}))
    with pytest.raises(ValueError, match=message):
        load_model_config(tmp_path)


def test_the_class_of_another_package_is_asked_each_time(tmp_path: Path) -> None:
    class Sextet(PreTrainedConfig):
        model_type = "sextet"
        voices: int = 6

    AutoConfig.register("sextet", Sextet)
    try:
        assert read_config("sextet", {}, tmp_path / "config.json").voices == 6
        Sextet.voices = 7
        assert not cache_folder("readings").exists()
    finally:
        CONFIG_MAPPING._extra_content.pop("sextet")


def test_overrides_may_name_what_no_model_here_asks_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    config = load_model_config(tmp_path, {"problem_type": "regression", "num_hidden_layers": 2})
    assert (config.problem_type, config.num_hidden_layers) == ("regression", 2)


def test_the_file_read_is_not_changed(tmp_path: Path) -> None:
    raw = {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"}
    before = json.dumps(raw)
    assert read_config("llama", raw, tmp_path).rope_parameters["factor"] == 2.0
    assert json.dumps(raw) == before


@pytest.mark.slow
def test_the_second_start_does_not_import_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    code = (
        "import sys, pathlib, quintet.hub.resolve as hub\n"
        f"hub.load_model_config(pathlib.Path({str(tmp_path)!r}), {{'num_hidden_layers': 2}})\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert [subprocess.run([sys.executable, "-c", code]).returncode for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("stage", ["prepare", "launch"])
def test_an_activation_that_nothing_computes_is_said_with_its_model(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a platform compiles, a layer may find out only then."""
    asked: dict[str, Any] = {"hf_overrides": {"hidden_act": "swoosh"}} if stage == "prepare" else {}
    config = EngineConfig(device="null", load_format="dummy", **asked)

    def load(*_: object) -> None:
        raise UnknownActivation("swoosh", ["silu"])

    monkeypatch.setattr(Worker, "load", load)
    with pytest.raises(ValueError, match=r"^the model 'bundled' cannot run here: activation 'swoosh' is not known; .*"):
        launch(prepare(config))
