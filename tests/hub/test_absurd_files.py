"""A model's files may say anything: what no model has is refused in one line, at once, before it is built."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quintet.api.explain import explain
from quintet.config import EngineConfig
from quintet.engine.engine import Engine
from quintet.engine.input_processor import InputProcessor, ModelLimits
from quintet.engine.startup import launch, prepare
from quintet_tools.checkpoints.tiny import FAMILIES, PLAIN, Tiny, make, variant

NESTED = "[" * 200_000 + "]" * 200_000
DEEP = "[" * 500 + "]" * 500  # json reads it, and what walks it by recursion might not
SECONDS = 1.0  # of processor time, which other jobs do not add to


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model, whose files each test changes."""
    return copied(make("llama", {**PLAIN, "intermediate_size": 96}), tmp_path)  # sizes that formats can cut


def copied(tiny: Tiny, folder: Path) -> Path:
    return Path(shutil.copytree(tiny.folder, folder / "model"))


def edit(file: Path, **entries: Any) -> None:
    """Text stands in the file as it is: numbers that JSON's own writer would not write."""
    said = json.loads(file.read_text()) if file.exists() else {}
    texts = {name: value.json if isinstance(value, Raw) else json.dumps(value) for name, value in entries.items()}
    kept = {name: json.dumps(value) for name, value in said.items() if name not in entries}
    file.write_text("{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in {**kept, **texts}.items()) + "}")


class Raw:
    """A value as it stands in the file."""

    def __init__(self, json: str) -> None:
        self.json = json

    def __repr__(self) -> str:
        return self.json[:20]


def start(folder: Path, **settings: Any) -> Engine:
    return launch(prepare(EngineConfig(model=folder, device="cpu", **settings)), progress=False)


def refusal(folder: Path, **settings: Any) -> str:
    """What is said at once, in one line, instead of a start."""
    return refusal_of(lambda: start(folder, **settings))


def refusal_of(what: Callable[[], Any]) -> str:
    began = time.process_time()
    with pytest.raises((ValueError, OSError)) as error:
        what()
    took, said = time.process_time() - began, str(error.value)
    assert len(said.splitlines()) == 1 and len(said) < 1000, said
    assert took < SECONDS, said
    return said


# ------------------------------------------------------------------------------------------------------ config.json

LAYERS, HEADS, KV = "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
SCALED = {"rope_type": "linear", "rope_theta": 1e4}
CONFIG: list[tuple[dict[str, Any], str]] = [
    *[
        ({LAYERS: value}, "not a whole number from 1 to 4096")
        for value in (10**9, 10**5, 2**70, 0, -1, "3", 3.5, True, [3])
    ],
    *[({HEADS: value}, "not a whole number from 1") for value in (0, -6, 10**9, "six")],
    *[({KV: value}, "not a whole number from 1") for value in (0, -2, 2**70)],
    *[({"hidden_size": value}, "not a whole number from 1") for value in (0, -48, 2**40, [48], {"a": 1})],
    *[({"head_dim": value}, "not a whole number from 1") for value in (0, -8, 2**40)],
    *[({"vocab_size": value}, "not a whole number from 1") for value in (0, -1, 2**70, Raw("Infinity"), Raw("NaN"))],
    *[({"intermediate_size": value}, "not a whole number from 1") for value in (0, Raw("1e400"), "wide")],
    *[({"max_position_embeddings": value}, "not a whole number from 1") for value in (0, -1, 2**31, Raw("1e30"))],
    *[({"rms_norm_eps": value}, "not a number from 0 to 1") for value in (-1, Raw("NaN"), "1e-6", Raw("Infinity"))],
    *[({"rope_theta": value}, "not a number from 0.001") for value in (0, -1e4, Raw("Infinity"), "x")],
    ({"architectures": "LlamaForCausalLM"}, "not a list of names"),
    ({"architectures": [5]}, "not a list of names"),
]


@pytest.mark.parametrize(("entries", "says"), CONFIG, ids=lambda value: str(value)[:50])
def test_no_number_of_a_config_costs_anything(entries: dict[str, Any], says: str, folder: Path) -> None:
    edit(folder / "config.json", **entries)
    why = refusal(folder)
    assert (
        str(folder / "config.json") in why
        and f"{next(iter(entries))} is " in why
        and says in why
        and "; correct it, or fetch the model anew" in why
    )


