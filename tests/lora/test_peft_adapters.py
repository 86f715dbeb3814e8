"""Adapters that PEFT writes: what is read of each sort is what PEFT computes with."""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from quintet.lora.adapter import LoRAAdapter, LoRABounds, adapter_digest, read_adapter, write_adapter
from tests.helpers.checkpoints.lora import causal_lm, randomize, sequence_classifier

BOUNDS = LoRABounds(max_rank=64)
QUERY = "model.layers.1.self_attn.q_proj"


def adapted(**settings: Any) -> PeftModel:
    """A tiny Llama with random LoRA weights."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **settings}
    return randomize(get_peft_model(causal_lm(), LoraConfig(**settings)))


def save(model: PeftModel, folder: Path) -> LoRAAdapter:
    model.save_pretrained(folder)
    return read_adapter(folder, BOUNDS)


def delta(adapter: LoRAAdapter, path: str) -> Tensor:
    weights = adapter.modules[path]
    change = weights.scaling * weights.lora_b @ weights.lora_a
    return change.T if weights.embedding else change


def check_deltas(model: PeftModel, adapter: LoRAAdapter) -> None:
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert set(layers) == set(adapter.modules)
    for path, layer in layers.items():
        torch.testing.assert_close(delta(adapter, path), layer.get_delta_weight("default"))


SORTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {r"layers\.0\..*": 2, "q_proj": 8},
        "alpha_pattern": {"(?:model.)?layers.1.+(?:self_attn|mlp).q_proj": 3, "^model.*.(down|q)_proj": 5},
    },
    "patterns and rslora": {"use_rslora": True, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"down_proj": 7}},
    "layers": {"layers_to_transform": [1]},
    "regex targets": {"target_modules": r".*\.1\.(self_attn|mlp)\.(v|up)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "excluded": {"exclude_modules": ["down_proj"]},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "embedding dora": {"target_modules": ["embed_tokens"], "use_dora": True},
    "head": {"target_modules": ["lm_head"]},
    "lora bias": {"lora_bias": True},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "fan in": {"fan_in_fan_out": True},
}


def mixtral() -> MixtralForCausalLM:
    """Random weights; each layer has stacks of three experts."""
    torch.manual_seed(1)
    config = MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


STACKS: dict[str, dict[str, Any]] = {
    "both": {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"]},
    "one": {"target_parameters": ["mlp.experts.down_proj"], "use_rslora": True},
    "of one layer": {"target_parameters": ["1.mlp.experts.gate_up_proj"], "target_modules": ["q_proj"]},
    "patterns": {
        "target_parameters": ["gate_up_proj", "down_proj"],
        "rank_pattern": {r".*\.gate_up_proj": 8},
        "alpha_pattern": {"experts.down_proj": 3},
    },
    "a router": {"target_parameters": ["mlp.gate.weight", "experts.gate_up_proj"]},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("sort", STACKS)
def test_the_change_of_each_stack_is_pefts(sort: str, tmp_path: Path) -> None:
    settings = {"r": 4, "lora_alpha": 6, "target_modules": [], **STACKS[sort]}
    save(randomize(get_peft_model(mixtral(), LoraConfig(**settings))), tmp_path)
    adapter, model = read_adapter(tmp_path, BOUNDS), PeftModel.from_pretrained(mixtral(), tmp_path)
    wanted = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            path, last = name.removeprefix("base_model.model."), getattr(module, "parameter_name", "weight")
            path = path.replace(".base_layer", "")
            wanted[path if last == "weight" else f"{path}.{last}"] = module.get_delta_weight("default")
    assert set(wanted) == set(adapter.modules)
    for path, change in wanted.items():
        torch.testing.assert_close(delta(adapter, path), change)
    assert adapter.rank == max(settings.get("rank_pattern", {"": 4}).values())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("sort", SORTS)
def test_the_change_of_each_module_is_pefts(sort: str, tmp_path: Path) -> None:
    adapter = save(adapted(**SORTS[sort]), tmp_path)
    check_deltas(PeftModel.from_pretrained(causal_lm(), tmp_path), adapter)  # PEFT sorts the patterns as it saves them
    assert adapter.rank == max(weights.rank for weights in adapter.modules.values())
    assert adapter.digest == adapter_digest(tmp_path) and len(adapter.digest) == 16
    assert adapter.nbytes == sum(tensor.nbytes for tensor in load_file(tmp_path / "adapter_model.safetensors").values())


def test_scalings_are_alpha_by_rank(tmp_path: Path) -> None:
    adapter = save(adapted(**SORTS["patterns"]), tmp_path)
    scalings = {path: (weights.rank, weights.scaling) for path, weights in adapter.modules.items()}
    assert scalings == {
        "model.layers.0.self_attn.q_proj": (2, 5 / 2), "model.layers.0.mlp.down_proj": (2, 5 / 2),
        "model.layers.1.self_attn.q_proj": (8, 3 / 8), "model.layers.1.mlp.down_proj": (4, 5 / 4),
    }  # fmt: skip
    rooted = save(adapted(r=9, lora_alpha=2, use_rslora=True), tmp_path / "rooted")
    assert rooted.modules[QUERY].scaling == 2 / math.sqrt(9)


def test_dora_has_magnitudes(tmp_path: Path) -> None:
    model = adapted(use_dora=True, target_modules=["q_proj", "embed_tokens"])
    adapter = save(model, tmp_path)
    for path, weights in adapter.modules.items():
        layer = model.get_submodule(f"base_model.model.{path}")
        assert weights.magnitude is not None and weights.magnitude.dtype == torch.float32
        torch.testing.assert_close(weights.magnitude, layer.lora_magnitude_vector["default"].weight.data)


def test_the_bias_of_b_is_read(tmp_path: Path) -> None:
    model = adapted(lora_bias=True)
    adapter = save(model, tmp_path)
    layer = model.get_submodule(f"base_model.model.{QUERY}")
    assert torch.equal(adapter.modules[QUERY].bias, layer.lora_B["default"].bias)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_are_whole_tensors(bias: str, tmp_path: Path) -> None:
    model = adapted(bias=bias, target_modules=["q_proj"])
    adapter = save(model, tmp_path)
    layer = model.get_submodule(f"base_model.model.{QUERY}")
    assert torch.equal(adapter.saved[f"{QUERY}.bias"], layer.base_layer.bias)
    assert ("model.layers.1.self_attn.k_proj.bias" in adapter.saved) == (bias == "all")
    assert not adapter.base_copies


def test_modules_to_save_are_whole_tensors(tmp_path: Path) -> None:
    classifier = sequence_classifier()
    settings = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"])
    model = randomize(get_peft_model(classifier, settings))
    adapter = save(model, tmp_path)
    score = model.base_model.model.score.modules_to_save["default"].weight
    assert set(adapter.saved) == {"score.weight"} and torch.equal(adapter.saved["score.weight"], score)


def test_an_embeddings_copy_is_named(tmp_path: Path) -> None:
    model = adapted(target_modules=["embed_tokens"])
    adapter = save(model, tmp_path)
    table = model.base_model.model.model.embed_tokens.base_layer.weight
    assert adapter.base_copies == {"model.embed_tokens.weight"}
    assert torch.equal(adapter.saved["model.embed_tokens.weight"], table)
    assert adapter.modules["model.embed_tokens"].embedding


RENAMED: dict[str, Callable[[str], str]] = {
    "default": lambda name: name.replace(".weight", ".default.weight"),
    "another adapter": lambda name: name.replace(".weight", ".my-adapter.weight"),
    "without prefix": lambda name: name.removeprefix("base_model.model."),
    "compiled": lambda name: name.replace("model.layers", "_orig_mod.model.layers"),
    "fsdp": lambda name: name.replace(".self_attn", "._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn"),
    "ddp": lambda name: f"module.{name}",
}


@pytest.mark.parametrize("sort", RENAMED)
def test_names_of_trainers_mean_the_same(sort: str, tmp_path: Path) -> None:
    adapter = save(adapted(), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({RENAMED[sort](name): tensor for name, tensor in tensors.items()}, file)
    renamed = read_adapter(tmp_path, BOUNDS)
    assert set(renamed.modules) == set(adapter.modules)
    assert all(torch.equal(renamed.modules[path].lora_a, adapter.modules[path].lora_a) for path in adapter.modules)


def test_a_path_within_a_model_of_several_parts_stays(tmp_path: Path) -> None:
    name = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.ones(8, 3), name.format("B"): torch.ones(5, 8)}
    write_adapter(tmp_path, {"peft_type": "LORA"}, tensors)
    assert set(read_adapter(tmp_path, BOUNDS).modules) == {"model.language_model.layers.0.mlp.up_proj"}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """With the settings as PEFT holds them, sets and enums in them."""
    model = adapted(target_modules=["q_proj"])
    model.save_pretrained(tmp_path / "pefts")
    tensors = load_file(tmp_path / "pefts" / "adapter_model.safetensors")
    write_adapter(tmp_path / "ours", model.peft_config["default"].to_dict(), tensors)
    digests = {adapter_digest(tmp_path / name) for name in ("pefts", "ours")}
    assert digests == {read_adapter(tmp_path / "ours", BOUNDS).digest}
    assert sorted(file.name for file in (tmp_path / "ours").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- digests


def edit(folder: Path, **entries: Any) -> bytes:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    return adapter_digest(folder)


def test_the_digest_is_of_what_changes_results(tmp_path: Path) -> None:
    digest = save(adapted(), tmp_path).digest
    assert edit(tmp_path, lora_dropout=0.5, target_modules=None, inference_mode=False) == digest
    assert edit(tmp_path, base_model_name_or_path="another", unknown="entry") == digest
    assert edit(tmp_path, lora_alpha=6.0, rank_pattern=None) == digest
    seen = {digest, edit(tmp_path, lora_alpha=7), edit(tmp_path, alpha_pattern={"a": 1, "b": 2})}
    seen |= {edit(tmp_path, alpha_pattern={"b": 2, "a": 1}), edit(tmp_path, use_rslora=True)}
    assert len(seen) == 5


def in_order(tensors: dict[str, Tensor]) -> bytes:
    """A safetensors file whose tensors lie in this order; the library sorts them."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        content = tensor.numpy().tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_the_digest_is_of_every_tensor(tmp_path: Path) -> None:
    seen = {save(adapted(), tmp_path).digest}
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    first = min(tensors)
    file.write_bytes(in_order(dict(sorted(tensors.items(), reverse=True))))
    assert {adapter_digest(tmp_path)} == seen
    for change in (
        {first: tensors[first] + 1e-6}, {first: tensors[first].double()}, {first + "s": tensors[first]},
        {first: tensors[first].reshape(-1)}, {"more": torch.ones(1)},
    ):  # fmt: skip
        rest = tensors if "more" in change else {name: each for name, each in tensors.items() if name != first}
        save_file(rest | change, file)
        seen.add(adapter_digest(tmp_path))
    assert len(seen) == 6


def test_a_file_that_changed_has_another_digest_at_once(tmp_path: Path) -> None:
    save(adapted(), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    before = adapter_digest(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)  # the same size and inode
    assert adapter_digest(tmp_path) == read_adapter(tmp_path, BOUNDS).digest != before