ROPE: list[tuple[dict[str, Any], str]] = [
    *[({**SCALED, "factor": each}, "factor is ") for each in (0, -1, 1e308, Raw("Infinity"), "two")],
    (SCALED, "factor"),
    (
        {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0, "original_max_position_embeddings": 64},
        "cannot be computed",
    ),
    ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}, "low_freq_factor"),
    ({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}, "long"),
    ({"rope_type": "spiral", "rope_theta": 1e4}, "spiral"),
    ({"rope_type": ["linear"], "rope_theta": 1e4}, "rope_parameters.rope_type is ['linear'], not text"),
    ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": -0.5}, "partial_rotary_factor is -0.5"),
]


@pytest.mark.parametrize(("rope", "says"), ROPE, ids=lambda value: str(value)[:60])
def test_rotary_parameters_that_make_no_angles(rope: dict[str, Any], says: str, folder: Path) -> None:
    inner = ", ".join(f'"{k}": {v.json if isinstance(v, Raw) else json.dumps(v)}' for k, v in rope.items())
    edit(folder / "config.json", rope_parameters=Raw("{" + inner + "}"))
    assert says in refusal(folder)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("gpt2", "n_layer", 10**9),
        ("gpt2", "n_head", 0),
        ("gpt2", "n_positions", -1),
        ("opt", "ffn_dim", 0),
        ("qwen3", LAYERS, 10**9),
        ("qwen3_moe", "num_experts", 10**9),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "mlp_only_layers", 5),
        ("mixtral", "num_local_experts", -1),
        ("smollm3", "no_rope_layers", "none"),
        ("gemma2", "final_logit_softcapping", 0),
        ("gemma2", "query_pre_attn_scalar", 0),
        ("granite", "logits_scaling", 0),
        ("mistral", "sliding_window", 0),
    ],
)
def test_every_familys_own_numbers(family: str, name: str, value: Any, tmp_path: Path) -> None:
    folder = copied(variant(family, next(iter(FAMILIES[family]))), tmp_path)
    edit(folder / "config.json", **{name: value})
    why = refusal(folder)
    assert "config.json" in why and f"{name} is {value!r}" in why


def test_a_mixture_of_none(tmp_path: Path) -> None:
    folder = copied(variant("mixtral", "plain"), tmp_path)
    edit(folder / "config.json", num_local_experts=0)
    assert "a mixture of 0 experts" in refusal(folder)


def test_a_list_that_leaves_layers_out(tmp_path: Path) -> None:
    folder = copied(variant("smollm3", "plain"), tmp_path)
    edit(folder / "config.json", no_rope_layers=[1])
    assert "config.json: no_rope_layers names 1 of 3 layers (num_hidden_layers)" in refusal(folder)


def test_overrides_are_held_to_the_same(folder: Path) -> None:
    assert "hf_overrides: num_hidden_layers is 1000000000, not a whole number" in refusal(
        folder, hf_overrides={LAYERS: 10**9}
    )


@pytest.mark.parametrize(("name", "family"), [(LAYERS, "llama"), ("num_local_experts", "mixtral")])
def test_layers_that_the_files_do_not_hold(name: str, family: str, tmp_path: Path) -> None:
    """Seen before a model of them is built."""
    folder = copied(variant(family, "plain"), tmp_path)
    there = json.loads((folder / "config.json").read_text())[name]
    edit(folder / "config.json", **{name: 4000})
    assert f"config.json: {name} is 4000, and the weights there are of {there}; fetch the rest" in refusal(folder)


def test_numbers_that_do_not_go_together(folder: Path) -> None:
    edit(folder / "config.json", num_key_value_heads=4)
    assert "num_attention_heads is 6, no multiple of num_key_value_heads, 4" in refusal(folder)
    edit(folder / "config.json", num_key_value_heads=3, head_dim=7)
    why = refusal(folder)
    assert "head_dim" in why and "even" in why  # transformers' own
    edit(folder / "config.json", head_dim=3)
    why = refusal(folder)
    assert "3 features of each head are turned (head_dim 3" in why and "turn pairs; correct head_dim" in why


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", [NESTED, DEEP])
def test_lists_in_lists(name: str, text: str, folder: Path) -> None:
    said = (folder / name).read_text() if (folder / name).exists() else '{"a": 1}'
    (folder / name).write_text(said.strip()[:-1] + f', "deep": {text}' + "}")
    assert f"{folder / name} nests lists or objects more than 64 deep" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("text", "says"), [("{", "is not JSON"), ("7", "must hold a JSON object"), ("9" * 5000, "is not JSON")]
)
def test_what_is_no_object(name: str, text: str, says: str, folder: Path) -> None:
    (folder / name).write_text(text)
    assert f"{folder / name} {says}" in refusal(folder)


# ---------------------------------------------------------------------------------------------- generation_config.json

GENERATION: list[tuple[dict[str, Any], str]] = [
    *[
        ({"eos_token_id": value}, "not a token id from 0 to 2147483647 or a list")
        for value in (["a"], [1, "a"], -1, 2**70)
    ],
    *[
        ({"eos_token_id": value}, "not a token id from 0 to 2147483647 or a list")
        for value in ("2", True, 1.5, [[2]], {})
    ],
    ({"temperature": "x"}, "must be a number from 0"),
    ({"temperature": Raw("NaN")}, "must be a number from 0"),
    ({"top_k": 2**70}, "must be from -1 to 2147483647"),
    ({"top_k": 1.5}, "must be a whole number"),
    ({"top_p": -1}, "must be a number over 0"),
    ({"min_p": [0.1]}, "must be a number from 0"),
    ({"repetition_penalty": Raw("Infinity")}, "must be a number from"),
    ({"max_new_tokens": 0}, "must be from 1"),
]


@pytest.mark.parametrize(("entries", "says"), GENERATION, ids=lambda value: str(value)[:50])
def test_defaults_that_no_request_could_be_served_with(entries: dict[str, Any], says: str, folder: Path) -> None:
    edit(folder / "generation_config.json", **entries)
    name = next(iter(entries)).replace("max_new_tokens", "max_tokens")
    why = refusal(folder)
    assert f"{folder / 'generation_config.json'}: {name} " in why and says in why and "correct it, or " in why


def test_overrides_of_defaults_are_held_to_the_same(folder: Path) -> None:
    assert "override_generation_config: top_k must be a whole number" in refusal(
        folder, override_generation_config={"top_k": "many"}
    )


def test_an_override_mends_a_default(folder: Path) -> None:
    edit(folder / "generation_config.json", temperature="x")
    assert "temperature must be a number" in refusal(folder)
    settings = {"model": folder, "device": "cpu"}
    assert (
        prepare(EngineConfig(**settings, override_generation_config={"temperature": 0.5})).generation["temperature"]
        == 0.5
    )
    assert "temperature" not in prepare(EngineConfig(**settings, generation_config="quintet")).generation


def test_no_text_ends_by_a_token_that_the_model_does_not_have(caplog: pytest.LogCaptureFixture) -> None:
    """min_tokens would look its logit up."""
    assert InputProcessor(ModelLimits(101, 64, 0), None, frozenset({2, 101, 5000}), 0).eos_ids == {2}
    assert "no text ends by the tokens [101, 5000]: the model has 101" in caplog.text


# ------------------------------------------------------------------------------------------------ the index of weights


def indexed(folder: Path, name: Any) -> None:
    where = dict.fromkeys(load_file(folder / "model.safetensors"), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize(
    "name",
    [
        5,
        None,
        ["model.safetensors"],
        {},
        "../outside/model.safetensors",
        "/etc/passwd",
        "a/../../b.safetensors",
        "",
        "\0",
    ],
    ids=repr,
)
def test_an_index_names_files_of_its_folder(name: Any, folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "outside")
    indexed(folder, name)
    why = refusal(folder)
    assert (
        f"{folder / 'model.safetensors.index.json'}: weight_map says" in why and "which is no file of its folder" in why
    )


def test_an_index_without_a_map(folder: Path) -> None:
    for said in ({}, {"weight_map": [1]}, {"weight_map": "model.safetensors"}, {"weight_map": {}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(said))
        assert "is not an index of safetensors files: it has no weight_map" in refusal(folder)


@pytest.mark.parametrize("by_index", [True, False])
def test_a_pipe_is_not_waited_for(by_index: bool, folder: Path) -> None:
    if by_index:
        indexed(folder, "pipe.safetensors")
        os.mkfifo(folder / "pipe.safetensors")
    else:
        (folder / "model.safetensors").unlink()
        os.mkfifo(folder / "model.safetensors")
    assert ".safetensors is no regular file" in refusal(folder)


def test_a_link_may_lead_out_as_in_the_hubs_cache(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to(folder.parent / "blob")
    indexed_by = dict.fromkeys(load_file(folder.parent / "blob"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": indexed_by}))
    assert not start(folder).busy


# --------------------------------------------------------------------------------------------------------- the weights

PROJECTION = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool], ids=str
)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "awq"])
@pytest.mark.parametrize("name", [PROJECTION, "model.norm.weight"])
def test_whole_numbers_are_not_taken_for_floats(name: str, quantized: bool, dtype: torch.dtype, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.ones(tensors[name].shape).to(dtype)}, folder / "model.safetensors")
    left = {"quant_method": "awq", "bits": 4, "group_size": 16, "modules_to_not_convert": ["self_attn", "mlp"]}
    edit(folder / "config.json", quantization_config=left if quantized else None)
    why = refusal(folder)
    assert f"{name} is of " in why and "not of floats; fetch the model anew, or its original" in why


@pytest.mark.parametrize("name", ["\n", "a\x1b[2J", "a" * 401], ids=ascii)
def test_names_of_tensors_are_words(name: str, folder: Path) -> None:
    """They would stand in errors and logs."""
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.ones(2)}, folder / "model.safetensors")
    assert f"model.safetensors holds a tensor called {name[:64]!r}, which no model has" in refusal(folder)


METHODS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size 'x'"),
    ({"quant_method": "eetq"}, "quantized by eetq, which"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "is sparse (marlin-24)"),
    ({"quant_method": ["awq"]}, "quantized by ['awq'], which"),
    ({"quant_method": "fp8", "weight_block_size": [2**70, 2**70]}, "weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": [0, 0]}, "weight_block_size [0, 0] is not of 16"),
    ({"quant_method": "awq", "bits": "x"}, "AWQ with 'x' bits"),
    ({"quant_method": "awq", "bits": 4, "group_size": "x"}, "group_size 'x'"),
    ({"quant_method": "awq", "bits": 4, "group_size": 16, "modules_to_not_convert": 5}, "leaves out 5, which is no"),
]


@pytest.mark.parametrize(("said", "says"), METHODS, ids=str)
def test_what_is_not_read_is_refused_by_name_also_in_explain(said: dict[str, Any], says: str, folder: Path) -> None:
    edit(folder / "config.json", quantization_config=said)
    why = refusal_of(lambda: explain(EngineConfig(model=folder, device="cpu")))
    assert says in why


@pytest.mark.parametrize("said", [5, "awq", [1]])
def test_a_quantization_config_is_an_object(said: Any, folder: Path) -> None:
    edit(folder / "config.json", quantization_config=said)
    assert f"quantization_config is {said!r}, not an object" in refusal(folder)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 16},
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        {"quant_method": "gptq", "bits": 4, "group_size": 16},
        {"quant_method": "auto-round", "bits": 4, "group_size": 16, "packing_format": "auto_round"},
    ],
    ids=["awq", "fp8", "gptq", "auto-round"],
)
def test_floats_that_are_said_to_be_quantized(said: dict[str, Any], folder: Path) -> None:
    edit(folder / "config.json", quantization_config=said)
    why = refusal(folder)
    assert "proj.weight in floats, and the quantization_config" in why and "set that to null with hf_overrides" in why
    assert not start(folder, hf_overrides={"quantization_config": None}).busy


@pytest.mark.parametrize("ends", [["qweight", "qzeros", "scales"], ["weight", "weight_scale_inv"], ["weight", "SCB"]])
def test_quantized_tensors_that_no_config_speaks_of(ends: list[str], folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    weight, stem = tensors.pop(PROJECTION), PROJECTION.removesuffix("weight")
    save_file({**tensors, **{f"{stem}{end}": weight.clone() for end in ends}}, folder / "model.safetensors")
    why = refusal(folder)
    assert f"holds {stem}" in why and "as quantized checkpoints do" in why and "use the model's original" in why


# ------------------------------------------------------------------------------------------------- the kind of a model


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["LlamaForSequenceClassification"], "'LlamaForSequenceClassification', which is no class that generates text"),
        (["LlamaModel"], "'LlamaModel', which is no class that generates text"),
        (["MambaForCausalLM"], "'MambaForCausalLM', which is another model than its model_type, 'llama'"),
        (["MistralForCausalLM", "LlamaForTokenClassification"], "'MistralForCausalLM', 'LlamaForToken"),
    ],
)
def test_architectures_count(names: list[str], says: str, folder: Path) -> None:
    edit(folder / "config.json", architectures=names)
    why = refusal(folder, runner="generate")  # a class without a head for text is run for numbers, if nobody asks
    assert f"{folder / 'config.json'}: architectures is {says}" in why and "hf_overrides" in why
    assert not start(folder, hf_overrides={"architectures": None}).busy


@pytest.mark.parametrize("names", [None, [], ["LLaMAForCausalLM"], ["LlamaForTokenClassification", "LlamaForCausalLM"]])
def test_architectures_that_say_nothing_else(names: list[str] | None, folder: Path) -> None:
    edit(folder / "config.json", architectures=names)
    assert prepare(EngineConfig(model=folder, device="cpu")).hf_config.model_type == "llama"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_a_families_own(family: str) -> None:
    tiny = variant(family, next(iter(FAMILIES[family])))
    assert prepare(EngineConfig(model=tiny.folder, device="cpu")).hf_config.architectures == tiny.config.architectures
